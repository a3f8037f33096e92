"""Driver processes: each holds the connection to one cluster and runs the calls that it gets.

`driver` starts a driver and talks to it, also for RayEngine and SparkEngine. `host` is what runs in it.
"""
