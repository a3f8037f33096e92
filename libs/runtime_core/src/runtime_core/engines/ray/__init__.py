"""Ray: functions as tasks and actors of a cluster, and commands as its batch jobs.

1. `backend` is what the driver process calls.
2. `cluster` has its settings, the connection, the check for a lost head, and a local Ray.
3. `holder` is an actor in the cluster that holds work with a key, so that the work outlives the driver.
4. `calls` runs one call as a task, on a long-lived actor, or as a batch job.
5. `worker` is the code in Ray's worker processes.

Only `cluster` and `worker` can be imported where Ray is not installed.
RayEngine is in `engines/driver/driver.py`.
"""
