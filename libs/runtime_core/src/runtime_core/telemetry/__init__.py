"""Metrics, logs and traces of a process.

1. `names` defines each metric, and `metrics` holds their values.
2. `logs` writes log lines.
3. `tracing` configures OpenTelemetry's SDK, `spans` makes spans, `trace_context` carries their context, and
   `attributes` has the names of their attributes. `gen_ai` describes model calls.
4. `redaction` removes secrets from all of these, by the rules of `secret_search`.
"""
