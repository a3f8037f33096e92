"""What the broker knows of a task: its status, and everything that any of its runs waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.wire.results import ENDED, shown

_KINDS = {"t": "tool", "a": "agent", "r": "ray", "s": "spark", "i": "timer", "h": "human"}
_PLACES = {
    "queue": "for its tenant's turn to start",
    "mail": "for its turn in the mailbox of",
    "nest": "for its turn, called from within, on",
    "pend": "until a nested call is done on",
    "park": "parked: it asked for other steps than before; mend the code, then redrive its dead letter:",
}


@dataclass(frozen=True, slots=True)
class _Retry:
    """A delivery that waits for its next attempt."""

    name: str
    attempt: int
    due_ms: int
    errors: list[dict[str, Any]]  # Any: JSON


async def read_task(bus: EventBus, task: str) -> dict[str, Any] | None:  # Any: JSON
    """The task in words, None where the broker does not know it (any more).

    Adds to what `shown` says: `max_steps`, `time_limit_at`, `waits_for` and `questions` of all runs (each with
    `run`, `step`, `kind`, and where known `name`, `due`, `attempt`, `errors`,
    `task_id` of an agent asked elsewhere), and `dead_letters` (ids).
    """
    call, keys = bus.transport.call, bus.keys
    fields = await hash_at(bus, keys.task(task))
    if not fields:
        return None
    view = shown(task, fields)
    header = fields.get(b"h", b"").decode().split("\n")
    if len(header) > 5 and header[5] not in ("", "0"):
        view["max_steps"] = int(header[5])
    letters = cast(list[bytes], await call("ZRANGE", keys.base + "letters", 0, -1))
    own = [letter.rpartition(b"|")[2].decode() for letter in letters if letter.rpartition(b"|")[0] == task.encode()]
    if own:
        view["dead_letters"] = own
    view.pop("waits_for", None)
    view.pop("questions", None)
    if view["status"] in ENDED:
        return view
    limit = await _due(bus, f"d|{task}")
    if limit is not None:
        view["time_limit_at"] = limit
    runs = {"r": fields}
    for name in fields:
        if name.startswith(b"k:"):
            run = name[2:].decode()
            runs[run] = await hash_at(bus, f"{keys.base}run:{task}/{run}")
    retries = await _retries(bus, fields)
    waits: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for run, of_run in sorted(runs.items()):
        waits += _run_waits(run, of_run, retries)
        for name, value in sorted(of_run.items()):
            if name.startswith(b"m:"):
                step = name[2:].decode()
                waits.append(await _step_wait(bus, task, run, step, chr(value[8]), runs, retries))
                if b"q:" + name[2:] in of_run:
                    question = msgspec.json.decode(of_run[b"q:" + name[2:]][13:])
                    due = await _due(bus, f"s|{task}|{run}|{step}")
                    questions.append(question if due is None else {**question, "deadline": due})
    view["waits_for"], view["questions"] = waits, questions
    return view


def describe_wait(wait: Mapping[str, Any], now_ms: float) -> str:  # Any: JSON
    """One thing that a task waits for, on one line without what users wrote."""
    from runtime_core.trajectory.tree import duration

    if "place" in wait:
        return f"{_PLACES[wait['place']]} {wait['name']}"
    text = f"{wait['kind']} {wait.get('name') or wait['step'] or wait['run']}"
    if "task_id" in wait:
        text += f", which works on it as task {wait['task_id']}"
    if wait.get("attempt"):
        text += f", attempt {wait['attempt']}"
    if "due" in wait:
        left = wait["due"] - now_ms
        text += f", in {duration(left)}" if left > 0 else ", due now"
    return text


def answers_to(question: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """What to type to answer a question, one command a line."""
    signal = f"weft task signal {question['task_id']} {question['request_id']}"
    if question.get("expects") != "verdict":
        return [f"{signal} VALUE"]
    return [
        f"{signal} true",
        f"{signal} false",
        signal + """ '{"verdict": "edit", "value": …}'""",
    ]


def _run_waits(run: str, fields: dict[bytes, bytes], retries: Mapping[str, _Retry]) -> list[dict[str, Any]]:
    """What the run itself waits for: its next attempt, or its instance."""
    cur = fields.get(b"cur", b"").decode()
    header = [*fields.get(b"h", b"").decode().split("\n"), "", "", ""]
    name = f"{header[1]}/{header[2]}" if header[2] else header[1]
    if cur in _PLACES:
        return [{"run": run, "step": "", "kind": "agent", "name": name, "place": cur}]
    if cur == "retry" and run in retries:
        return [{"run": run, "step": "", "kind": "agent", **_retry_fields(retries[run])}]
    return []


async def _step_wait(
    bus: EventBus,
    task: str,
    run: str,
    step: str,
    kind: str,
    runs: Mapping[str, dict[bytes, bytes]],
    retries: Mapping[str, _Retry],
) -> dict[str, Any]:  # Any: JSON
    wait: dict[str, Any] = {"run": run, "step": step, "kind": _KINDS.get(kind, "?")}
    child = f"{run}/{step}"
    if child in retries and kind != "a":
        wait |= _retry_fields(retries[child])
    elif kind == "a":
        elsewhere = runs["r"].get(b"k:" + child.encode(), b"").decode()
        if elsewhere.startswith("@"):  # `@partition:task`: the instance lives in another partition
            wait["task_id"] = elsewhere.partition(":")[2]
        wait["name"] = runs.get(child, {}).get(b"h", b"\n").decode().split("\n")[1]
    else:
        due = await _due(bus, f"s|{task}|{run}|{step}")
        if due is not None:
            wait["due"] = due
    return wait


def _retry_fields(retry: _Retry) -> dict[str, Any]:  # Any: JSON
    return {"name": retry.name, "attempt": retry.attempt, "due": retry.due_ms, "errors": retry.errors}


async def _retries(bus: EventBus, task_fields: Mapping[bytes, bytes]) -> dict[str, _Retry]:
    """Deliveries of the task that wait in the timers, by run (a call's run is its own)."""
    found: dict[str, _Retry] = {}
    for field in task_fields:
        if not field.startswith(b"z:e|"):
            continue
        member = field[2:]
        packed = cast(bytes | None, await bus.transport.call("HGET", bus.keys.base + "delayed", member))
        due = await _due(bus, member.decode())
        fields = unpacked(packed)
        header = fields.get(b"h", b"").decode().split("\n")
        if due is None or len(header) < 7:
            continue
        errors = msgspec.json.decode(fields[b"e"]) if b"e" in fields else []
        found[header[3]] = _Retry(header[4], int(header[6]), due, errors)
    return found


def unpacked(packed: bytes | None) -> dict[bytes, bytes]:
    """The fields of a delivery that waits in the timers; none where they cannot be read."""
    if packed is None:
        return {}
    try:
        flat = msgspec.msgpack.decode(packed, type=list[str])
    except msgspec.MsgspecError:
        return {}
    return {name.encode(): value.encode() for name, value in zip(flat[::2], flat[1::2], strict=False)}


async def hash_at(bus: EventBus, key: str) -> dict[bytes, bytes]:
    """A hash of the broker; empty where there is none."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", key))
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def _due(bus: EventBus, member: str) -> int | None:
    score = await bus.transport.call("ZSCORE", bus.keys.timers, member)
    return None if score is None else int(float(cast(bytes, score)))
