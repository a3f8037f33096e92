"""The state-manager as a process: `python -m services.state_manager`."""

from runtime_core.host.service import serve
from services.state_manager.wiring import build

if __name__ == "__main__":
    serve("state-manager", build)
