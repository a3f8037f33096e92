"""The only definition of every metric: its name, kind, labels and meaning.

The emitting code, docs/metrics.md, dashboards, alerts and tests read it here.

Label values come from small fixed sets (services, outcomes, reasons, streams) or from what apps declare (agents, tools,
models). Ids of tasks or runs and keys of instances are never labels, since each label value is a separate time series.
Only the tenants with the most waiting tasks have a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 14_400.0, 86_400.0),
)

HANDLERS = "agent-handler, tool-handler, gateways"
EVERY = "every service"
LEADER = "state-manager that leads the partition"
STATE_MANAGER = "state-manager"
RECORDER = "trajectory-recorder"
LEADERS = "state-manager, trajectory-recorder"
AGENTS = "agent-handler"
TOOLS = "tool-handler"
GATEWAYS = "gateways"
EMITTERS = (EVERY, HANDLERS, AGENTS, TOOLS, GATEWAYS, RECORDER, LEADERS, STATE_MANAGER, LEADER)
"""The groups of services that emit metrics, in the order of docs/metrics.md."""


class MetricType(StrEnum):
    """A metric's type, in Prometheus' terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricName:
    """One metric as Prometheus shows it. A counter's name ends with `_total`."""

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()
    by: str = EVERY
    """The services that emit it."""
    attention: str = ""
    """The value that needs attention, and its meaning."""
    unit: str = ""
    """`seconds`, `bytes`, …; empty for a plain count."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series. `labels` are in the metric's order, without the first one, the partition."""

    metric: MetricName
    value: float
    labels: tuple[str, ...] = ()


def _counter(
    name: str, about: str, labels: tuple[str, ...] = (), by: str = EVERY, attention: str = "", unit: str = ""
) -> MetricName:
    return MetricName(name, MetricType.COUNTER, about, labels, by, attention, unit)


def _gauge(
    name: str, about: str, labels: tuple[str, ...] = (), by: str = EVERY, attention: str = "", unit: str = ""
) -> MetricName:
    return MetricName(name, MetricType.GAUGE, about, labels, by, attention, unit)


def _seconds(name: str, about: str, labels: tuple[str, ...] = (), by: str = EVERY, attention: str = "") -> MetricName:
    return MetricName(name, MetricType.HISTOGRAM, about, labels, by, attention, "seconds")


# -- every service ---------------------------------------------------------------------------------------------------

BUILD_INFO = _gauge(
    "weft_build_info", "Always 1; the labels name the service and its versions.", ("service", "version", "python")
)
BROKER_CONNECTED = _gauge(
    "weft_broker_connected", "1 while the broker confirms this process's heartbeats, otherwise 0.", ("service",),
    attention="0 for longer than a restart of the broker",
)  # fmt: skip
HEARTBEAT_AGE = _gauge(
    "weft_heartbeat_age_seconds", "Time since the broker last confirmed this owner's heartbeat.", ("service",),
    attention="it comes close to `WEFT_LEASE_SECONDS`: others will reclaim its deliveries", unit="seconds",
)  # fmt: skip
STALLED = _gauge(
    "weft_stalled_seconds",
    "How long work has waited without progress in this process while the broker answered, beyond the longest time limit"
    " of its agents or tools; 0 if none waits.",
    ("service",), attention="it grows: `/healthz` fails at 30 s or 10 leases, whichever is longer", unit="seconds",
)  # fmt: skip
QUARANTINE = _gauge(
    "weft_quarantine_seconds",
    "How long this handler has taken no new work, since a delivery that was delivered too often runs alone; else 0.",
    ("service",), HANDLERS, "it grows and the stream has no other reader: `weft doctor` names the task", "seconds",
)  # fmt: skip
LOOP_LAG = _gauge(
    "weft_loop_lag_seconds", "How late the event loop woke up from its last timed sleep.", ("service",),
    attention="above 0.1: something blocks it", unit="seconds",
)  # fmt: skip
SPANS_DROPPED = _counter(
    "weft_spans_dropped_total", "Spans that the trace collector did not accept.", ("service",),
    attention="it rises: the log has the collector's answer", unit="spans",
)  # fmt: skip
EVENTS_HANDLED = _counter(
    "weft_events_handled_total",
    "Settled deliveries by outcome. `handled` is the usual outcome; `stopped`: its task was over; `fenced`: this"
    " process had been declared dead; `bus_error`: it stays and is delivered again; `defect`: an error in Weft or of"
    " the server. The state-manager counts `admitted`, the trajectory-recorder `recorded`.",
    ("service", "outcome"), attention="any rise of `defect`",
)  # fmt: skip
DEAD_LETTERS = _counter(
    "weft_dead_letters_total", "Deliveries that will not be retried, by reason.", ("service", "reason"),
    attention="any rise: see [dead letters](operations.md#dead-letters)",
)  # fmt: skip

