"""Tasks that start at a time, or again and again.

1. `cron.py`        the times of a cron expression, in a time zone
2. `definition.py`  one schedule: what it starts, when, and what has become of it
3. `store.py`       schedules on the broker: set, list, remove, run now
4. `scheduler.py`   starts what is due; run by the state-manager's leader, and by a LocalApp
5. `verbs.py`       what a client may do with schedules
"""
