"""The commands of clients as typed values: submit, cancel, signal, publish. An error names its field."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime_core.base.text import choices
from runtime_core.errors import InvalidInput
from runtime_core.wire import codec
from runtime_core.wire.codec import quoted
from runtime_core.wire.envelope import ANONYMOUS, Envelope, epoch_ms
from runtime_core.wire.events import streaming_mode
from runtime_core.wire.ids import (
    MAX_NAME_CHARACTERS,
    RESERVED_KEY_PREFIX,
    TASK_ID_RULE,
    checked_topic,
    fingerprint,
    has_control,
    is_task_id,
    task_id_of,
)

SUBMIT = "weft.task.submit"

MAX_SECONDS = 1_000_000_000
MAX_TASK_STEPS = 1_000_000_000
MAX_PRIORITY = 9
MAX_TOKENS = 1_000_000_000_000

ENGINES = ("local", "ray", "spark")
"""Where compute steps may run."""
_OWN_ENGINE = re.compile(r"[A-Za-z_][\w.]{0,199}:[A-Za-z_][\w.<>]{0,199}")


def is_own_engine(name: object) -> bool:
    """Return whether this names an engine of the user's own, as `package.module:Class`; only apps declare them."""
    return isinstance(name, str) and _OWN_ENGINE.fullmatch(name) is not None


DEFAULT_PRIORITY = 5

SUBMIT_FIELDS = ("agent", "input", "key", "task_id", "session_id", "conf", "hooks", "metadata")
CONF_FIELDS = (
    "max_steps",
    "timeout_seconds",
    "max_cost",
    "max_tokens",
    "engine",
    "engine_wait_seconds",
    "streaming_mode",
    "priority",
)


def data_of(envelope: Envelope) -> dict[str, object]:
    """Return the data of a command, which must be an object. Raises InvalidInput."""
    return as_object("data", codec.decode(envelope.data, envelope.datacontenttype))


def refuse_unknown(path: str, data: Mapping[str, object], known: Collection[str]) -> None:
    """Raise InvalidInput for a member of the object at `path` that is not in `known`; the field is its path."""
    for name in data:
        if name not in known:
            # Control characters in the name must not reach logs.
            field = f"{path}.{quoted(name)[1:-1]}" if path else quoted(name)[1:-1]
            raise InvalidInput(field, f"unknown; {choices(known)}")


def as_object(path: str, value: object) -> dict[str, object]:
    """Return the value if it is an object, else raise InvalidInput."""
    if not isinstance(value, dict):
        raise InvalidInput(path, f"{quoted(value)} is not an object")
    return value


def optional_object(path: str, value: object) -> dict[str, object]:
    """Return an optional object; null counts as absent and gives an empty one."""
    return {} if value is None else as_object(path, value)


def checked_text(path: str, value: object) -> str:
    """Return the value if it is a short text, else raise InvalidInput."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARACTERS or has_control(value):
        raise InvalidInput(
            path,
            f"{quoted(value)} is not text of 1 to {MAX_NAME_CHARACTERS} characters without control characters",
        )
    return value


def optional_name(data: Mapping[str, object], field: str) -> str:
    """Return an optional text; null counts as absent and gives an empty one."""
    value = data.get(field)
    return "" if value is None else checked_text(f"data.{field}", value)


def required_name(data: Mapping[str, object], field: str) -> str:
    """Return a required text. Raises InvalidInput if it is absent or invalid."""
    if data.get(field) is None:
        raise InvalidInput(f"data.{field}", "is missing")
    return optional_name(data, field)


def whole_number(path: str, value: object, most: int) -> int | None:
    """Return an optional whole number from 1 to `most`. Raises InvalidInput."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(path, f"{quoted(value)} is not a whole number from 1 to {most}")
    return value