# -- handlers --------------------------------------------------------------------------------------------------------

HANDLER_SECONDS = _seconds(
    "weft_handler_seconds", "Time that a handler ran, from delivery to outcome, including waits for the broker.",
    ("service",), HANDLERS, "the tail grows",
)  # fmt: skip
COMMIT_SECONDS = _seconds(
    "weft_commit_seconds", "Time from sending a commit to the broker to its answer.", ("service",), HANDLERS,
    "it rises with the broker's load",
)  # fmt: skip
RETRIES = _counter(
    "weft_retries_total", "Failed attempts that will be retried.", ("service",), HANDLERS,
    "it rises: a dependency has problems",
)  # fmt: skip
FENCED_COMMITS = _counter(
    "weft_fenced_commits_total", "Commits refused because this owner had been declared dead.", ("service",), HANDLERS,
    "it rises: the process was paused, or its loop is blocked",
)  # fmt: skip
HOOK_FAILURES = _counter(
    "weft_hook_failures_total",
    "Hooks and callbacks that raised, timed out or returned wrong values, by point; a guard that fails denies.",
    ("service", "point"), AGENTS, "any rise: see [hooks](hooks.md#when-a-hook-fails)",
)  # fmt: skip
DUPLICATES_SUPPRESSED = _counter(
    "weft_duplicates_suppressed_total", "Repeated deliveries and commits that were recognized and had no effect.",
    ("service",), HANDLERS, "a burst after a restart of the broker is normal",
)  # fmt: skip
ADOPTED_DELIVERIES = _counter(
    "weft_adopted_deliveries_total", "Deliveries reclaimed from dead owners.", ("service",), HANDLERS,
    "it rises without a deployment: processes die",
)  # fmt: skip
IN_FLIGHT = _gauge(
    "weft_in_flight_deliveries",
    "Deliveries held and not settled; at most 256 per consumer (`WEFT_ENGINE_IN_FLIGHT` for a gateway).",
    ("service",), HANDLERS, "it stays at the limit: add replicas",
)  # fmt: skip

# -- agents and their models -----------------------------------------------------------------------------------------

