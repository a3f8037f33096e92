"""What clients ask for and are told: typed bodies of the commands, and builders of the facts.

A command is read once, here, and is valid from then on: `parse_submit`, `parse_cancel`, `parse_signal`. A
mistake is an InvalidInput whose field is a path (`data.conf.max_steps`) and whose message quotes the value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from runtime_core import codec
from runtime_core.codec import quoted
from runtime_core.envelope import ANONYMOUS, Envelope, epoch_ms, rfc3339
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.identifiers import (
    MAX_NAME_CHARACTERS,
    RESERVED_KEY_PREFIX,
    TASK_ID_RULE,
    event_id,
    fingerprint,
    has_control,
    is_task_id,
    task_id_of,
)

SUBMIT = "weft.task.submit"
CANCEL = "weft.task.cancel"
SIGNAL = "weft.task.signal"
ACCEPTED = "weft.task.accepted"
REJECTED = "weft.task.rejected"
COMPLETED = "weft.task.completed"
FAILED = "weft.task.failed"
CANCELLED = "weft.task.cancelled"
OUTPUT_DELTA = "weft.output.delta"
HUMAN_REQUESTED = "weft.human.requested"

FACT_SOURCE = "weft"
"""The source of every fact."""
MAX_SECONDS = 1_000_000_000
MAX_STEPS = 1_000_000_000

_SUBMIT_FIELDS = ("agent", "input", "key", "task_id", "session_id", "conf", "hooks", "metadata")
_CONF_FIELDS = ("max_steps", "timeout_seconds", "max_cost", "run_mode")


class Conf(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of a task; None: the runtime's default."""

    max_steps: int | None = None
    timeout_seconds: float | None = None
    max_cost: float | None = None
    """In the currency of the agent's price list."""
    run_mode: str = ""
    """Name of the runner; empty: the agent's own."""


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


