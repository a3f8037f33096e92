"""Reads and lists tasks: on the broker, with everything that their runs wait for, and in the trajectory store."""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.base.text import about
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import group_of
from runtime_core.consumer.announcements import announced_streams
from runtime_core.errors import ServerError
from runtime_core.state_manager.measures import Fields, unpacked
from runtime_core.state_manager.stuck import hash_at, lacking
from runtime_core.wire.codec import readable, wrong_cursor
from runtime_core.wire.events import STEP_KINDS, describe_task
from runtime_core.wire.ids import ROOT_RUN, DeliveryHeader, EntryField, RunField, RunHeader, is_task_id
from runtime_core.wire.step import ENDED

if TYPE_CHECKING:
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.store import TrajectoryStore
    from runtime_core.wire.step import TaskEnd

Row = dict[str, Any]
"""A task, or a part of one, as JSON. (Any: JSON.)"""
_PLACES = {
    "queue": "for its tenant's turn to start",
    "mail": "for its turn in the mailbox of",
    "nest": "for its turn as a nested call on",
    "pend": "for a nested call on",
    "park": "parked: the code requested steps that differ from the journal; fix it and redrive the dead letter of",
}


async def read_task(bus: EventBus, task: str, *, letters: bool = True, calls: bool = True) -> Row | None:
    """Return a description of the task; None if the broker does not know it.

    `letters`: whether to look through all dead letters of the partition for those of the task. `calls`: whether to look
    through the running calls of tools.

    In addition to what `describe_task` returns, it has `max_steps`, `time_limit_at`, `waits_for`, `questions` and
    `dead_letters` (ids). Each item of `waits_for` has `run`, `step`, `kind`, and if known `name`, `due`, `attempt`,
    `since`, `errors`, `task_id` of an agent in another partition, the `limit` for whose slot it waits, of a running
    call its `handler`, and of a run in a mailbox the task that is its `holder`, if the tenant is the same.
    """
    keys = bus.keys
    fields = await hash_at(bus, keys.task(task))
    if not fields:
        return None
    view = describe_task(task, fields)
    if (max_steps := _header(fields).max_steps) not in ("", "0"):
        view["max_steps"] = int(max_steps)
    if letters:
        kept = cast(list[bytes], await bus.transport.call("ZRANGE", keys.base + "letters", 0, -1))
        own = [letter.rpartition(b"|")[2].decode() for letter in kept if letter.rpartition(b"|")[0] == task.encode()]
        if own:
            view["dead_letters"] = own
    if view["status"] in ENDED:
        return {name: value for name, value in view.items() if name not in ("waits_for", "questions")}
    if (limit := await _due(bus, f"d|{task}")) is not None:
        view["time_limit_at"] = limit
    children = [name[2:].decode() for name in fields if name.startswith(RunField.CHILD)]
    runs = {ROOT_RUN: fields, **{run: await hash_at(bus, keys.run(task, run)) for run in children}}
    retries = await _retries(bus, fields)
    waits: list[Row] = []
    questions: list[Row] = []
    slots = await _slot_waits(bus, task, fields)
    for run, of_run in sorted(runs.items()):
        waits += _run_waits(run, of_run, retries, slots)
        if waits and waits[-1].get("place") == "mail" and (holder := await _holder(bus, waits[-1]["name"], fields)):
            waits[-1]["holder"] = holder
        for name, value in sorted(of_run.items()):
            if name.startswith(RunField.MISSING):
                step = name[2:].decode()
                due = await _due(bus, f"s|{task}|{run}|{step}")
                waits.append(_step_wait(run, step, chr(value[8]), due, runs, retries))
                waits[-1].update(slots.get(f"{run}/{step}", {}))
                received = of_run.get(b"n:" + name[2:], b"")
                asked_at = of_run.get(b"q:" + name[2:]) or received or fields.get(f"z:s|{task}|{run}|{step}".encode())
                if asked_at and asked_at[:13].isdigit():
                    waits[-1]["since"] = int(asked_at[:13])
                if received:
                    waits[-1]["name"] = received[13:].decode()
                if b"q:" + name[2:] in of_run:
                    question = msgspec.json.decode(of_run[b"q:" + name[2:]][13:])
                    questions.append(question if due is None else {**question, "deadline": due})
    if calls:
        await _name_calls(bus, task, waits)
    wanted = [("agent", agent) for each in runs.values() if (agent := _header(each).agent)]
    wanted += [(wait["kind"], wait["name"]) for wait in waits if wait["kind"] == "tool" and wait.get("name")]
    if lacks := await lacking(bus, wanted):
        view["without_handler"] = lacks
        _wait_in_queue(waits, {(each["kind"], each["name"]) for each in lacks})
    return {**view, "waits_for": waits, "questions": questions}