AGENT_TURNS = _counter(
    "weft_agent_turns_total",
    "Turns of agents by outcome. `completed`: the run has ended; `suspended`: it waits for steps; `failed`: it has"
    " ended with an error; `retried`: the turn will be retried; `waits`: handed back without counting; `repeated`:"
    " another owner had done it; `cancelled`: the task was over; `lost`: it could not be settled here (see"
    " `weft_events_handled_total`).",
    ("agent", "outcome"), AGENTS, "the share of `failed` and `retried`",
)  # fmt: skip
AGENT_TURN_SECONDS = _seconds(
    "weft_agent_turn_seconds", "Duration of an agent's turn, including its commit.", ("agent",), AGENTS,
    "the tail grows: code waits in the turn instead of in a step",
)  # fmt: skip
MODEL_CALLS = _counter(
    "weft_model_calls_total",
    "Calls of language models: `answered`, or the type of the error, such as `RateLimited`, including calls that this"
    " process holds back because the provider has asked it to wait.",
    ("provider", "model", "outcome"), AGENTS, "the share of unanswered calls",
)  # fmt: skip
MODEL_CALL_SECONDS = _seconds(
    "weft_model_call_seconds", "Duration of a call of a language model.", ("provider", "model"), AGENTS,
    "the tail grows",
)  # fmt: skip
MODEL_FIRST_CHUNK_SECONDS = _seconds(
    "weft_model_first_chunk_seconds", "Time from calling a language model to the first chunk of a streamed answer.",
    ("provider", "model"), AGENTS, "people wait for the first word",
)  # fmt: skip
MODEL_TOKENS = _counter(
    "weft_model_tokens_total",
    "Tokens of language models: `input` and `output`; `cached` is a part of input, `reasoning` of output.",
    ("model", "type"), AGENTS, "it rises faster than the number of tasks", "tokens",
)  # fmt: skip
MODEL_COST = _counter(
    "weft_model_cost_total", "Cost of language models, by the prices that agents declare.", ("model",), AGENTS,
    "it rises faster than the number of tasks", "the currency of the prices",
)  # fmt: skip

# -- tools -----------------------------------------------------------------------------------------------------------

TOOL_CALLS = _counter(
    "weft_tool_calls_total",
    "Tool calls by outcome of the attempt: `completed`, `failed`, `retried` (will be retried), `waits` (handed back"
    " without counting), `repeated` (answered before), `cancelled` (the result is no longer needed), `lost` (it could"
    " not be settled here). From the 501st tool of a process on, the tool is `other`.",
    ("tool", "outcome"), TOOLS, "the share of `failed` and `retried`",
)  # fmt: skip
TOOL_CALL_SECONDS = _seconds(
    "weft_tool_call_seconds", "Duration of one attempt of a tool call.", ("tool",), TOOLS,
    "the tail comes close to the tool's `timeout_seconds`",
)  # fmt: skip
MCP_SERVER_UP = _gauge(
    "weft_mcp_server_up", "1 while an MCP server is connected, otherwise 0.", ("server",), TOOLS,
    "0 for longer than a restart",
)  # fmt: skip
MCP_RESTARTS = _counter(
    "weft_mcp_restarts_total", "Connections to MCP servers that were lost or failed.", ("server",), TOOLS,
    "it rises: search the log for the server's name",
)  # fmt: skip
MCP_CALLS = _counter(
    "weft_mcp_calls_total",
    "Calls of MCP servers' tools: `completed`, `error` (the tool's own), `timeout`, `lost`, `not_sent`, `cancelled`.",
    ("server", "outcome"), TOOLS, "the share of `lost` and `timeout`",
)  # fmt: skip

# -- gateways --------------------------------------------------------------------------------------------------------

ENGINE_STEPS = _counter(
    "weft_engine_steps_total",
    "Steps that a gateway held, by outcome: `completed`, `failed`, `retried`, `lost` (run again), `waits` and"
    " `unavailable` (the engine is unavailable), `requeued` (for a gateway of another app), `released` (cancelled, or"
    " left to another gateway).",
    ("engine", "end"), GATEWAYS, "the share of `lost` and `failed`",
)  # fmt: skip
ENGINE_STEP_SECONDS = _seconds(
    "weft_engine_step_seconds",
    "Time from taking a step to the end of its attempt, including its wait for capacity on the engine.",
    ("engine",), GATEWAYS, "the tail grows: the engine is full",
)  # fmt: skip
ENGINE_RUNNING = _gauge(
    "weft_engine_running", "Steps that are running on the engine.", ("engine",), GATEWAYS,
    "it stays at `WEFT_ENGINE_IN_FLIGHT`",
)  # fmt: skip
ENGINE_CONNECTED = _gauge(
    "weft_engine_connected", "1 while the gateway's driver is connected to the engine, otherwise 0.", ("engine",),
    GATEWAYS, "0 for longer than a restart of the engine",
)  # fmt: skip
ENGINE_DRIVER_STARTS = _counter(
    "weft_engine_driver_starts_total", "Driver processes that a gateway has started.", ("engine",), GATEWAYS,
    'it rises: search the log for "driver"',
)  # fmt: skip
ENGINE_DRIVER_MEMORY = _gauge(
    "weft_engine_driver_memory_bytes", "Memory that a gateway's driver process uses.", ("engine",), GATEWAYS,
    "it grows without bound", "bytes",
)  # fmt: skip