class _Request(msgspec.Struct, frozen=True):
    """What of a question's data its id derives from."""

    request_id: str


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.signal`: the answer to a question."""

    task_id: str
    request_id: str
    value_json: bytes
    source: str = ANONYMOUS
    event_id: str
    replyto: str = ""


def parse_submit(envelope: Envelope) -> Submission:
    """The submission in a `weft.task.submit`. Raises InvalidInput."""
    data = _body(envelope, SUBMIT, _SUBMIT_FIELDS)
    agent = _required_name(data, "agent")
    if "input" not in data:
        raise InvalidInput("data.input", "is missing; send `null` where the agent needs none")
    task_id = data.get("task_id")
    task = _default_task_id(envelope) if task_id is None else _task_id(task_id)
    return Submission(
        task_id=task,
        agent=agent,
        input_json=codec.encode(data["input"]),
        key=_key(data),
        session_id=_name(data, "session_id"),
        conf=_conf(data.get("conf")),
        hooks=_hooks(data.get("hooks")),
        metadata=_object("data.metadata", data.get("metadata")),
        source=envelope.source,
        event_id=envelope.id,
        digest=digest(envelope.type, data),
        replyto=envelope.replyto,
        traceparent=envelope.traceparent,
        tracestate=envelope.tracestate,
        tenant=envelope.tenant,
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
    request_id = _required_name(data, "request_id")
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


def digest(type: str, data: object) -> str:
    """16 hexadecimal digits over a command's type and decoded data, whatever their spelling on the wire."""
    return fingerprint(type, codec.canonical(data).decode())


def accepted(task_id: str, *, at_ms: float, cause: str = "") -> Envelope:
    """`weft.task.accepted`: the task is durable and will be handled."""
    return _fact(ACCEPTED, event_id(task_id, "accepted"), {"task_id": task_id}, at_ms, task_id, cause)


def rejected(entry_id: str, error: InvalidInput, *, at_ms: float, task_id: str = "", cause: str = "") -> Envelope:
    """`weft.task.rejected`: the command on ingress entry `entry_id` starts or changes nothing.

    `cause` is the command's event id, where it could be read. A Rejected also says which task it is about and
    when to try again.
    """
    known = error if isinstance(error, Rejected) else None
    task_id = task_id or (known.task_id if known else "")
    data: dict[str, object] = {"task_id": task_id} if task_id else {}
    data |= {"field": error.field, "message": error.message}
    if known and known.retry_after_seconds is not None:
        data["retry_after_seconds"] = known.retry_after_seconds
    # A rejected submit may be sent again under its id, so the entry tells its rejections apart.
    id = event_id("rejected", fingerprint(entry_id, cause, error.field, error.message))
    return _fact(REJECTED, id, data, at_ms, task_id, cause)


def ended(
    task_id: str,
    status: str,
    *,
    at_ms: float,
    steps: int,
    trajectory: str,
    output: bytes | None = None,
    error: Mapping[str, str] | None = None,
    usage: Mapping[str, float] | None = None,
    cause: str = "",
) -> Envelope:
    """The final event: `weft.task.completed` with `output` (JSON), or `failed` or `cancelled` with `error`.

    `error` is `{"type", "message"}`; `steps` counts the rows of the complete trajectory and `trajectory`
    says where it is kept.
    """
    type = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED}[status]
    data: dict[str, object] = {"task_id": task_id, "status": status}
    if status == "completed":
        data["output"] = msgspec.Raw(output or b"null")
    else:
        data["error"] = error or {"type": status.capitalize(), "message": ""}
    data |= {"usage": usage or {}, "steps": steps, "trajectory": trajectory}
    return _fact(type, event_id(task_id, status), data, at_ms, task_id, cause)


def final(task_id: str, status: str, data: bytes, *, at_ms: float, cause: str = "") -> Envelope:
    """The final event whose data (JSON) is written already: the same id, whoever says it and however often."""
    return _fact(f"weft.task.{status}", event_id(task_id, status), msgspec.Raw(data), at_ms, task_id, cause)


def question(task_id: str, data: bytes, *, at_ms: float) -> Envelope:
    """`weft.human.requested` whose data (JSON) is written already."""
    request = msgspec.json.decode(data, type=_Request).request_id
    return _fact(HUMAN_REQUESTED, event_id(task_id, "human", request), msgspec.Raw(data), at_ms, task_id)


def output_delta(
    task_id: str,
    run_id: str,
    *,
    attempt: int,
    seq: int,
    at_ms: float,
    text: str | None = None,
    value: bytes | None = None,
) -> Envelope:
    """`weft.output.delta`: a piece of output, either `text` or `value` (JSON)."""
    data: dict[str, object] = {"task_id": task_id, "run_id": run_id, "attempt": attempt, "seq": seq}
    if text is not None:
        data["text"] = text
    else:
        data["value"] = msgspec.Raw(value or b"null")
    return _fact(OUTPUT_DELTA, event_id(task_id, run_id, attempt, seq), data, at_ms, task_id, run_id=run_id)


def human_requested(
    task_id: str,
    run_id: str,
    request_id: str,
    prompt: str,
    *,
    at_ms: float,
    data: bytes = b"null",
    deadline_ms: float | None = None,
    default: bytes | None = None,
) -> Envelope:
    """`weft.human.requested`: a question that a `weft.task.signal` answers; `data` and `default` are JSON."""
    body: dict[str, object] = {
        "task_id": task_id,
        "request_id": request_id,
        "prompt": prompt,
        "data": msgspec.Raw(data or b"null"),
    }
    if deadline_ms is not None:
        body["deadline"] = rfc3339(deadline_ms)
    if default is not None:
        body["default"] = msgspec.Raw(default)
    return _fact(HUMAN_REQUESTED, event_id(task_id, "human", request_id), body, at_ms, task_id, run_id=run_id)


def _fact(type: str, id: str, data: object, at_ms: float, task_id: str, cause: str = "", run_id: str = "") -> Envelope:
    return Envelope(
        id=id,
        source=FACT_SOURCE,
        type=type,
        time=rfc3339(at_ms),
        taskid=task_id,
        runid=run_id,
        causationid=cause,
        # The parts are JSON already or come from us: no second look at them.
        data=msgspec.json.encode(data),
    )


def _default_task_id(envelope: Envelope) -> str:
    if envelope.source == ANONYMOUS and is_task_id(envelope.id):
        return envelope.id
    return task_id_of(envelope.source, envelope.id)


def _body(envelope: Envelope, type: str, known: Collection[str]) -> dict[str, object]:
    if envelope.type != type:
        raise InvalidInput("type", f"{quoted(envelope.type)} is not `{type}`")
    value = codec.decode(envelope.data, envelope.datacontenttype)
    data = _as_object("data", value)
    _refuse_unknown("data", data, known)
    return data


def _refuse_unknown(path: str, data: Mapping[str, object], known: Collection[str]) -> None:
    for name in data:
        if name not in known:
            # The field is a path of plain words wherever it is shown.
            raise InvalidInput(f"{path}.{quoted(name)[1:-1]}", f"unknown; known are {', '.join(known)}")


def _as_object(path: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(path, f"{quoted(value)} is not an object")
    return value


def _object(path: str, value: object) -> dict[str, object]:
    return {} if value is None else _as_object(path, value)


def _text(path: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARACTERS or has_control(value):
        raise InvalidInput(
            path,
            f"{quoted(value)} is not text of 1 to {MAX_NAME_CHARACTERS} characters, none of them a control",
        )
    return value


def _name(data: Mapping[str, object], field: str) -> str:
    """An optional text; null counts as absent."""
    value = data.get(field)
    return "" if value is None else _text(f"data.{field}", value)


def _required_name(data: Mapping[str, object], field: str) -> str:
    if data.get(field) is None:
        raise InvalidInput(f"data.{field}", "is missing")
    return _name(data, field)


def _key(data: Mapping[str, object]) -> str:
    key = _name(data, "key")
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
    conf = _object("data.conf", value)
    _refuse_unknown("data.conf", conf, _CONF_FIELDS)
    run_mode = conf.get("run_mode")
    return Conf(
        max_steps=_max_steps(conf.get("max_steps")),
        timeout_seconds=_positive(conf, "timeout_seconds", MAX_SECONDS),
        max_cost=_positive(conf, "max_cost", None),
        run_mode="" if run_mode is None else _text("data.conf.run_mode", run_mode),
    )


def _max_steps(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STEPS:
        raise InvalidInput("data.conf.max_steps", f"{quoted(value)} is not a whole number from 1 to {MAX_STEPS}")
    return value


def _positive(conf: Mapping[str, object], field: str, most: int | None) -> float | None:
    value = conf.get(field)
    if value is None:
        return None
    limit = math.inf if most is None else most
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= limit:
        return float(value)
    upper = "" if most is None else f" and at most {most}"
    raise InvalidInput(f"data.conf.{field}", f"{quoted(value)} is not a number above 0{upper}")


def _hooks(value: object) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for point, names in _object("data.hooks", value).items():
        path = f"data.hooks.{quoted(point)[1:-1]}"
        _text(path, point)
        if not isinstance(names, list):
            raise InvalidInput(path, f"{quoted(names)} is not a list of names")
        hooks[point] = [_text(f"{path}.{place}", name) for place, name in enumerate(names)]
    return hooks
