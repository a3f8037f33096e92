"""Whole tasks on Ray or Spark: the handlers of their app run in workers of a cluster.

`target` starts a driver process, and `packing` takes the app there. `ray_hosts` keeps the actors that run the handlers,
`spark_hosts` the calls on Spark's executors.
"""
