"""The spark-gateway as a process: `python -m services.spark_gateway`."""

from runtime_core.host.service import serve
from services.spark_gateway.wiring import build

if __name__ == "__main__":
    serve("spark-gateway", build)
