"""The trajectory-recorder as a process: `python -m services.trajectory_recorder`."""

from runtime_core.host.service import serve
from services.trajectory_recorder.wiring import build

if __name__ == "__main__":
    serve("trajectory-recorder", build)
