"""Tasks, runners and swarms by AWorld's names, over the same durable runs as every agent; `weft.aworld` exports them.

`task`, `swarm` are what a user gives; `runner`, `orchestration` carry a task out; `described` and `declared` make it a
durable agent; `task_app`, `place`, `runners`, `ray` say where it runs; `events` and `nodes` are AWorld's messages and
StateManager.
"""
