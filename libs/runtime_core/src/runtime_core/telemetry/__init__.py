"""What a process says of itself: `names` and `metrics`, `logs`, and the `endpoint` that serves them;
`gen_ai` (spans and attributes of model calls, with `gen_ai_messages`) and `redaction` (no secrets in any of it)."""
