"""The tool-handler as a process: `python -m services.tool_handler`."""

from runtime_core.host.service import serve
from runtime_core.host.tool_handler import build

if __name__ == "__main__":
    serve("tool-handler", build)
