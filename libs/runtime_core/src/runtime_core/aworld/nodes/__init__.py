"""Work as nodes with a status.

`state_manager` is the API, with its waits. `runs` has the runs of tasks, and `stored` the nodes and groups that user
code creates.
"""
