"""The state-manager as a process: `python -m services.state_manager`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(["state-manager"]))
