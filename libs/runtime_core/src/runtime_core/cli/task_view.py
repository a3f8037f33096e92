"""Reads tasks from the broker, with everything that their runs wait for, and from the trajectory store."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.cli.output import Row, error_line, moment, preview, print_facts
from runtime_core.maintenance.dead_letters import DeadLetters
from runtime_core.maintenance.measures import Fields, served_by_handlers, unpacked
from runtime_core.maintenance.stuck import hash_at
from runtime_core.text import duration
from runtime_core.wire.events import ENDED, STEP_KINDS, describe_task

if TYPE_CHECKING:
    from runtime_core.record.step import TaskEnd
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.store import TrajectoryStore

MAX_SCANNED = 20_000
"""The most tasks on the broker that a list scans."""
_AMOUNTS = ("tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "requests", "cost")
_PLACES = {
    "queue": "for its tenant's turn to start",
    "mail": "for its turn in the mailbox of",
    "nest": "for its turn as a nested call on",
    "pend": "for a nested call on",
    "park": "parked: the code requested other steps than the journal has; fix it and redrive the dead letter of",
}


async def read_task(bus: EventBus, task: str) -> Row | None:
    """Return a description of the task; None if the broker does not know it.

    In addition to what `shown` returns, it has `max_steps`, `time_limit_at`, `waits_for`, `questions` and
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
    letters = cast(list[bytes], await bus.transport.call("ZRANGE", keys.base + "letters", 0, -1))
    own = [letter.rpartition(b"|")[2].decode() for letter in letters if letter.rpartition(b"|")[0] == task.encode()]
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


def status_line(view: Row, now_ms: float) -> str:
    """Return the task's status, and for a waiting one what it waits for: a task at rest is healthy."""
    waits = view.get("waits_for") or []
    kinds = {wait["kind"] for wait in waits}
    if view["status"] in ENDED or len(kinds) != 1:
        return str(view["status"])
    since = min((wait["since"] for wait in waits if "since" in wait), default=None)
    passed = "" if since is None else f" since {duration(now_ms - since)}"
    if kinds == {"human"}:
        return f"waiting for a human{passed}"
    if kinds == {"timer"}:
        return f"sleeping{passed}"
    return str(view["status"])


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


def question_line(question: Row) -> str:
    """Return the text of a question, with its data, on one line."""
    data = f"  {preview(question['data'], 300)}" if question.get("data") is not None else ""
    return f"{question['prompt']}{data}"


