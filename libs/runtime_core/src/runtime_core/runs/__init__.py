"""Durable runs of agents.

`turn` handles one delivery: it loads a `run`, advances it by one turn and commits the effects.

Reading order:

1. `definition`, `policy`: the forms of agent that a program declares
2. `context`: what the agent's code sees, and the methods that make steps
3. `step`: what all kinds of steps have, and the steps that this process performs itself. The other kinds: `calls`
   (others perform them, or nobody waits for them), `model_step` and `engine_calls`; `branches` runs several at once
4. `execution`: the data of one execution, as its steps see it. It holds the `journal`, the `scheduler` of its branches,
   its `output`, and the context that its code shares (`shared_context`). `ports` is what it needs from others
5. `run`: runs an execution turn by turn, and the rule that wakes it again
6. `hooks`: what runs around an agent's work, as steps of its run
7. `turn` and `commit`: the broker's side of a turn; `effects` is what a turn requests from its commit

Imports point down this order: turn, run, context, steps, execution, journal.

`guest` and `guest_loop` run code that starts its own asyncio tasks.
"""
