"""Ray: functions as tasks and actors of a cluster, and commands as its batch jobs.

Reading order: `backend` (the driver process calls it), `settings`, `cluster` (the connection, how its loss is noticed,
and a local Ray), `keeper` (an actor in the cluster that holds work with a key, so that it outlives the driver), `calls`
(one call as a task or of an actor, and Ray's errors as ours), `mapping` (a function with many items), `worker` (the
code in Ray's workers), `batch` (the Jobs API). RayEngine is in `clusters/engines.py`.

Only `settings`, `cluster`, `mapping` and `worker` may be imported where Ray is not installed.
"""
