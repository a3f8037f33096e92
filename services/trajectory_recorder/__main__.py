"""The trajectory-recorder as a process: `python -m services.trajectory_recorder`."""

from runtime_core.host.recorder import build
from runtime_core.host.service import serve

if __name__ == "__main__":
    serve("trajectory-recorder", build)
