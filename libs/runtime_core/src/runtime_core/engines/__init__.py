"""Where engine functions run: in this process, on Ray and on Spark.

1. `function` is what an app declares, `results` what its calls return, and `protocol` what all engines share.
2. `local` and `pool` run calls on this machine; `runtime_engine` is the API of an engine object.
3. `driver` starts the separate process that is connected to a cluster; `ray` and `spark` are its backends. A gateway
   (`calls.engine_gateway`) has one, and so do RayEngine and SparkEngine, for programs without a gateway.
4. `mapping` runs a function with many items on a cluster, and `remote` runs a function in one of its worker processes.
"""
