"""Durable runs of agents.

`turn` handles one delivery: it loads a `run`, advances it by one turn and commits the effects.

Reading order: `agent` and `definition` (what a program declares), `run`, `scheduler`, `context` (what its code
sees), `step`, `calls`, `local_steps`, `model_step`, `engine_calls`, `outgoing`, `branches` (the kinds of steps),
`journal`, `state`, `sharing` (what a run keeps), `suspension`, `failure`, `rows` (how a turn ends), `turn`,
`turn_port`, `commit` (what the broker gets), `foreign` (code with asyncio tasks of its own)."""
