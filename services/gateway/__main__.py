"""The gateway as a process: `python -m services.gateway`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(["gateway"]))
