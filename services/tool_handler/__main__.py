"""The tool-handler as a process: `python -m services.tool_handler`."""

from runtime_core.host.service import serve
from services.tool_handler.wiring import build

if __name__ == "__main__":
    serve("tool-handler", build)
