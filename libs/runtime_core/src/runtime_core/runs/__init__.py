"""Durable runs of agents.

`turn` handles one delivery: it loads a `run`, advances it by one turn and commits the effects.

Reading order:

1. `definition`, `policy`: the forms of agent that a program declares
2. `ports`: what a run needs from others
3. `context`: what the agent's code sees, and the methods that make steps
4. `step`: what all kinds of steps have, and the steps that this process performs itself. The other kinds: `calls`
   (others perform them, or nobody waits for them), `model_step` and `engine_calls`; `branches` runs several at once
5. `scheduler`: which branches run and which wait, how steps are numbered, and how all of it is stopped
6. `run`: the turn, and the rule that wakes the run again; `journal` and `sharing` hold its data,
   and `shared_context` is what its branches fork and merge
7. `turn` and `commit`: the broker's side of a turn

`guest` and `guest_loop` run code that starts its own asyncio tasks.
"""
