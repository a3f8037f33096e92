"""A program's side of tasks.

1. `client` submits tasks, publishes messages and manages schedules. `task` waits for an answer and reads the stream.
2. `task_view` shows and lists tasks. `doctor` checks the installation.
3. `fork` starts a task with the recorded steps of another one. `replay` runs code again with recorded results.
"""
