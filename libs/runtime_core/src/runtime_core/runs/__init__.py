"""Durable runs of agents.

`turn` handles one delivery: it loads a `run`, advances it by one turn and commits the effects.

Reading order: `agent` and `definition` (what a program declares), `run`, `scheduler`, `context` (what its code
sees), `step`, `local_steps`, `calls`, `engine_calls`, `branches`, `outgoing` (the kinds of steps), `journal`,
`state`, `sharing` (what a run keeps), `turn`, `turn_port`, `commit`, `rows`."""
