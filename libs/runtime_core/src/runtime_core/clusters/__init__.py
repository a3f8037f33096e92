"""Ray and Spark: gateways that serve their engines, and the driver processes that hold the connections.

1. `gateway` reads the steps of one engine and commits what they return.
2. `driver` starts and runs the separate process that is connected to the cluster.
3. `ray` and `spark` are the backends of that process.
4. `remote` runs a registered function in a worker process of the cluster.
5. `engines` has RayEngine and SparkEngine, for programs without a gateway.
"""
