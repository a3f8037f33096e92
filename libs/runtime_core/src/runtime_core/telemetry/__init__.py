"""Metrics, logs and traces of a process.

1. `names` defines each metric, and `metrics` holds their values.
2. `logs` writes log lines.
3. `tracing` configures OpenTelemetry's SDK, `spans` makes spans and names their attributes, and `trace_context` carries
   their context. `gen_ai` describes model calls.
4. `redaction` removes secrets from all of these, `json_redaction` from JSON, by the rules of `secret_search`.
"""