# -- trajectory-recorder ---------------------------------------------------------------------------------------------

RECORDED_ENTRIES = _counter(
    "weft_recorded_entries_total", "Record entries that were copied into the trajectory store.", ("partition",),
    RECORDER, "it does not increase while `weft_stream_lag_events` of `record` grows",
)  # fmt: skip
RECORDER_COMMIT_SECONDS = _seconds(
    "weft_recorder_commit_seconds", "Duration of one transaction of the trajectory store.", ("partition",), RECORDER,
    "the tail grows: the database is slow",
)  # fmt: skip

# -- leaders -------------------------------------------------------------------------------------------------------

IS_LEADER = _gauge(
    "weft_leader", "1 if this process leads the partition, otherwise 0.", ("service", "partition"), LEADERS,
    "the sum over the replicas of a service is not 1 for longer than a lease",
)  # fmt: skip

# -- state-manager ---------------------------------------------------------------------------------------------------

TASKS_ENDED = _counter(
    "weft_tasks_ended_total",
    "Ended tasks by agent and status. `other`: an agent that no app declares, as for hooks of a task's end.",
    ("agent", "status"), STATE_MANAGER,
    "the share of `failed`",
)  # fmt: skip
TASK_SECONDS = _seconds(
    "weft_task_duration_seconds", "Time from a task's start to its end.", ("status",), STATE_MANAGER, "the tail grows"
)
TASKS_REFUSED = _counter(
    "weft_tasks_refused_total",
    "Refused commands of the ingress stream: `unknown_agent`, `overloaded` (the sender may retry), `duplicate_id` (the"
    " id of the submit or the task is taken), `invalid`. Submits of the Python client that are refused do not count:"
    " the client gets the error.",
    ("partition", "reason"), STATE_MANAGER, "any rise: the message is in the log and the dead letter",
)  # fmt: skip

ANSWERS_TRIMMED = _counter(
    "weft_answers_trimmed_total",
    "Answers that were deleted from a registered publisher's streams: they exceeded `WEFT_ANSWERS_MAX_BYTES`, or were"
    " older than `WEFT_ANSWERS_RETENTION_SECONDS`. Answers that the publisher had deleted do not count.",
    ("publisher",), STATE_MANAGER, "any rise: the publisher does not read its answers, or does not delete them",
)  # fmt: skip

# -- measured on the broker by the leader of a partition --------------------------------------------------------

