"""Reads tasks from the broker, with everything that their runs wait for, and from the trajectory store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.maintenance.dead_letters import DeadLetters
from runtime_core.maintenance.measures import Fields, served_by_handlers, unpacked
from runtime_core.maintenance.stuck import hash_at
from runtime_core.text import duration
from runtime_core.wire.events import ENDED, STEP_KINDS, describe_task

if TYPE_CHECKING:
    from runtime_core.record.step import TaskEnd
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.store import TrajectoryStore

Row = dict[str, Any]
"""A task, or a part of one, as JSON. (Any: JSON.)"""
_PLACES = {
    "queue": "for its tenant's turn to start",
    "mail": "for its turn in the mailbox of",
    "nest": "for its turn as a nested call on",
    "pend": "for a nested call on",
    "park": "parked: the code requested other steps than the journal has; fix it and redrive the dead letter of",
}


async def read_task(bus: EventBus, task: str, *, letters: bool = True) -> Row | None:
    """Return a description of the task; None if the broker does not know it.

    `letters`: whether to look through all dead letters of the partition for those of the task.

    In addition to what `describe_task` returns, it has `max_steps`, `time_limit_at`, `waits_for`, `questions` and
    `dead_letters` (ids). Each item of `waits_for` has `run`, `step`, `kind`, and if known `name`, `due`, `attempt`,
    `since` (of a question or a sleep), `errors`, and `task_id` of an agent in another partition.
    """
    keys = bus.keys
    fields = await hash_at(bus, keys.task(task))
    if not fields:
        return None
    view = describe_task(task, fields)
    header = _lines(fields)
    if header[5] not in ("", "0"):
        view["max_steps"] = int(header[5])
    if letters:
        kept = cast(list[bytes], await bus.transport.call("ZRANGE", keys.base + "letters", 0, -1))
        own = [letter.rpartition(b"|")[2].decode() for letter in kept if letter.rpartition(b"|")[0] == task.encode()]
        if own:
            view["dead_letters"] = own
    if view["status"] in ENDED:
        return {name: value for name, value in view.items() if name not in ("waits_for", "questions")}
    limit = await _due(bus, f"d|{task}")
    if limit is not None:
        view["time_limit_at"] = limit
    children = [name[2:].decode() for name in fields if name.startswith(b"k:")]
    runs = {"r": fields, **{run: await hash_at(bus, keys.run(task, run)) for run in children}}
    retries = await _retries(bus, fields)
    waits: list[Row] = []
    questions: list[Row] = []
    served = await served_by_handlers(bus)
    for run, of_run in sorted(runs.items()):
        waits += _run_waits(run, of_run, retries)
        for name, value in sorted(of_run.items()):
            if name.startswith(b"m:"):
                step = name[2:].decode()
                due = await _due(bus, f"s|{task}|{run}|{step}")
                waits.append(_step_wait(run, step, chr(value[8]), due, runs, retries))
                asked_at = of_run.get(b"q:" + name[2:]) or fields.get(f"z:s|{task}|{run}|{step}".encode())
                if asked_at and asked_at[:13].isdigit():
                    waits[-1]["since"] = int(asked_at[:13])
                if b"q:" + name[2:] in of_run:
                    question = msgspec.json.decode(of_run[b"q:" + name[2:]][13:])
                    questions.append(question if due is None else {**question, "deadline": due})
    wanted = [("agent", agent) for each in runs.values() if (agent := _lines(each)[1])]
    wanted += [(wait["kind"], wait["name"]) for wait in waits if wait["kind"] == "tool" and wait.get("name")]
    if lacking := [{"kind": kind, "name": name} for kind, name in dict.fromkeys(wanted) if served.lacks(kind, name)]:
        view["without_handler"] = lacking
    return {**view, "waits_for": waits, "questions": questions}


_DIVERGED = re.compile(
    r"step (\S+) of .*?: the journal has (.*?), but the code now requests (.*): roll back", re.DOTALL
)
"""The message of a Divergence."""
_LINE = re.compile(r'  File "([^"]+)", line (\d+), in (.+)\n(?:    (.+))?')


async def parked_runs(buses: Sequence[EventBus], namespace: str, task: str, store: TrajectoryStore | None) -> list[Row]:
    """Return where the code of the task's parked runs differs: `run`, `step`, the calls `recorded` and `now`, and the
    `line` of the code and its `code`. A part that is not known is empty.
    """
    found: list[Row] = []
    async for letter in DeadLetters(buses).parked(task):
        error = letter.errors[-1] if letter.errors else letter.error
        message = str(error.get("message", ""))
        parts = _DIVERGED.match(message)
        step, recorded, now = parts.groups() if parts else ("?", "", message)
        if not recorded.startswith("ctx."):
            recorded = await store.call_of(namespace, task, letter.run, step) if store is not None else ""
        frames = _LINE.findall(str(error.get("traceback", "")))
        file, number, function, code = frames[-1] if frames else ("", "", "", "")
        line = f"{file}:{number} in {function}" if file else ""
        found.append({"run": letter.run, "step": step, "recorded": recorded, "now": now, "line": line, "code": code})
    return found


def describe_wait(wait: Row, now_ms: float) -> str:
    """Describe an item of `waits_for` on one line, without user data."""
    if "place" in wait:
        return f"{_PLACES[wait['place']]} {wait['name']}"
    kind = "sleep" if wait["kind"] == "timer" else wait["kind"]
    text = f"{kind} {wait.get('name') or wait['step'] or wait['run']}"
    if "task_id" in wait:
        text += f", which runs as task {wait['task_id']}"
    if wait.get("attempt"):
        text += f", attempt {wait['attempt']}"
    if "due" in wait:
        left = wait["due"] - now_ms
        text += f", in {duration(left)}" if left > 0 else ", due now"
    return text


@dataclass(frozen=True, slots=True)
class _Retry:
    """A delivery that is waiting for its next attempt."""

    name: str
    attempt: int
    due: int
    errors: list[Row]

    def fields(self) -> Row:
        return {"name": self.name, "attempt": self.attempt, "due": self.due, "errors": self.errors}


def _run_waits(run: str, fields: Fields, retries: Mapping[str, _Retry]) -> list[Row]:
    """Return what the run itself waits for: its next attempt, or its instance."""
    cur = fields.get(b"cur", b"").decode()
    if cur in _PLACES:
        _, agent, key, *_ = _lines(fields)
        return [{"run": run, "step": "", "kind": "agent", "name": f"{agent}/{key}" if key else agent, "place": cur}]
    if cur == "retry" and run in retries:
        return [{"run": run, "step": "", "kind": "agent", **retries[run].fields()}]
    return []


def _step_wait(
    run: str, step: str, kind: str, due: int | None, runs: Mapping[str, Fields], retries: Mapping[str, _Retry]
) -> Row:
    wait: Row = {"run": run, "step": step, "kind": STEP_KINDS.get(kind, "?")}
    child = f"{run}/{step}"
    if kind == "a":
        elsewhere = runs["r"].get(b"k:" + child.encode(), b"").decode()
        if elsewhere.startswith("@"):  # `@partition:task`: the instance lives in another partition
            wait["task_id"] = elsewhere.partition(":")[2]
        return {**wait, "name": _lines(runs.get(child, {}))[1]}
    if child in retries:
        return {**wait, **retries[child].fields()}
    return wait if due is None else {**wait, "due": due}


async def _retries(bus: EventBus, task_fields: Fields) -> dict[str, _Retry]:
    """Return the task's delayed deliveries by run; a call has its own run."""
    found: dict[str, _Retry] = {}
    for field in task_fields:
        if not field.startswith(b"z:e|"):
            continue
        fields = unpacked(await bus.transport.call("HGET", bus.keys.base + "delayed", field[2:]))
        due = await _due(bus, field[2:].decode())
        if due is not None and fields:
            header = _lines(fields)
            errors = msgspec.json.decode(fields[b"e"]) if b"e" in fields else []
            found[header[3]] = _Retry(header[4], int(header[6] or 0), due, errors)
    return found


