"""Ray and Spark: gateways that serve their engines, and the driver processes that hold the connections.

1. `gateway` reads the streams of its engine, and `step_handler` handles one delivery of a step.
2. `driver` runs the separate process that is connected to the cluster: `ray` or `spark`.
3. `remote` runs a registered function in a worker process of the cluster.
4. `engines` has RayEngine and SparkEngine, for programs without a gateway.
"""