STREAM_LAG = _gauge(
    "weft_stream_lag_events", "Events of a stream that its group has not read yet.", ("partition", "stream", "group"),
    LEADER, "it grows: add replicas",
)  # fmt: skip
STREAM_PENDING = _gauge(
    "weft_stream_pending_events", "Events that were delivered but are not settled.", ("partition", "stream", "group"),
    LEADER, "it grows with little CPU in use: a dependency is slow",
)  # fmt: skip
STREAM_OLDEST_PENDING = _gauge(
    "weft_stream_oldest_pending_seconds", "Age of the oldest delivered event that is not settled; 0 if there is none.",
    ("partition", "stream", "group"), LEADER, "above the longest limit of your tools", "seconds",
)  # fmt: skip
STREAM_OLDEST_WAITING = _gauge(
    "weft_stream_oldest_waiting_seconds", "Age of the oldest event that is not read yet; 0 if there is none.",
    ("partition", "stream", "group"), LEADER, "above a few seconds: too few readers, or none", "seconds",
)  # fmt: skip
STREAM_READERS = _gauge(
    "weft_stream_readers", "Live consumers of a group: their heartbeat is within the lease.",
    ("partition", "stream", "group"), LEADER, "0 with a lag above 0: there is no reader",
)  # fmt: skip
NAMES_UNSERVED = _gauge(
    "weft_unserved_runs",
    "Runs and calls that wait for an agent or a tool that no running handler has, by name; a lower bound above 200.",
    ("partition", "kind", "name"), LEADER, "any value: start a handler that has this name, or roll back",
)  # fmt: skip
MAILBOX_WAITING = _gauge(
    "weft_mailbox_waiting_events",
    "Events in mailboxes of agent instances; a lower bound if over 1,000 mailboxes hold over 50 events each.",
    ("partition",), LEADER, "it grows: instances handle one event at a time; use more keys",
)  # fmt: skip
MAILBOX_DEEPEST = _gauge(
    "weft_mailbox_deepest_events", "Events in the deepest mailbox.", ("partition",), LEADER,
    "it comes close to `WEFT_MAILBOX_MAX`",
)  # fmt: skip
TIMERS_WAITING = _gauge("weft_timers_waiting", "Timers that are set.", ("partition",), LEADER)
TIMERS_DUE = _gauge(
    "weft_timers_due", "Timers that are due but not promoted yet.", ("partition",), LEADER,
    "it does not fall to 0: no handler runs",
)  # fmt: skip
TIMERS_LATE = _gauge(
    "weft_timers_late_seconds", "How late the oldest due timer is; 0 if none is due.", ("partition",), LEADER,
    "above a few seconds: no handler runs, or the broker is busy", "seconds",
)  # fmt: skip
TASKS_OPEN = _gauge(
    "weft_tasks_open", "Accepted tasks that have not ended.", ("partition",), LEADER, "it grows without bound"
)
TASKS_QUEUED = _gauge(
    "weft_tasks_queued",
    "Tasks, and calls of running ones, that wait for their tenants' turns: the 20 tenants with most; others are `*`, "
    "the unnamed one is `-`.",
    ("partition", "tenant"), LEADER, "it grows without bound: a tenant submits more than its share of handlers can do",
)  # fmt: skip
SCHEDULE_BYTES = _gauge(
    "weft_schedule_bytes",
    "Bytes of the schedules of each tenant with publishers, counted once a minute: the 20 tenants with most; all other "
    "schedules are `*`.",
    ("partition", "tenant"), LEADER, "near `WEFT_TENANT_SCHEDULES_MAX_BYTES`: its next ones are rejected", "bytes",
)  # fmt: skip
LIMIT_SLOTS = _gauge(
    "weft_limit_slots_held",
    "Open runs and calls that hold slots of limits, by `agent:<name>` or `tool:<name>`; `*`: all.",
    ("partition", "name"), LEADER,
)  # fmt: skip
LIMIT_WAITING = _gauge(
    "weft_limit_waiting",
    "Runs and calls that wait for a slot of a limit, by `agent:<name>` or `tool:<name>`; `*`: all.",
    ("partition", "name"), LEADER, "it grows without bound: more is submitted than the limit lets through",
)  # fmt: skip
TASKS_ADMITTED = _counter(
    "weft_tasks_admitted_total",
    "Started tasks from all submitters. The broker counts them, so a new leader continues the count.",
    ("partition",), LEADER,
)  # fmt: skip
DEAD_LETTERS_KEPT = _gauge(
    "weft_dead_letters_kept", "Dead letters on the broker.", ("partition",), LEADER,
    "above 0: see [dead letters](operations.md#dead-letters)",
)  # fmt: skip
DEAD_LETTER_BYTES = _gauge(
    "weft_dead_letters_bytes", "Bytes of dead letters, by the stream that their deliveries came from.",
    ("partition", "stream"), LEADER, "the sum nears `WEFT_DEAD_MAX_BYTES`: the oldest will be trimmed", "bytes",
)  # fmt: skip
DEAD_LETTERS_TRIMMED = _counter(
    "weft_dead_letters_trimmed_total",
    "Dead letters that were deleted before anybody redrove or dropped them. `bytes`: together they exceeded"
    " `WEFT_DEAD_MAX_BYTES`, and this stream had the most; `age`: they were older than `WEFT_DEAD_RETENTION_SECONDS`."
    " The broker counts them, so a new leader continues the count.",
    ("partition", "stream", "cause"), LEADER, "any rise: see [dead letters](operations.md#dead-letters)",
)  # fmt: skip
BROKER_MEMORY = _gauge(
    "weft_broker_memory_bytes", "Memory that the broker uses.", ("partition",), LEADER,
    "above 80 % of the limit submits are refused", "bytes",
)  # fmt: skip
BROKER_MEMORY_LIMIT = _gauge(
    "weft_broker_memory_limit_bytes", "The broker's `maxmemory`; 0 if it has none.", ("partition",), LEADER,
    "0 on a shared machine", "bytes",
)  # fmt: skip
BROKER_CLIENTS = _gauge("weft_broker_clients", "Connections to the broker.", ("partition",), LEADER)
BROKER_UPTIME = _gauge(
    "weft_broker_uptime_seconds", "Time since the broker started.", ("partition",), LEADER,
    "it falls: the broker was restarted", "seconds",
)  # fmt: skip
BROKER_APPEND_ONLY_OK = _gauge(
    "weft_broker_append_only_ok", "1 if the append-only file is on and its last write succeeded, otherwise 0.",
    ("partition",), LEADER, "0: a restart of the broker loses work",
)  # fmt: skip
BROKER_EVICTED_KEYS = _gauge(
    "weft_broker_evicted_keys", "Keys that the broker has evicted since its start.", ("partition",), LEADER,
    "above 0: work was lost; set `noeviction`",
)  # fmt: skip
BROKER_PING = _gauge(
    "weft_broker_ping_seconds", "Duration of the last round trip to the broker.", ("partition",), LEADER,
    "above 0.1: a slow network, or a busy broker", "seconds",
)  # fmt: skip
MEASURED_AT = _gauge(
    "weft_measured_timestamp_seconds", "When the leader last measured the partition (Unix time).", ("partition",),
    LEADER, "it does not advance: the other metrics of the partition are stale", "seconds since 1970",
)  # fmt: skip

