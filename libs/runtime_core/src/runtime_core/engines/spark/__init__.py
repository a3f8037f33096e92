"""Spark, by Spark Connect. Nothing here starts Java or loads PySpark before an engine or a gateway uses it.

1. `backend` is what the driver process calls.
2. `connect` starts a local server if no other one is named, and opens sessions on any.
3. `calls` runs functions on the executors, alone or with many items.
4. `worker` is the code on the executors.
5. `jobs` runs `def job(spark, **arguments)` in the driver, and turns the tables that jobs return into results.

SparkEngine is in `engines/driver/driver.py`.
"""
