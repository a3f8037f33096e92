"""Whole tasks on Ray or Spark: the handlers of their app run in workers of a cluster.

`target` starts a driver process. `packing` takes the app there and keeps the hosts that run its handlers: the actors
of `ray_hosts`, or the calls of `spark_hosts` on Spark's executors.
"""
