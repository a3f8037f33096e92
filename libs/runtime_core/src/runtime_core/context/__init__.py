"""What a session, its tasks and agents know together: `context` (the levels), `state` (values, own over parent's),
`merging` (how branches come together), `ledger` (tokens and counters), `snapshot` (JSON), `session` (across tasks)."""
