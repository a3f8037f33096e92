"""The trajectory-recorder as a process: `python -m services.trajectory_recorder`."""

import sys

from runtime_core.host.service import main

if __name__ == "__main__":
    sys.exit(main(["trajectory-recorder"]))
