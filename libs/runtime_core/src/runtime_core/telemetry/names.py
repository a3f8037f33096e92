"""Every metric: its name, help and labels, once. Emitter, dashboard, alerts and tests read them here.

Label values come from small fixed sets (services, outcomes, reasons, streams): never ids of tasks or runs,
since each value of a label is a time series of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


@dataclass(frozen=True)
class MetricName:
    """One metric as Prometheus shows it. A counter's name ends with `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


EVENTS_HANDLED = MetricName(
    "weft_events_handled_total", "Deliveries that were settled, by how they ended.", ("service", "outcome")
)
HANDLER_SECONDS = MetricName("weft_handler_seconds", "Time that a handler ran, from delivery to outcome.", ("service",))
COMMIT_SECONDS = MetricName(
    "weft_commit_seconds", "Time from asking the broker for a commit to its answer.", ("service",)
)
RETRIES = MetricName("weft_retries_total", "Attempts that failed and will be made again.", ("service",))
DEAD_LETTERS = MetricName(
    "weft_dead_letters_total", "Deliveries that will not be tried again, by reason.", ("service", "reason")
)
FENCED_COMMITS = MetricName(
    "weft_fenced_commits_total", "Commits refused because this owner had been declared dead.", ("service",)
)
HOOK_FAILURES = MetricName(
    "weft_hook_failures_total", "Executions of hooks and callbacks that failed, by their point.", ("service", "point")
)
DUPLICATES_SUPPRESSED = MetricName(
    "weft_duplicates_suppressed_total",
    "Submits and deliveries that were recognised as repeated and had no effect.",
    ("service",),
)
ADOPTED_DELIVERIES = MetricName(
    "weft_adopted_deliveries_total", "Deliveries taken over from owners that died.", ("service",)
)
IN_FLIGHT = MetricName("weft_in_flight_deliveries", "Deliveries in hand that are not settled.", ("service",))
STREAM_LAG = MetricName(
    "weft_stream_lag_events", "Events of a stream that its group has not read yet.", ("stream", "group")
)
STREAM_PENDING = MetricName(
    "weft_stream_pending_events", "Events that were delivered and are not settled.", ("stream", "group")
)
STREAM_OLDEST_PENDING = MetricName(
    "weft_stream_oldest_pending_seconds", "Age of the oldest event that is not settled.", ("stream", "group")
)
TIMERS_DUE = MetricName("weft_timers_due", "Timers that are due and not promoted yet.", ("partition",))
TASKS_ENDED = MetricName("weft_tasks_ended_total", "Tasks that have ended, by their status.", ("status",))
TASK_SECONDS = MetricName("weft_task_duration_seconds", "Time from a task's start to its end.", ())
MODEL_CALLS = MetricName(
    "weft_model_calls_total",
    "Calls of language models that were made: answered, or by the type of their error.",
    ("provider", "model", "outcome"),
)
MODEL_CALL_SECONDS = MetricName(
    "weft_model_call_seconds", "Time that a call of a language model took.", ("provider", "model")
)
MODEL_TOKENS = MetricName(
    "weft_model_tokens_total",
    "Tokens of language models; cached ones are a part of input, reasoning of output.",
    ("model", "type"),
)
MODEL_COST = MetricName(
    "weft_model_cost_total", "Cost of language models, by the prices that agents state.", ("model",)
)
HEARTBEAT_AGE = MetricName(
    "weft_heartbeat_age_seconds", "Time since the broker last confirmed this owner's heartbeat.", ("service",)
)
MCP_SERVER_UP = MetricName("weft_mcp_server_up", "1 while an MCP server is connected, else 0.", ("server",))
MCP_RESTARTS = MetricName(
    "weft_mcp_restarts_total", "Connections to MCP servers that were lost or failed.", ("server",)
)
MCP_CALLS = MetricName("weft_mcp_calls_total", "Calls of MCP servers' tools, by how they ended.", ("server", "outcome"))
ENGINE_STEPS = MetricName(
    "weft_engine_steps_total", "Steps that a gateway had in hand, by how that ended.", ("engine", "end")
)
ENGINE_STEP_SECONDS = MetricName(
    "weft_engine_step_seconds", "Time from taking a step to the end of its attempt.", ("engine",)
)
ENGINE_RUNNING = MetricName("weft_engine_running", "Steps that run on the engine now.", ("engine",))
ENGINE_CONNECTED = MetricName(
    "weft_engine_connected", "1 while the gateway's driver is connected to the engine, else 0.", ("engine",)
)
ENGINE_DRIVER_STARTS = MetricName(
    "weft_engine_driver_starts_total", "Driver processes that a gateway has started.", ("engine",)
)
ENGINE_DRIVER_MEMORY = MetricName(
    "weft_engine_driver_memory_bytes", "Memory that a gateway's driver process holds.", ("engine",)
)
LOOP_LAG = MetricName(
    "weft_loop_lag_seconds", "How late the event loop woke up from its last timed sleep.", ("service",)
)
BUILD_INFO = MetricName("weft_build_info", "Always 1; the labels say what runs.", ("service", "version", "python"))
