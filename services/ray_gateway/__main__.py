"""The ray-gateway as a process: `python -m services.ray_gateway`."""

from runtime_core.host.service import serve
from services.ray_gateway.wiring import build

if __name__ == "__main__":
    serve("ray-gateway", build)