def _wait_in_queue(waits: Sequence[Row], lacks: set[tuple[str, str]]) -> None:
    """Report names without a running handler as not taken: handlers postpone such a delivery by a second, uncounted."""
    for wait in waits:
        if (wait["kind"], wait.get("name")) in lacks and not wait.get("errors") and not wait.get("handler"):
            wait.pop("due", None)
            wait.pop("attempt", None)
            wait["handler"] = ""


def wait_name(wait: Row) -> str:
    """Return what an item of `waits_for` waits for, as in `tool search`, `message budget` or `sleep`."""
    kind = {"timer": "sleep", "receive": "message"}.get(wait["kind"], wait["kind"])
    return kind if kind == "sleep" else f"{kind} {wait.get('name') or wait['step'] or wait['run']}"


def describe_wait(wait: Row, now_ms: float) -> str:
    """Describe an item of `waits_for` on one line, without user data."""
    if "place" in wait:
        by = f", which task {wait['holder']} holds" if "holder" in wait else ""
        return f"{_PLACES[wait['place']]} {wait['name']}{by}"
    if wait["kind"] == "acquire":
        return f"to get its key back, at the end of ctx.released ({wait['run']})"
    text = wait_name(wait)
    if "limit" in wait:
        return f"{text}, for {about(now_ms - wait['since'])}, for a slot of {_limit_of(wait['limit'])}"
    if "task_id" in wait:
        text += f", which runs as task {wait['task_id']}"
    if wait.get("attempt"):
        text += f", attempt {wait['attempt']}"
    if "handler" in wait:
        # `tool-handler@host.process.start.random`: a person looks for the host and the process.
        host, process = [*str(wait["handler"]).rsplit(".", 3), ""][:2]
        where = f"on {host}, process {process}" if host else "in the queue: no handler has taken it yet"
        text += f", for {about(now_ms - wait['since'])} {where}" if "since" in wait else f", {where}"
    if "due" in wait:
        left = wait["due"] - now_ms
        text += f", {'ends ' * (wait['kind'] == 'timer')}in {about(left)}" if left > 0 else ", due now"
    return text


async def _holder(bus: EventBus, instance: str, waiting: Fields) -> str:
    """Return the task of the run that holds an instance; empty if none does, or that of another tenant."""
    holders = cast("bytes | None", await bus.transport.call("HGET", f"{bus.keys.base}inst:{instance}", "busy"))
    task = (holders or b"").decode().rpartition("\n")[2].partition("|")[0]
    header = cast("bytes | None", await bus.transport.call("HGET", bus.keys.task(task), "h")) if task else None
    return task if header is not None and RunHeader.parse(header).tenant == _header(waiting).tenant else ""


def _limit_of(limit: str) -> str:
    """Describe a limit by its name on the broker, `agent:<name>|<per>|<key>`."""
    _, per, key = limit.split("|")
    return f"its limit per {per} {key or '(none)'}" if per and not per.startswith("/") else f"its limit for all{per}"


