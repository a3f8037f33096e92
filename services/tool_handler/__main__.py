"""The tool-handler as a process: `python -m services.tool_handler`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(["tool-handler"]))