ALL = tuple(value for value in vars().values() if isinstance(value, MetricName))

# -- known label values: exported from the start, with 0, so that a first event is an increase ---------------

OUTCOMES = {
    "agent-handler": ("handled", "stopped", "fenced", "bus_error", "defect"),
    "tool-handler": ("handled", "stopped", "fenced", "bus_error", "defect"),
    "ray-gateway": ("handled", "stopped", "fenced", "bus_error", "defect"),
    "spark-gateway": ("handled", "stopped", "fenced", "bus_error", "defect"),
    "state-manager": ("admitted",),
    "trajectory-recorder": ("recorded",),
}
"""Outcomes of `weft_events_handled_total` by service."""
_OF_HANDLERS = ("attempts_used_up", "not_retryable", "poison", "unknown_name", "malformed", "defect")
REASONS = {
    "agent-handler": (*_OF_HANDLERS, "diverged"),
    "tool-handler": _OF_HANDLERS,
    "ray-gateway": _OF_HANDLERS,
    "spark-gateway": _OF_HANDLERS,
    "state-manager": ("rejected", "undeliverable"),
}
"""Reasons of `weft_dead_letters_total` by service."""
TRIM_CAUSES = ("bytes", "age")
"""Causes of `weft_dead_letters_trimmed_total`."""
REFUSALS = ("unknown_agent", "overloaded", "duplicate_id", "invalid")
"""Reasons of `weft_tasks_refused_total`."""
SHOWN_OUTCOMES = ("completed", "failed", "retried")
"""Outcomes of turns and calls that each agent and tool exports from the start."""
STEP_ENDS = ("completed", "failed", "retried", "lost", "waits", "unavailable", "requeued", "released")
"""Ends of `weft_engine_steps_total`."""