def _run_waits(run: str, fields: Fields, retries: Mapping[str, Row], slots: Mapping[str, Row]) -> list[Row]:
    """Return what the run itself waits for: its next attempt, its instance, or a slot of a limit."""
    cur = fields.get(RunField.CURRENT, b"").decode()
    if cur in _PLACES:
        header = _header(fields)
        name = f"{header.agent}/{header.key}" if header.key else header.agent
        wait = {"run": run, "step": "", "kind": "agent", "name": name, "place": cur}
        return [{**wait, "since": header.created_ms} if run == ROOT_RUN and cur in ("mail", "queue") else wait]
    if cur == "retry" and run in retries:
        return [{"run": run, "step": "", "kind": "agent", **retries[run]}]
    if cur == "slot" and run in slots:
        return [{"run": run, "step": "", "kind": "agent", "name": _header(fields).agent, **slots[run]}]
    return []


def _step_wait(
    run: str, step: str, kind: str, due: int | None, runs: Mapping[str, Fields], retries: Mapping[str, Row]
) -> Row:
    wait: Row = {"run": run, "step": step, "kind": STEP_KINDS.get(kind, "?")}
    child = f"{run}/{step}"
    if kind == "a":
        elsewhere = runs[ROOT_RUN].get(RunField.CHILD + child.encode(), b"").decode()
        if elsewhere.startswith("@"):  # `@partition:task`: the instance lives in another partition
            wait["task_id"] = elsewhere.partition(":")[2]
        return {**wait, "name": _header(runs.get(child, {})).agent}
    if child in retries:
        return {**wait, **retries[child]}
    return wait if due is None else {**wait, "due": due}


_CALLS_READ = 300
"""Calls of each stream that are read to find those of a task."""


async def _name_calls(bus: EventBus, task: str, waits: Sequence[Row]) -> None:
    """Add to the waits for tools the tool's name, the handler that runs the call, its start, its attempt, and why
    earlier attempts failed.

    The journal has only the digest of an open call, so this searches for its entry: among those that handlers hold,
    then among the first unread ones. A call after these gets no details.
    """
    open_calls = {
        f"{wait['run']}/{wait['step']}": wait for wait in waits if wait["kind"] == "tool" and "name" not in wait
    }
    if not open_calls:
        return
    call, keys = bus.transport.call, bus.keys
    streams = {"tool", *(await announced_streams(bus, "tool")).values()}
    for stream in sorted(each for each in streams if each.partition(":")[0] == "tool"):
        key = keys.stream(stream)
        try:
            held = cast(list[list[bytes]], await call("XPENDING", key, group_of(stream), "-", "+", _CALLS_READ))
        except ServerError:
            held = []  # nobody has served this stream yet
        replies = [call("XRANGE", key, each[0], each[0]) for each in held]
        entries = [(await reply, owner[1].decode()) for reply, owner in zip(replies, held, strict=True)]
        after = f"({held[-1][0].decode()}" if held else "-"
        entries.append((await call("XRANGE", key, after, "+", "COUNT", _CALLS_READ), ""))
        for found, owner in entries:
            for entry, flat in cast(list[tuple[bytes, list[bytes]]], found):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                header = DeliveryHeader.of(fields)
                wait = open_calls.get(header.run) if header.task == task else None
                if wait is not None:
                    wait.update(name=header.name, handler=owner, since=int(entry.partition(b"-")[0]))
                    if header.attempt not in ("", "1"):
                        wait.update(attempt=int(header.attempt), errors=_errors(fields))


async def _retries(bus: EventBus, task_fields: Fields) -> dict[str, Row]:
    """Return what the task's delayed deliveries wait for, by run; a call has its own run.

    Those that wait for their tenant's turn may be thousands, so only the first are read.
    """
    names = [name[2:] for name in task_fields if name.startswith(b"z:e|")]
    in_turn = [name for name in names if b"|~" in name]
    read = [*in_turn[:_CALLS_READ], *(name for name in names if b"|~" not in name)]
    return dict(filter(None, await asyncio.gather(*(_retry(bus, name) for name in read))))


