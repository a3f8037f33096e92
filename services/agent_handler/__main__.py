"""The agent-handler as a process: `python -m services.agent_handler`."""

from runtime_core.host.service import serve
from services.agent_handler.wiring import build

if __name__ == "__main__":
    serve("agent-handler", build)
