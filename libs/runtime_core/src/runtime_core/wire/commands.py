"""What clients ask for: the commands as typed values, read field by field. An error names its field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from runtime_core import codec
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.ids import (
    MAX_NAME_CHARACTERS,
    RESERVED_KEY_PREFIX,
    TASK_ID_RULE,
    checked_topic,
    fingerprint,
    has_control,
    is_task_id,
    task_id_of,
)
from runtime_core.wire.envelope import ANONYMOUS, Envelope, epoch_ms
from runtime_core.wire.streaming import StreamingMode, streaming_mode


def data_of(envelope: Envelope) -> dict[str, object]:
    """The data of a command, which is an object."""
    return as_object("data", codec.decode(envelope.data, envelope.datacontenttype))


def refuse_unknown(path: str, data: Mapping[str, object], known: Collection[str]) -> None:
    """Raises InvalidInput for a member that is none of these, named by its path."""
    for name in data:
        if name not in known:
            # The field is a path of plain words wherever it is shown.
            raise InvalidInput(f"{path}.{quoted(name)[1:-1]}", f"unknown; known are {', '.join(known)}")


def as_object(path: str, value: object) -> dict[str, object]:
    """Raises InvalidInput for what is no object."""
    if not isinstance(value, dict):
        raise InvalidInput(path, f"{quoted(value)} is not an object")
    return value


def optional_object(path: str, value: object) -> dict[str, object]:
    """An optional object; null counts as absent, which is an empty one."""
    return {} if value is None else as_object(path, value)


def checked_text(path: str, value: object) -> str:
    """A short text. Raises InvalidInput."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARACTERS or has_control(value):
        raise InvalidInput(
            path,
            f"{quoted(value)} is not text of 1 to {MAX_NAME_CHARACTERS} characters, none of them a control",
        )
    return value


def optional_name(data: Mapping[str, object], field: str) -> str:
    """An optional text; null counts as absent."""
    value = data.get(field)
    return "" if value is None else checked_text(f"data.{field}", value)


def required_name(data: Mapping[str, object], field: str) -> str:
    """A text that must be there."""
    if data.get(field) is None:
        raise InvalidInput(f"data.{field}", "is missing")
    return optional_name(data, field)


def optional_whole(conf: Mapping[str, object], field: str, most: int) -> int | None:
    """An optional whole number from 1 to `most`, in `data.conf`."""
    value = conf.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(f"data.conf.{field}", f"{quoted(value)} is not a whole number from 1 to {most}")
    return value


def optional_positive(
    conf: Mapping[str, object], field: str, most: int | None, *, or_zero: bool = False
) -> float | None:
    """An optional number above 0, or from 0 up, at most `most`, in `data.conf`; None: without bound."""
    value = conf.get(field)
    if value is None:
        return None
    limit = math.inf if most is None else most
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= limit or (value == 0 and or_zero))
    ):
        return float(value)
    lower = "from 0 up" if or_zero else "above 0"
    upper = "" if most is None else f" and at most {most}"
    raise InvalidInput(f"data.conf.{field}", f"{quoted(value)} is not a number {lower}{upper}")


SUBMIT = "weft.task.submit"
CANCEL = "weft.task.cancel"
SIGNAL = "weft.task.signal"
PUBLISH = "weft.topic.publish"

MAX_SECONDS = 1_000_000_000
MAX_STEPS = 1_000_000_000
MAX_PRIORITY = 9
MAX_TOKENS = 1_000_000_000_000

ENGINES = ("local", "ray", "spark")
"""Where compute steps may run."""

_SUBMIT_FIELDS = ("agent", "input", "key", "task_id", "session_id", "conf", "hooks", "metadata")
_CONF_FIELDS = (
    "max_steps",
    "timeout_seconds",
    "max_cost",
    "max_tokens",
    "engine",
    "engine_wait_seconds",
    "run_mode",
    "streaming_mode",
    "priority",
)


