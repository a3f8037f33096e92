"""The agent-handler as a process: `python -m services.agent_handler`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(["agent-handler"]))
