"""Tasks, runners and swarms with AWorld's names, on the same durable runs as every agent; `weft.aworld` exports them.

1. `task` and `swarm` are what a user gives. `topology` is the shape of a swarm, `description` a task as JSON.
2. `runner` executes a task; `orchestration` runs its swarm, with agents and tools as objects.
3. `runners` starts tasks; `target` and `ray` are where they run.
4. `events` and `nodes` are AWorld's messages and StateManager.
"""