class Conf(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of a task; None: the runtime's default."""

    max_steps: int | None = None
    timeout_seconds: float | None = None
    max_cost: float | None = None
    """In the currency in which agents report their `cost`."""
    max_tokens: int | None = None
    engine_wait_seconds: float | None = None
    """How long a step waits for an engine that is away; 0: not at all."""
    run_mode: str = ""
    """Name of the runner; empty: the agent's own."""
    streaming_mode: StreamingMode | None = None
    """What the task's stream shows; None: what a reader asks for."""
    priority: int | None = None
    """From 1 (last) to 9 (first) among waiting tasks of its tenant; None: 5."""
    engine: str = ""
    """What `ctx.engine()` stands for; empty: `local`."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.submit`. What is absent is empty."""

    task_id: str
    agent: str
    input_json: bytes
    key: str = ""
    session_id: str = ""
    conf: Conf = Conf()
    hooks: dict[str, list[str]] = {}
    """Hook point → names, in the order of the call."""
    metadata: dict[str, object] = {}
    source: str = ANONYMOUS
    event_id: str
    digest: str
    """16 hexadecimal digits over type and decoded data: equal for equal submits."""
    replyto: str = ""
    traceparent: str = ""
    tracestate: str = ""
    tenant: str = ""
    deadline: int | None = None
    """Milliseconds since 1970."""
    partition_key: str
    """What the task's partition is derived from."""


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
    """A valid `weft.topic.publish`: a message to all who have subscribed to a topic."""

    topic: str
    topic_source: str
    """The instance of each agent that gets it; empty: one of its own."""
    data_json: bytes
    message_id: str
    """The same for the same source and id."""
    traceparent: str = ""
    tenant: str = ""


def parse_submit(envelope: Envelope) -> Submission:
    """The submission in a `weft.task.submit`. Raises InvalidInput."""
    data = _body(envelope, SUBMIT, _SUBMIT_FIELDS)
    agent = required_name(data, "agent")
    if "input" not in data:
        raise InvalidInput("data.input", "is missing; send `null` where the agent needs none")
    task_id = data.get("task_id")
    task = default_task_id(envelope.source, envelope.id) if task_id is None else _task_id(task_id)
    return Submission(
        task_id=task,
        agent=agent,
        input_json=codec.encode(data["input"]),
        key=_key(data),
        session_id=optional_name(data, "session_id"),
        conf=_conf(data.get("conf")),
        hooks=_hooks(data.get("hooks")),
        metadata=optional_object("data.metadata", data.get("metadata")),
        source=envelope.source,
        event_id=envelope.id,
        digest=digest(envelope.type, data),
        replyto=envelope.replyto,
        traceparent=envelope.traceparent,
        tracestate=envelope.tracestate,
        tenant=checked_text("tenant", envelope.tenant) if envelope.tenant else "",
        deadline=epoch_ms("deadline", envelope.deadline) if envelope.deadline else None,
        partition_key=envelope.partitionkey or task,
    )


def parse_cancel(envelope: Envelope) -> Cancellation:
    """The cancellation in a `weft.task.cancel`. Raises InvalidInput."""
    data = _body(envelope, CANCEL, ("task_id", "reason"))
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
    """The answer in a `weft.task.signal`. Raises InvalidInput."""
    data = _body(envelope, SIGNAL, ("task_id", "request_id", "value"))
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
    """The message in a `weft.topic.publish`. Raises InvalidInput."""
    data = _body(envelope, PUBLISH, ("topic", "source", "data"))
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


def digest(type: str, data: object) -> str:
    """16 hexadecimal digits over a command's type and decoded data, whatever their spelling on the wire."""
    return fingerprint(type, codec.canonical(data).decode())


def default_task_id(source: str, event_id: str) -> str:
    """The task id of a submit that names none; its partition also keeps source and id of those that do."""
    if source == ANONYMOUS and is_task_id(event_id):
        return event_id
    return task_id_of(source, event_id)


def _body(envelope: Envelope, type: str, known: Collection[str]) -> dict[str, object]:
    if envelope.type != type:
        raise InvalidInput("type", f"{quoted(envelope.type)} is not `{type}`")
    data = data_of(envelope)
    refuse_unknown("data", data, known)
    return data


def _key(data: Mapping[str, object]) -> str:
    key = optional_name(data, "key")
    if key.startswith(RESERVED_KEY_PREFIX):
        raise InvalidInput(
            "data.key",
            f"{quoted(key)} begins with `{RESERVED_KEY_PREFIX}`, which the runtime keeps for itself",
        )
    return key


def _task_id(value: object) -> str:
    if not isinstance(value, str) or not is_task_id(value):
        raise InvalidInput("data.task_id", f"{quoted(value)} is not a task id: {TASK_ID_RULE}")
    return value


def _required_task_id(data: Mapping[str, object]) -> str:
    if data.get("task_id") is None:
        raise InvalidInput("data.task_id", "is missing; name the task")
    return _task_id(data["task_id"])


def _conf(value: object) -> Conf:
    conf = optional_object("data.conf", value)
    refuse_unknown("data.conf", conf, _CONF_FIELDS)
    run_mode, mode = conf.get("run_mode"), conf.get("streaming_mode")
    return Conf(
        max_steps=optional_whole(conf, "max_steps", MAX_STEPS),
        timeout_seconds=optional_positive(conf, "timeout_seconds", MAX_SECONDS),
        max_cost=optional_positive(conf, "max_cost", None),
        max_tokens=optional_whole(conf, "max_tokens", MAX_TOKENS),
        engine_wait_seconds=optional_positive(conf, "engine_wait_seconds", MAX_SECONDS, or_zero=True),
        run_mode="" if run_mode is None else checked_text("data.conf.run_mode", run_mode),
        streaming_mode=None if mode is None else streaming_mode("data.conf.streaming_mode", mode),
        priority=optional_whole(conf, "priority", MAX_PRIORITY),
        engine=_engine(conf.get("engine")),
    )


def _engine(value: object) -> str:
    if value is None:
        return ""
    if value not in ENGINES or not isinstance(value, str):
        raise InvalidInput("data.conf.engine", f"{quoted(value)} is no engine; there are {', '.join(ENGINES)}")
    return value


def _hooks(value: object) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for point, names in optional_object("data.hooks", value).items():
        path = f"data.hooks.{quoted(point)[1:-1]}"
        checked_text(path, point)
        if not isinstance(names, list):
            raise InvalidInput(path, f"{quoted(names)} is not a list of names")
        hooks[point] = [checked_text(f"{path}.{place}", name) for place, name in enumerate(names)]
    return hooks
