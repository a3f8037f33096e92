"""The ray-gateway as a process: `python -m services.ray_gateway`."""

from functools import partial

from runtime_core.clusters.gateway import RAY
from runtime_core.host import gateway
from runtime_core.host.service import serve

build = partial(gateway.build, RAY)

if __name__ == "__main__":
    serve("ray-gateway", build)
