"""The spark-gateway as a process: `python -m services.spark_gateway`."""

from functools import partial

from runtime_core.clusters.gateway import SPARK
from runtime_core.host import gateway
from runtime_core.host.service import serve

build = partial(gateway.build, SPARK)

if __name__ == "__main__":
    serve("spark-gateway", build)
