"""Spark, by Spark Connect. Nothing here starts Java, or loads PySpark, before an engine or a gateway uses it.

Reading order: `backend` (what the driver process calls), `connect_server` (a local server, where no other one was
named), `sessions` (of that server: how one is made, and how a lost one is known), `calls` (functions on the executors),
`worker` and `worker_daemon` (what runs there), `maps` (many items), `jobs` (`def job(spark, **arguments)`), `tables`
(what they return), `in_thread` (since Spark's client blocks), `engine` (SparkEngine, for programs without a gateway).
"""
