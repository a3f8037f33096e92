"""Ray: functions as tasks and actors of a cluster, and commands as its batch jobs.

Reading order: `backend` (what the driver process calls), `settings`, `cluster` (the connection, and how its loss is
seen), `local_ray` (a Ray of one's own), `keeper` (an actor in the cluster that holds work with a key, so that it
outlives the driver), `execution` (one call, whatever its kind), `tasks`, `actors`, `mapping` (its kinds), `worker`
(what runs in Ray's workers), `failures` (Ray's errors in our words), `batch` (the Jobs API), `engine` (RayEngine, for
programs without a gateway).

Only `engine`, `settings`, `cluster`, `local_ray` and `worker` may be imported where Ray is not installed.
"""
