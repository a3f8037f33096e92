"""What runs and what has run, as nodes with a status: `StateManager` and its parts.

Reading order: `node` (the values), `transitions` (which status may follow which), `stored` (nodes and groups that user
code makes, on the broker), `task_runs` and `recorded_runs` (the runs of tasks, on the broker and in the trajectory
store), `waits` (who waits is woken), `state_manager` (the face).
"""