async def _retry(bus: EventBus, name: bytes) -> tuple[str, Row] | None:
    fields = unpacked(await bus.transport.call("HGET", bus.keys.base + "delayed", name))
    due = await _due(bus, name.decode())
    if due is None or not fields:
        return None
    header = DeliveryHeader.of(fields)
    if b"|~" in name:
        return header.run, {"name": header.name, "place": "queue"}
    attempt = int(header.attempt or 0)
    return header.run, {"name": header.name, "attempt": attempt, "due": due, "errors": _errors(fields)}


def _errors(fields: Fields) -> list[Row]:
    """Return the errors of a delivery's earlier attempts."""
    return cast(list[Row], msgspec.json.decode(fields[EntryField.ERRORS])) if EntryField.ERRORS in fields else []


async def _slot_waits(bus: EventBus, task: str, task_fields: Fields) -> dict[str, Row]:
    """Return the task's runs and calls that wait for a slot of a limit: the limit, and since when."""
    if b"p" not in task_fields.get(RunField.FLAGS, b""):
        return {}
    found: dict[str, Row] = {}
    for path, held in (await hash_at(bus, bus.keys.slots_of_task(task))).items():
        limit = held.decode().split("\n")[1]
        packed = await bus.transport.call("HGET", bus.keys.waiting, f"{task}|{path.decode()}") if limit else None
        if packed is not None:
            waits = msgspec.msgpack.decode(cast(bytes, packed))
            found[path.decode()] = {"limit": limit, "since": int(waits[1])}
    return found


def _header(fields: Fields) -> RunHeader:
    return RunHeader.of(fields)


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
    first = next((step for step in recorded.steps if step.run == ROOT_RUN and not step.step), None)
    if first is not None:
        view |= {name: decoded(raw) for name, raw in (("input", first.input), ("output", first.output)) if raw}
    return view


def _usage_of(recorded: TaskTrajectory) -> Row:
    """Return the task's usage from its recorded steps."""
    from runtime_core.telemetry.spans import RESPONSE_MODEL
    from runtime_core.wire.step import Usage, total_usage

    reports = [
        Usage(step.usage, {str(step.attributes.get(RESPONSE_MODEL, step.name)): step.usage} if by_model else {})
        for step in recorded.steps
        if step.usage
        for by_model in (step.kind == "model" or (step.kind == "usage" and step.name != "usage"),)
    ]
    return cast(Row, msgspec.json.decode(total_usage(reports).to_json())) if reports else {}


MAX_SCANNED = 20_000
"""The most tasks of a partition that one list scans."""
MAX_SEARCHED = 2_000
"""The same, if it searches inputs and errors."""
_READ_TOGETHER = 500
_IDS_TOGETHER = 8_000
_SEARCHED_TOGETHER = 100
_INPUTS_TOGETHER = 20
_FIELDS = ("status", "h", "ended", "steps", "av", "cur")
_CURSOR = re.compile(r"(\d{1,15}) (\S{1,200})")

Place = tuple[int, str]
"""A task's place in the list: its creation in epoch milliseconds, then its id. A list descends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks to list. Empty fields select all."""

    status: str = ""
    agent: str = ""
    session: str = ""
    key: str = ""
    tenant: str = ""
    version: str = ""
    """Only open tasks that this version of the app began. A task that has not waited yet has none."""
    since_ms: float = 0.0
    """Only tasks created at or after this time, in epoch milliseconds."""
    until_ms: float = math.inf
    """Only tasks created before this time, in epoch milliseconds."""
    text: str = ""
    """Only tasks with this text in their input or error, in upper or lower case. It is slow: it reads both."""
    prefix: str = ""
    """Only tasks whose ids begin with this text."""

    def matches(self, row: Row) -> bool:
        """Whether a task, as described by `describe_task`, is selected."""
        return (
            (not self.status or row["status"] == self.status)
            and (not self.agent or row["agent"] == self.agent)
            and (not self.session or row.get("session_id") == self.session)
            and (not self.key or row.get("key") == self.key)
            and (not self.tenant or row.get("tenant") == self.tenant)
            and (not self.version or (row.get("version") == self.version and row["status"] not in ENDED))
            and row["task_id"].startswith(self.prefix)
            and self.since_ms <= row["created"] < self.until_ms
        )


