"""The agent-handler as a process: `python -m services.agent_handler`."""

from runtime_core.host.agent_handler import build
from runtime_core.host.service import serve

if __name__ == "__main__":
    serve("agent-handler", build)
