"""A ray-gateway or spark-gateway over a folder: `python -m tests.engine_backends.gateway ray`."""

from __future__ import annotations

import sys
from functools import partial

from runtime_core.engines.gateway.gateway import open_gateway
from runtime_core.engines.gateway.served import RAY, SPARK
from runtime_core.service import serve

if __name__ == "__main__":
    served = {"ray": RAY, "spark": SPARK}[sys.argv[1]]
    serve(f"{served.name}-gateway", partial(open_gateway, served, backend="tests.engine_backends.folder:Folder"))
