"""Work as nodes with a status.

`state_manager` is the API, with its waits. `task_runs` reads the runs of tasks, and `store` keeps the nodes and groups
that user code creates.
"""
