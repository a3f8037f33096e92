"""What clients are told: the facts, as envelopes. Their requests are in `commands.py`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import event_id, fingerprint
from runtime_core.wire.envelope import Envelope, rfc3339
from runtime_core.wire.results import STEP_RECORDED

ACCEPTED = "weft.task.accepted"
REJECTED = "weft.task.rejected"
COMPLETED = "weft.task.completed"
FAILED = "weft.task.failed"
CANCELLED = "weft.task.cancelled"
OUTPUT_DELTA = "weft.output.delta"
HUMAN_REQUESTED = "weft.human.requested"

FACT_SOURCE = "weft"
"""The source of every fact."""


class _Request(msgspec.Struct, frozen=True):
    """What of a question's data its id derives from."""

    request_id: str


def accepted(task_id: str, *, at_ms: float, cause: str = "", trace: str = "") -> Envelope:
    """`weft.task.accepted`: the task is durable and will be handled."""
    return _fact(ACCEPTED, event_id(task_id, "accepted"), {"task_id": task_id}, at_ms, task_id, cause, trace=trace)


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


def final(task_id: str, status: str, data: bytes, *, at_ms: float, cause: str = "", trace: str = "") -> Envelope:
    """The final event whose data (JSON) is written already: the same id, whoever says it and however often."""
    return _fact(
        f"weft.task.{status}", event_id(task_id, status), msgspec.Raw(data), at_ms, task_id, cause, trace=trace
    )


def question(task_id: str, data: bytes, *, at_ms: float, trace: str = "") -> Envelope:
    """`weft.human.requested` whose data (JSON) is written already."""
    request = msgspec.json.decode(data, type=_Request).request_id
    id = event_id(task_id, "human", request)
    return _fact(HUMAN_REQUESTED, id, msgspec.Raw(data), at_ms, task_id, trace=trace)


def output_delta(
    task_id: str,
    run_id: str,
    *,
    attempt: int,
    seq: int,
    at_ms: float,
    text: str | None = None,
    value: bytes | None = None,
    progress: bool = False,
) -> Envelope:
    """`weft.output.delta`: a piece of output, either `text` or `value` (JSON); with `progress` a call's report."""
    data: dict[str, object] = {"task_id": task_id, "run_id": run_id, "attempt": attempt, "seq": seq}
    if progress:
        data["progress"] = True
    if text is not None:
        data["text"] = text
    else:
        data["value"] = msgspec.Raw(value or b"null")
    return _fact(OUTPUT_DELTA, event_id(task_id, run_id, attempt, seq), data, at_ms, task_id, run_id=run_id)


def step_recorded(task_id: str, rows: bytes, *, at_ms: float) -> Envelope:
    """`weft.step.recorded`: steps that were committed, as rows of the record; for tasks whose steps are wanted."""
    return _fact(
        STEP_RECORDED, event_id(task_id, "steps"), {"task_id": task_id, "steps": msgspec.Raw(rows)}, at_ms, task_id
    )


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


def _fact(
    type: str,
    id: str,
    data: object,
    at_ms: float,
    task_id: str,
    cause: str = "",
    run_id: str = "",
    trace: str = "",
) -> Envelope:
    return Envelope(
        id=id,
        source=FACT_SOURCE,
        type=type,
        time=rfc3339(at_ms),
        taskid=task_id,
        runid=run_id,
        causationid=cause,
        traceparent=trace,
        # The parts are JSON already or come from us: no second look at them.
        data=msgspec.json.encode(data),
    )
