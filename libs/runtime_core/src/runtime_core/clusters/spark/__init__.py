"""Spark, by Spark Connect. Nothing here starts Java, or loads PySpark, before an engine or a gateway uses it.

Reading order: `backend` (the driver process calls it), `connect_server` (a local server, if no other one is named),
`sessions` (how a session is made, and how a lost one is recognized), `calls` (functions on the executors, alone or with
many items), `worker` and `worker_daemon` (the code on the executors), `jobs` (`def job(spark, **arguments)`), `tables`
(what jobs return). SparkEngine is in `clusters/engines.py`.
"""