def answers_to(question: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the commands that answer a question."""
    signal = f"weft task signal {question['task_id']} {question['request_id']}"
    if question.get("expects") != "verdict":
        return [f"{signal} VALUE"]
    return [f"{signal} true", f"{signal} false", signal + """ '{"verdict": "edit", "value": …}'"""]


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


async def open_questions(bus: EventBus, limit: int) -> list[Row]:
    """Return the open questions of a partition's oldest tasks, each with the task's agent and creation time."""
    found: list[Row] = []
    call, keys, page = bus.transport.call, bus.keys, 500
    for start in range(0, MAX_SCANNED, page):
        tasks = [task.decode() for task in cast(list[bytes], await call("ZRANGE", keys.index, start, start + page - 1))]
        replies = [call("HMGET", keys.task(task), "status", "fl") for task in tasks]
        for task, reply in zip(tasks, replies, strict=True):
            status, flags = cast(list[bytes | None], await reply)
            # Without the flag `o`, a task has written nothing to its stream, so it has asked nothing.
            if status is None or status.decode() in ENDED or b"o" not in (flags or b""):
                continue
            view = await read_task(bus, task)
            if view is not None:
                about = {"agent": view["agent"], "created": view["created"]}
                found += [{**question, **about} for question in view.get("questions", ())]
        if len(tasks) < page or len(found) >= limit:
            break
    return found


def changes_of(view: Row) -> list[str]:
    """Return what `weft task watch` prints of a task: its status, its error and the steps for which it waits."""
    waits = [f"{wait['kind']} {wait.get('name') or wait['step'] or wait['run']}" for wait in view.get("waits_for", ())]
    return [view["status"], *filter(None, [error_line(view.get("error"), 600)]), *waits[:5]]


# -- lists -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks a command is about. Empty fields select all."""

    status: str = ""
    agent: str = ""
    session: str = ""
    key: str = ""
    since_ms: float = 0.0
    """Only tasks created at or after this time, in epoch milliseconds."""
    until_ms: float = math.inf
    """Only tasks created before this time, in epoch milliseconds."""

    def matches(self, row: Row) -> bool:
        """Whether a task, as described by `describe_task`, is selected."""
        return (
            (not self.status or row["status"] == self.status)
            and (not self.agent or row["agent"] == self.agent)
            and (not self.session or row.get("session_id") == self.session)
            and (not self.key or row.get("key") == self.key)
            and self.since_ms <= row["created"] < self.until_ms
        )


EVERY_TASK = TaskFilter()


async def tasks_on_broker(bus: EventBus, wanted: TaskFilter, limit: int) -> list[Row]:
    """Return tasks of a partition, the newest first. Scans up to MAX_SCANNED tasks."""
    call, keys = bus.transport.call, bus.keys
    page = limit if wanted == EVERY_TASK else 500
    found: list[Row] = []
    for start in range(0, MAX_SCANNED, page):
        tasks = cast(list[bytes], await call("ZREVRANGE", keys.index, start, start + page - 1))
        calls = [call("HMGET", keys.task(task.decode()), "status", "h", "ended", "steps") for task in tasks]
        for task, reply in zip(tasks, calls, strict=True):
            values = cast(list[bytes | None], await reply)
            if values[0] is None:
                continue  # past its retention time
            named = zip((b"status", b"h", b"ended", b"steps"), values, strict=True)
            row = describe_task(task.decode(), {name: value for name, value in named if value is not None})
            if wanted.matches(row):
                found.append(row)
        if len(tasks) < page or len(found) >= limit:
            break
    return found[:limit]


async def tasks_in_store(store: TrajectoryStore, namespace: str, wanted: TaskFilter, limit: int) -> list[Row]:
    """Return ended tasks, the newest first. The store does not know the keys of tasks."""
    found: list[Row] = []
    before: str | None = None
    page = limit if not (wanted.since_ms or wanted.until_ms < math.inf) else 500
    for _ in range(0, 0 if wanted.key else MAX_SCANNED, page):
        ends = await store.tasks(
            namespace, status=wanted.status or None, agent=wanted.agent or None, session=wanted.session or None,
            limit=page, before=before,
        )  # fmt: skip
        rows = [{"task_id": end.task, **_of_end(end)} for end in ends]
        found += [row for row in rows if wanted.matches(row)]
        if len(ends) < page or len(found) >= limit:
            break
        before = ends[-1].task
    return found[:limit]


def _of_end(end: TaskEnd) -> Row:
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
        view |= _of_end(recorded.end)
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


def instance_of(row: Row) -> str:
    """Return the agent of a row, as `agent/key` if it has a key."""
    return f"{row['agent']}/{row['key']}" if row.get("key") else str(row["agent"])


def print_task(view: Row, now_ms: int) -> None:
    """Print what `read_task` returns, one fact a line."""
    created, ended = view.get("created"), view.get("ended")
    usage, fork = view.get("usage") or {}, view.get("forked_from")
    limits = [f"{view['max_steps']} steps"] if "max_steps" in view else []
    limits += [f"{limit:g} {name.removeprefix('max_')}" for name, limit in view.get("limits", {}).items()]
    facts: list[tuple[str, object]] = [
        ("task", view["task_id"]),
        ("status", status_line(view, now_ms)),
        ("agent", instance_of(view)),
        ("session", view.get("session_id")),
        ("fork of", fork and f"{fork['task']}, from {'step ' + fork['step'] if fork['step'] else 'its start'}"),
        ("created", created and f"{moment(created)} ({duration(now_ms - created)} ago)"),
        ("ended", created and ended and f"{moment(ended)} (after {duration(ended - created)})"),
        ("limit", ", ".join(limits)),
        ("usage", _amounts(usage)),
        *(("", f"{model}: {_amounts(amounts)}") for model, amounts in usage.get("models", {}).items()),
        ("limit", "time_limit_at" in view and f"until {moment(view['time_limit_at'])}"),
        ("input", "input" in view and preview(view["input"], 500)),
        ("output", "output" in view and preview(view["output"], 500)),
        ("error", error_line(view.get("error"), 600)),
    ]
    facts += [
        ("handler", f"no running handler has {each['kind']} {each['name']!r}: start one, or roll back")
        for each in view.get("without_handler", ())
    ]
    for parked in view.get("parked", ()):
        facts.append(
            ("parked", f"step {parked['step']} of run {parked['run']}, at {parked['line'] or 'an unknown line'}")
        )
        facts += [("", f"{what}: {parked[what]}") for what in ("code", "recorded", "now") if parked[what]]
    for wait in view.get("waits_for", ()):
        if wait["kind"] != "human":  # its question is printed below
            error = error_line((wait.get("errors") or [None])[-1])
            facts.append(("waits", describe_wait(wait, now_ms) + (f"; the last error: {error}" if error else "")))
    for question in view.get("questions", ()):
        facts.append(("question", question_line(question)))
        if "deadline" in question:
            otherwise = f", then the answer is {preview(question['default'])}" if "default" in question else ""
            facts.append(("", f"until {moment(question['deadline'])}{otherwise}"))
        facts += [("", f"answer with: {command}") for command in answers_to(question)]
    facts += [("dead", f"{letter}  see weft dead show {letter}") for letter in view.get("dead_letters", ())]
    print_facts(facts)


def _amounts(usage: Row) -> str:
    # The broker does not keep the order.
    names = sorted(usage, key=lambda name: (_AMOUNTS.index(name) if name in _AMOUNTS else len(_AMOUNTS), name))
    return ", ".join(f"{usage[name]:.10g} {name}" for name in names if name != "models")
