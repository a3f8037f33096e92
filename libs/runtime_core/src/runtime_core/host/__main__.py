"""A service as a process: `python -m runtime_core.host NAME`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
