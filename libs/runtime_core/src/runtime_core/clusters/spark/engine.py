"""SparkEngine: any functions on the executors of a Spark Connect server, for programs that have no gateway."""

from __future__ import annotations

from runtime_core.clusters.driver.engine import DriverEngine


class SparkEngine(DriverEngine):
    """Runs calls as queries of the server at `RunConfig.address`, or WEFT_SPARK_REMOTE, or on a local one of its own.

    Functions and arguments go through cloudpickle; workers import what stands in modules, so they need those. With no
    `worker_num` as many run at once as the server runs tasks. What is large goes through the server's memory, but for
    a local one of its own.
    """

    engine = "spark"
    package = "pyspark"
    cloudpickle = "pyspark.cloudpickle"
    address = "WEFT_SPARK_REMOTE"