def _lines(fields: Fields) -> list[str]:
    """Return the header of a run or delivery, padded with empty lines for missing ones."""
    return fields.get(b"h", b"").decode().split("\n") + [""] * 10


async def _due(bus: EventBus, member: str) -> int | None:
    score = await bus.transport.call("ZSCORE", bus.keys.timers, member)
    return None if score is None else int(float(cast(bytes, score)))


# -- ended tasks -------------------------------------------------------------------------------------------------------


def of_end(end: TaskEnd) -> Row:
    """Describe the end of a task in the trajectory store, without the task's id."""
    row: Row = {"status": end.status, "agent": end.agent, "created": end.created, "ended": end.ended}
    row["steps"] = end.steps
    if end.session:
        row["session_id"] = end.session
    if end.error is not None:
        row["error"] = {"type": end.error.type, "message": end.error.message}
    return row


def task_in_store(recorded: TaskTrajectory) -> Row:
    """Describe a task that the broker no longer has."""
    from runtime_core.trajectory.tree import decoded

    view: Row = {"task_id": recorded.task, "status": "unknown", "agent": ""}
    if recorded.end is not None:
        view |= of_end(recorded.end)
    if used := _usage_of(recorded):
        view["usage"] = used
    first = next((step for step in recorded.steps if step.run == "r" and not step.step), None)
    if first is not None:
        view |= {name: decoded(raw) for name, raw in (("input", first.input), ("output", first.output)) if raw}
    return view


def _usage_of(recorded: TaskTrajectory) -> Row:
    """Return the task's usage from its recorded steps."""
    from runtime_core.record.step import Usage, total_usage
    from runtime_core.telemetry.attributes import RESPONSE_MODEL

    reports = [
        Usage(step.usage, {str(step.attributes.get(RESPONSE_MODEL, step.name)): step.usage} if by_model else {})
        for step in recorded.steps
        if step.usage
        for by_model in (step.kind == "model" or (step.kind == "usage" and step.name != "usage"),)
    ]
    return cast(Row, msgspec.json.decode(total_usage(reports).to_json())) if reports else {}
