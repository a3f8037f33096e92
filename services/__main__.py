"""Any service as a process: `python -m services NAME`, or `SERVICE=NAME python -m services`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