EVERY_TASK = TaskFilter()


def _place(id: bytes, created: bytes) -> Place:
    return int(float(created)), id.decode()


@dataclass(frozen=True, slots=True)
class TaskPage:
    """A part of a list."""

    tasks: list[Row]
    """As `describe_task` returns them, without inputs and outputs, and with `tenant` if the task has one.

    `parked` is true if the task's first run is parked.
    """
    cursor: str
    """The cursor of the next page; empty at the end of the list. A page may have fewer tasks than requested."""

    @property
    def reached_ms(self) -> int:
        """When the last task that the page has read was created; 0 at the end of the list."""
        return _place_in(self.cursor)[0] if self.cursor else 0


Inputs = Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Reads the inputs of ended tasks (JSON) by id."""


async def list_tasks(
    buses: Sequence[EventBus],
    wanted: TaskFilter,
    limit: int,
    cursor: str = "",
    inputs: Inputs | None = None,
    seconds: float = math.inf,
) -> TaskPage:
    """Return tasks in the order of their creation, the newest first.

    `inputs` reads the inputs that a search needs and the broker no longer has. After `seconds` no further read begins,
    and the page ends.

    A cursor names a place in this order, not a number of tasks: new tasks and deleted ones move no other task to
    another page. Raises InvalidInput (`cursor`) for text that is not a cursor.
    """
    after = _place_in(cursor) if cursor else None
    share = seconds / len(buses)
    scans = [await _TaskSearch(bus, wanted, after, inputs).run(limit, time.monotonic() + share) for bus in buses]
    # After the place where a scan has stopped, its partition may have newer tasks than another one.
    horizon = max((scan.stopped for scan in scans if scan.stopped is not None), default=None)
    merged = heapq.merge(*(scan.found for scan in scans), key=lambda item: item[0], reverse=True)
    found = [item for item in merged if horizon is None or item[0] >= horizon]
    page = found[:limit]
    if len(found) > limit:
        return TaskPage([row for _, row in page], _cursor_at(page[-1][0]))
    return TaskPage([row for _, row in page], "" if horizon is None else _cursor_at(horizon))


@dataclass(slots=True)
class _TaskSearch:
    """The search in one partition."""

    bus: EventBus
    wanted: TaskFilter
    after: Place | None
    inputs: Inputs | None
    found: list[tuple[Place, Row]] = field(default_factory=list)
    stopped: Place | None = None
    """The last place that it has read; None if there are no more."""

    async def run(self, limit: int, deadline: float) -> _TaskSearch:
        most, together = (MAX_SEARCHED, _SEARCHED_TOGETHER) if self.wanted.text else (MAX_SCANNED, _READ_TOGETHER)
        least = together if self.wanted != EVERY_TASK else min(limit + 1, together)
        scanned, together = 0, least
        last, prefix = self.after, self.wanted.prefix.encode()
        index, tenant, until = self.bus.keys.index, self.wanted.tenant, self.wanted.until_ms
        if self.wanted.status and self.wanted.status not in ENDED:
            # They are few among those that have ended. A task that was reopened is listed by that time.
            index, until = self.bus.keys.open_tasks_of(tenant) if tenant else self.bus.keys.open_tasks, math.inf
        elif tenant:
            index = self.bus.keys.index_of(tenant)
        latest = "+inf" if until == math.inf else f"({until:.0f}"
        if last is not None and last[0] < until:
            latest = str(last[0])
        while scanned < most and len(self.found) < limit and not (scanned and time.monotonic() > deadline):
            # From the millisecond of the last task, not by a number of tasks: those may go while this reads.
            flat = cast(
                list[bytes],
                await self.bus.transport.call(
                    "ZRANGE", index, latest, f"{self.wanted.since_ms:.0f}",
                    "BYSCORE", "REV", "LIMIT", 0, together, "WITHSCORES",
                ),
            )  # fmt: skip
            ids, times = flat[::2], flat[1::2]
            named = [_place(id, at) for id, at in zip(ids, times, strict=True) if id.startswith(prefix)]
            # Reading an id costs a twentieth of a task: a small tenant's list skips the tasks of others quickly.
            scanned += len(named) + len(ids) // 20
            await self._take([place for place in named if last is None or place < last])
            if len(ids) < together:
                return self
            end = _place(ids[-1], times[-1])
            if last is None or end < last:
                last = end
                latest = str(last[0])
                together = min(2 * together, _IDS_TOGETHER) if len(named) * 20 < len(ids) else least
            else:
                together *= 2  # one millisecond has more tasks than a read
        self.stopped = last
        return self

    async def _take(self, places: Sequence[Place]) -> None:
        call, keys = self.bus.transport.call, self.bus.keys
        replies = [call("HMGET", keys.task(task), *_FIELDS) for _, task in places]
        matching: list[tuple[Place, Row]] = []
        for place, reply in zip(places, replies, strict=True):
            values = cast(list[bytes | None], await reply)
            if values[0] is None:
                continue  # past its retention time
            fields = {name.encode(): value for name, value in zip(_FIELDS, values, strict=True) if value is not None}
            tenant = _header(fields).tenant
            row = describe_task(place[1], fields)
            if tenant:
                row["tenant"] = tenant
            if fields.get(RunField.CURRENT) == b"park":
                row["parked"] = True
            if self.wanted.matches(row):
                matching.append((place, row))
        self.found += await self._with_text(matching) if self.wanted.text else matching

    async def _with_text(self, found: Sequence[tuple[Place, Row]]) -> list[tuple[Place, Row]]:
        """Return the tasks that have the text in their input or error."""
        call, keys = self.bus.transport.call, self.bus.keys
        having = []
        for first in range(0, len(found), _INPUTS_TOGETHER):
            part = found[first : first + _INPUTS_TOGETHER]
            replies = [call("HMGET", keys.task(task), "d", "out") for (_, task), _ in part]
            read = {
                item[0][1]: cast(list[bytes | None], await reply) for item, reply in zip(part, replies, strict=True)
            }
            gone = [task for task, (input, _) in read.items() if input is None]
            ended = await self.inputs(gone) if self.inputs is not None and gone else {}
            for item in part:
                task = item[0][1]
                input, final = read[task]
                error = _error_in(final) if final is not None else None
                if has_text([readable(input or ended.get(task, b"")), error], self.wanted.text):
                    having.append(item)
        return having


def has_text(value: object, text: str) -> bool:
    """Return whether a text, number or key anywhere in JSON contains a text, in upper or lower case."""
    wanted = text.casefold()
    left: list[object] = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list):
            left += each
        elif each is not None and not isinstance(each, bool) and wanted in str(each).casefold():
            return True
    return False


def _error_in(final: bytes) -> object:
    return msgspec.json.decode(final).get("error")


async def tasks_in_store(store: TrajectoryStore, namespace: str, wanted: TaskFilter, limit: int) -> list[Row]:
    """Return ended tasks, the newest first. The store does not know the keys of tasks."""
    found: list[Row] = []
    before: str | None = None
    for _ in range(0, 0 if wanted.key or wanted.version else MAX_SCANNED, limit):
        ends = await store.tasks(
            namespace, status=wanted.status or None, agent=wanted.agent or None, session=wanted.session or None,
            since_ms=wanted.since_ms, until_ms=wanted.until_ms, limit=limit, before=before,
        )  # fmt: skip
        rows = [{"task_id": end.task, **of_end(end)} for end in ends]
        found += [row for row in rows if wanted.matches(row)]
        if len(ends) < limit or len(found) >= limit:
            break
        before = ends[-1].task
    return found[:limit]


def _cursor_at(place: Place) -> str:
    return base64.urlsafe_b64encode(f"{place[0]} {place[1]}".encode()).decode().rstrip("=")


def _place_in(cursor: str) -> Place:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    parts = _CURSOR.fullmatch(text) if len(cursor) <= 400 else None
    if parts is None or not is_task_id(parts[2]):
        raise wrong_cursor(cursor)
    return int(parts[1]), parts[2]
