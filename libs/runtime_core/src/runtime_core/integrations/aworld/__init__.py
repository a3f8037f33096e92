"""Tasks, runners and swarms with AWorld's names, on the same durable runs as every agent; `weft.aworld` exports them.

1. `task` is what a user gives; `description` is the same as JSON. `topology` is the shape of a swarm.
2. `runner` executes a task; `orchestration` has swarms and runs them, with agents and tools as objects.
3. `runners` starts tasks. `target` is where they run: here, on services, or in a cluster (`engines`).
4. `listeners` gets the events of a running task, and `response` completes its response.
5. `events` and `nodes` are AWorld's messages and StateManager.
"""
