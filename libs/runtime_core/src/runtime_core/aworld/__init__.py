"""Tasks, runners and swarms by AWorld's names, over the same durable runs as every agent; `weft.aworld` exports them.

1. `task`, `swarm`: what a user gives
2. `runner`, `orchestration`, `handles` (agents and tools as a runner calls them): how a task is carried out
3. `described`, `declared`: a task as JSON, and the durable agents that run tasks
4. `runners`, `place`, `task_app`, `ray`: how a task is started, and where it runs
5. `events`, `nodes`: AWorld's messages and StateManager
"""