def positive_number(path: str, value: object, most: float = math.inf, *, or_zero: bool = False) -> float | None:
    """Return an optional number above 0, or from 0 with `or_zero`, and at most `most`. Raises InvalidInput."""
    if value is None:
        return None
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= most or (value == 0 and or_zero))
    ):
        return float(value)
    lower = "from 0 up" if or_zero else "above 0"
    upper = "" if most == math.inf else f" and at most {most}"
    raise InvalidInput(path, f"{quoted(value)} is not a number {lower}{upper}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """Options of a submit, besides its agent, input, key and ids. Each has a default of the runtime."""

    timeout_seconds: float | None = None
    """The task fails if it takes longer."""
    max_steps: int | None = None
    """The task fails if it takes more steps."""
    max_tokens: int | None = None
    """The task fails if its runs and calls together use more (see `ctx.spend`)."""
    max_cost: float | None = None
    """The same for cost, in the currency that agents report."""
    priority: int | None = None
    """From 1 (last) to 9 (first) among the waiting tasks of its tenant; None: 5."""
    tenant: str = ""
    """The tenant of the task: while handlers are busy, tenants take turns."""
    hooks: Mapping[str, Sequence[str]] | None = None
    """Names of hooks of the agent's app, by hook point, in the order of the calls."""
    metadata: Mapping[str, Any] | None = None  # Any: JSON
    """Data for the agent, which reads it as `ctx.metadata`."""
    engine: str | None = None
    """The engine that `ctx.engine()` uses: `local` (the default), `ray` or `spark`."""
    engine_wait_seconds: float | None = None
    """How long a step waits for an unavailable engine; None: 60; 0: not at all."""
    event_id: str = ""
    """The id of the submit. With the client's `source` it identifies repeats from several processes."""
    traceparent: str = ""
    """The trace of the task (W3C Trace Context)."""


NO_OPTIONS = SubmitOptions()


def check_options(options: object) -> None:
    """Raise InvalidInput for options that are not a SubmitOptions."""
    if not isinstance(options, SubmitOptions):
        raise InvalidInput("options", f"{quoted(options)} is not a SubmitOptions, as in SubmitOptions(max_steps=50)")


@dataclass(slots=True)
class ForkJournal:
    """The journal that a fork begins with: results of another task, by step, as journal values."""

    task: str
    """The origin."""
    step: str
    """The first step that the fork executes itself; empty: all of them. `1/3`: step 3 of the run of step 1."""
    journal: dict[str, bytes] = field(default_factory=dict)
    """Steps of the first run. `1/3` is step 3 of the open run of step 1, and `1/` has the name of its agent.

    `@<branch>` has the number of pieces of output that a branch of the run has emitted: `@3.0.e` those of the branch of
    the steps `3.0.1`, `3.0.2`, ….
    """
    result: bytes = b""
    """JSON that replaces the result of `step`; empty: the fork executes that step itself."""
    started_ms: int = 0
    """The start time of the run for `ctx.now()`, in epoch milliseconds; 0: now."""


class Submission(msgspec.Struct):
    """A task to start, for a client, a command or the runtime, as the broker's `submit` takes it.

    `new_submission` checks input of users. Absent fields are empty.
    """

    task_id: str
    source: str
    event_id: str
    digest: str
    """16 hexadecimal digits: equal for equal submits."""
    agent: str
    input_json: bytes
    key: str = ""
    session_id: str = ""
    replyto: str = ""
    """The stream that gets the answer."""
    client: str = ""
    """The client that owns the reply stream `replyto`. It has one in each partition where its tasks start."""
    tenant: str = ""
    priority: int = DEFAULT_PRIORITY
    max_steps: int = 0
    """0: the runtime's default."""
    timeout_ms: int = 0
    """0: no limit."""
    deadline: int | None = None
    """Milliseconds since 1970; a task that cannot start before it is rejected."""
    limits: bytes = b""
    """Limits on its usage (JSON: `tokens`, `cost`); empty: no limit."""
    streamed: int = 0
    """1: the task streams its output; 2: also its steps."""
    engine: str = ""
    engine_wait_seconds: float | None = None
    hooks: dict[str, list[str]] = {}
    """Hook point → names, in the order of the call."""
    metadata: bytes = b""
    """JSON, an object."""
    traceparent: str = ""
    tracestate: str = ""
    context: bytes = b""
    """The context of the sender. It replaces the fields that travel with each event of the task (see `carried`)."""
    partition_key: str = ""
    """The text that determines the task's partition; empty: its id."""
    in_turn: bool = False
    """Whether it waits for its tenant's turn while its work stream is long; then its tenant's limits apply too."""
    epoch: str = ""
    """The epoch of the admitter that starts it; empty: a client starts it without one. `-`: a client starts it with a
    random id, and repeats it for five minutes at most.
    """
    claims: str = ""
    """With several partitions: tokens of the claims of its id and its task id, as `id|task_id`."""
    begun: ForkJournal | None = None
    """For a fork: the journal that it begins with."""

    def carried(self) -> bytes:
        """Return the context that travels with each event of the task (JSON), usually empty."""
        if self.context:
            return self.context
        context: dict[str, object] = {}
        if self.traceparent:
            context["traceparent"] = self.traceparent
        if self.tracestate:
            context["tracestate"] = self.tracestate
        if self.session_id:
            context["session_id"] = self.session_id
        if self.metadata:
            context["metadata"] = msgspec.Raw(self.metadata)
        if self.tenant:
            context["tenant"] = self.tenant
        if self.deadline is not None:
            context["deadline"] = self.deadline / 1000
        if self.engine_wait_seconds is not None:
            context["engine_wait_seconds"] = self.engine_wait_seconds
        if self.engine:
            context["engine"] = self.engine
        if self.hooks:
            context["hooks"] = self.hooks
        return msgspec.json.encode(context) if context else b""

    def time_limit_ms(self) -> int:
        """Return the shorter of the task's time limit and the time until its deadline; 0 for none."""
        if self.deadline is None:
            return self.timeout_ms
        left = max(1, self.deadline - time.time_ns() // 1_000_000)
        return min(self.timeout_ms, left) if self.timeout_ms else left


def new_submission(
    agent: object,
    input: object,
    *,
    source: str,
    event_id: str,
    key: object = None,
    task_id: object = None,
    session_id: object = None,
    stream: object = False,
    options: SubmitOptions = NO_OPTIONS,
) -> Submission:
    """Check a submit from any source and return it as a Submission.

    `stream` is a StreamingMode, or whether to stream the output. Raises InvalidInput, whose field has the name that it
    has on the wire (`data.conf.max_steps`).
    """
    if agent is None:
        raise InvalidInput("data.agent", "is missing; name the agent")
    if not isinstance(event_id, str):
        raise InvalidInput("id", f"{quoted(event_id)} is not text")
    name, data = checked_text("data.agent", agent), _json("data.input", input)
    new = Submission("", source, event_id, "", name, data, in_turn=True)
    given: dict[str, object] = {"agent": agent, "input": input}
    if key is not None:
        given["key"] = new.key = _instance_key(key)
    if task_id is None:
        new.task_id = default_task_id(source, event_id)
    else:
        given["task_id"] = new.task_id = checked_task_id(task_id)
    if session_id is not None:
        given["session_id"] = new.session_id = checked_text("data.session_id", session_id)
    conf: dict[str, object] = {}
    if isinstance(stream, bool):
        new.streamed = int(stream)
    else:
        mode = streaming_mode("data.conf.streaming_mode", stream)
        conf["streaming_mode"], new.streamed = mode.value, 2 if mode.steps else 1
    if options is not NO_OPTIONS:
        _take_options(new, options, conf, given)
    if conf:
        given["conf"] = conf
    new.digest = digest(SUBMIT, given)
    return new


def _take_options(new: Submission, options: SubmitOptions, conf: dict[str, object], given: dict[str, object]) -> None:
    """Check the options and set them on `new`; add to `conf` and `given` what counts for the digest."""
    limits: dict[str, object] = {}
    if (max_steps := whole_number("data.conf.max_steps", options.max_steps, MAX_TASK_STEPS)) is not None:
        conf["max_steps"] = new.max_steps = max_steps
    if (seconds := positive_number("data.conf.timeout_seconds", options.timeout_seconds, MAX_SECONDS)) is not None:
        conf["timeout_seconds"] = seconds
        new.timeout_ms = max(1, int(seconds * 1000))
    if (tokens := whole_number("data.conf.max_tokens", options.max_tokens, MAX_TOKENS)) is not None:
        conf["max_tokens"] = limits["tokens"] = tokens
    if (cost := positive_number("data.conf.max_cost", options.max_cost)) is not None:
        conf["max_cost"] = limits["cost"] = cost
    if (priority := whole_number("data.conf.priority", options.priority, MAX_PRIORITY)) is not None:
        conf["priority"] = new.priority = priority
    wait = positive_number("data.conf.engine_wait_seconds", options.engine_wait_seconds, MAX_SECONDS, or_zero=True)
    if wait is not None:
        conf["engine_wait_seconds"] = new.engine_wait_seconds = wait
    if options.engine is not None:
        conf["engine"] = new.engine = _engine(options.engine)
    if limits:
        new.limits = msgspec.json.encode(limits)
    if options.hooks is not None and (hooks := _hooks(options.hooks)):
        given["hooks"] = new.hooks = hooks
    if options.metadata is not None and (metadata := _as_dict("data.metadata", options.metadata)):
        given["metadata"] = metadata
        new.metadata = _json("data.metadata", metadata)
        if len(new.input_json) + len(new.metadata) > codec.MAX_DATA_BYTES:
            raise InvalidInput(
                "data.metadata", f"with the input, is over the limit of {codec.MAX_DATA_BYTES} bytes; send a reference"
            )
    if options.tenant:
        new.tenant = checked_text("tenant", options.tenant)
    if options.traceparent:
        new.traceparent = checked_text("traceparent", options.traceparent)


def parse_submit(envelope: Envelope) -> Submission:
    """Return the submission in a `weft.task.submit`. Raises InvalidInput."""
    data = body_of(envelope, SUBMIT, SUBMIT_FIELDS)
    new = submission_of(
        data, source=envelope.source, event_id=envelope.id, tenant=envelope.tenant, traceparent=envelope.traceparent
    )
    new.replyto = envelope.replyto
    new.tracestate = envelope.tracestate
    new.deadline = epoch_ms("deadline", envelope.deadline) if envelope.deadline else None
    new.partition_key = envelope.partitionkey
    return new


def submission_of(
    data: Mapping[str, object], *, source: str, event_id: str, tenant: str = "", traceparent: str = ""
) -> Submission:
    """Return the submission in the data of a `weft.task.submit`. Raises InvalidInput."""
    if "input" not in data:
        raise InvalidInput("data.input", "is missing; send `null` if the agent needs none")
    conf = optional_object("data.conf", data.get("conf"))
    refuse_unknown("data.conf", conf, CONF_FIELDS)
    limits: dict[str, Any] = {name: value for name, value in conf.items() if name != "streaming_mode"}  # Any: unchecked
    hooks: Any = data.get("hooks")  # Any: unchecked, as above
    metadata: Any = data.get("metadata")
    mode = conf.get("streaming_mode")
    return new_submission(
        data.get("agent"),
        data["input"],
        source=source,
        event_id=event_id,
        key=data.get("key"),
        task_id=data.get("task_id"),
        session_id=data.get("session_id"),
        stream=False if mode is None else streaming_mode("data.conf.streaming_mode", mode),
        options=SubmitOptions(tenant=tenant, traceparent=traceparent, hooks=hooks, metadata=metadata, **limits),
    )


def data_of_submit(
    agent: object, input: object, *, key: str = "", session_id: str = "", options: SubmitOptions = NO_OPTIONS
) -> dict[str, object]:
    """Return the data of a `weft.task.submit`, unchecked and without absent members."""
    conf = {name: value for name in CONF_FIELDS if (value := getattr(options, name, None)) is not None}
    given = {
        "key": key,
        "session_id": session_id,
        "conf": conf,
        "hooks": options.hooks,
        "metadata": options.metadata,
    }
    return {"agent": agent, "input": input, **{name: value for name, value in given.items() if value}}


def digest(type: str, data: object) -> str:
    """Return 16 hexadecimal digits derived from a command's type and decoded data, whatever its encoding."""
    return fingerprint(type, codec.canonical(data).decode())


def default_task_id(source: str, event_id: str) -> str:
    """Return the task id of a submit that names none. The id's partition keeps the source and id of every submit."""
    if source == ANONYMOUS and is_task_id(event_id):
        return event_id
    return task_id_of(source, event_id)


def body_of(envelope: Envelope, type: str, known: Collection[str]) -> dict[str, object]:
    """Return the data of a command of this type, which may only have these members. Raises InvalidInput."""
    if envelope.type != type:
        raise InvalidInput("type", f"{quoted(envelope.type)} is not `{type}`")
    data = data_of(envelope)
    refuse_unknown("data", data, known)
    return data


def _json(path: str, value: object) -> bytes:
    """Return the value as JSON. Raises InvalidInput if JSON cannot hold it, or it is too large for an event."""
    try:
        data = codec.encode(value)
    except InvalidInput as error:
        raise InvalidInput(path, error.message) from error
    if len(data) > codec.MAX_DATA_BYTES:
        raise InvalidInput(
            path, f"is {len(data)} bytes, over the limit of {codec.MAX_DATA_BYTES}; store it and send a reference"
        )
    return data


def _as_dict(path: str, value: object) -> dict[str, object]:
    return as_object(path, dict(value) if isinstance(value, Mapping) else value)


def _instance_key(value: object) -> str:
    key = checked_text("data.key", value)
    if key.startswith(RESERVED_KEY_PREFIX):
        raise InvalidInput(
            "data.key",
            f"{quoted(key)} begins with `{RESERVED_KEY_PREFIX}`, which is reserved for the runtime",
        )
    return key


def checked_task_id(value: object) -> str:
    """Return the value if it is a task id, else raise InvalidInput."""
    if not isinstance(value, str) or not is_task_id(value):
        raise InvalidInput("data.task_id", f"{quoted(value)} is not a task id: {TASK_ID_RULE}")
    return value


def _engine(value: object) -> str:
    if not isinstance(value, str) or not (value in ENGINES or is_own_engine(value)):
        raise InvalidInput(
            "data.conf.engine",
            f"{quoted(value)} is not an engine; choose from {', '.join(ENGINES)}, and package.module:Class that an app "
            "has declared",
        )
    return value


def _hooks(value: object) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for point, names in _as_dict("data.hooks", value).items():
        path = f"data.hooks.{quoted(point)[1:-1]}"
        checked_text(path, point)
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise InvalidInput(path, f"{quoted(names)} is not a list of names")
        hooks[point] = [checked_text(f"{path}.{place}", name) for place, name in enumerate(names)]
    return hooks


CANCEL = "weft.task.cancel"
SIGNAL = "weft.task.signal"
PUBLISH = "weft.topic.publish"


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.cancel`."""

    task_id: str
    reason: str = ""
    source: str = ANONYMOUS
    event_id: str
    replyto: str = ""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.signal`: the answer to a question."""

    task_id: str
    request_id: str
    value_json: bytes
    source: str = ANONYMOUS
    event_id: str
    replyto: str = ""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.topic.publish`: a message to all subscribers of a topic."""

    topic: str
    topic_source: str
    """The instance key for each agent that gets it; empty: a new instance."""
    data_json: bytes
    message_id: str
    """Derived from source and id."""
    traceparent: str = ""
    tenant: str = ""


def parse_cancel(envelope: Envelope) -> Cancellation:
    """Return the cancellation in a `weft.task.cancel`. Raises InvalidInput."""
    data = body_of(envelope, CANCEL, ("task_id", "reason"))
    reason = data.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise InvalidInput("data.reason", f"{quoted(reason)} is not text")
    return Cancellation(
        task_id=_required_task_id(data),
        reason=reason or "",
        source=envelope.source,
        event_id=envelope.id,
        replyto=envelope.replyto,
    )


def parse_signal(envelope: Envelope) -> Signal:
    """Return the answer in a `weft.task.signal`. Raises InvalidInput."""
    data = body_of(envelope, SIGNAL, ("task_id", "request_id", "value"))
    task_id = _required_task_id(data)
    request_id = required_name(data, "request_id")
    if "value" not in data:
        raise InvalidInput("data.value", "is missing; send `null` for an empty answer")
    return Signal(
        task_id=task_id,
        request_id=request_id,
        value_json=codec.encode(data["value"]),
        source=envelope.source,
        event_id=envelope.id,
        replyto=envelope.replyto,
    )


def parse_publish(envelope: Envelope) -> Publication:
    """Return the message in a `weft.topic.publish`. Raises InvalidInput."""
    data = body_of(envelope, PUBLISH, ("topic", "source", "data"))
    topic = required_name(data, "topic")
    try:
        checked_topic(topic)
    except InvalidInput as error:
        raise InvalidInput("data.topic", error.message) from None
    if "data" not in data:
        raise InvalidInput("data.data", "is missing; send `null` for an empty message")
    return Publication(
        topic=topic,
        topic_source=optional_name(data, "source"),
        data_json=codec.encode(data["data"]),
        message_id=fingerprint(envelope.source, envelope.id, digits=32),
        traceparent=envelope.traceparent,
        tenant=envelope.tenant,
    )


def _required_task_id(data: Mapping[str, object]) -> str:
    if data.get("task_id") is None:
        raise InvalidInput("data.task_id", "is missing; name the task")
    return checked_task_id(data["task_id"])
