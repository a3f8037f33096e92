"""Durable runs of agents.

`turn` handles one delivery: it loads a `run`, advances it by one turn and commits the effects.

Reading order:

1. `agent`, `definition`, `policy`: the forms of agent that a program declares
2. `ports`: what a run needs from others
3. `context`: what the agent's code sees, and the methods that make steps
4. `step`: what all kinds of steps have. The kinds: `calls` (others perform them, or nobody waits for them),
   `local_steps`, `model_step`, `engine_calls` and `compute` (worker processes); `branches` runs several at once
5. `scheduler`: which branches run and which wait, how steps are numbered, and how all of it is stopped
6. `run`: the turn, and the rule that wakes the run again; `journal`, `state` and `sharing` hold its data
7. `failure` and `rows` (the end of a turn), `turn`, `turn_port` and `commit` (the broker's side of it)

`foreign` and `foreign_loop` run code that has asyncio tasks of its own.
"""
