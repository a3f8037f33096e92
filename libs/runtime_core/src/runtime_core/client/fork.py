"""Forks: a new task starts with the recorded results of another one, and runs the later steps itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput
from runtime_core.runs.hooks.declared import STEP, named_before
from runtime_core.runs.journal import DIGEST_BYTES, MAX_JOURNAL_BYTES, canonical, pack, payload_of, status_of, time_of
from runtime_core.runs.output import OUTPUT
from runtime_core.telemetry.secret_search import HIDDEN
from runtime_core.trajectory.reading import TaskTrajectory, in_order
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import (
    NO_OPTIONS,
    SUBMIT,
    ForkJournal,
    Submission,
    SubmitOptions,
    digest,
    new_submission,
)
from runtime_core.wire.envelope import ANONYMOUS
from runtime_core.wire.events import StreamingMode
from runtime_core.wire.ids import (
    ANY_DIGEST,
    ROOT_RUN,
    RunField,
    RunHeader,
    any_digest,
    attempt_in_digest,
    digest_in_attempt,
    step_digest,
)
from runtime_core.wire.step import (
    ATTEMPTS,
    DIGEST,
    KEY_RETURNS,
    PIECES,
    RESULT_ERROR,
    RESULT_OK,
    STEPS,
    Status,
    Step,
    before,
    place,
)

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.trajectory.store import TrajectoryStore

_STEP = r"[1-9][0-9]*(\.(0|[1-9][0-9]*))*"
_AT = re.compile(rf"{_STEP}(/{_STEP})*")
_PAGE_ENTRIES = 1000
_HIDDEN = HIDDEN.encode()
_OUTGOING = ("emit", "send", "publish", "message", "usage")
"""Kinds of steps without a result. Their content is in the input, or for an emit in the output."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One finished step of a run."""

    id: str
    kind: str
    """As in the trajectory; empty if only the broker's journal has the step."""
    name: str
    key: str
    request: bytes
    """The request as JSON; empty if it is not recorded."""
    status: bytes
    """`K` or `E`, as in a journal value."""
    payload: bytes
    """JSON of the result or of the error."""
    ended_ms: int
    recorded_digest: str = ""
    """The recorded digest of a step whose digest does not derive from its request."""
    pieces: int = 1
    """The pieces of a row of output."""

    @property
    def wildcard(self) -> bytes:
        """The journal value that matches any arguments."""
        digest = any_digest(self.kind, self.name) if self.kind else ANY_DIGEST
        return pack(digest, self.status, self.ended_ms, self.payload)

    @property
    def digest(self) -> str:
        """The digest of the request; a wildcard if the request is not recorded."""
        if self.recorded_digest:
            return self.recorded_digest
        # A redacted request is unknown, too.
        if not self.request or self.kind in ("human", "receive", "timer", "ray", "spark") or _HIDDEN in self.request:
            return any_digest(self.kind, self.name) if self.kind else ANY_DIGEST
        return step_digest(self.kind, self.name, self.key, canonical(self.request))


@dataclass(slots=True)
class RecordedRun:
    """One run of an agent with its finished steps."""

    id: str
    agent: str = ""
    key: str = ""
    input: bytes = b""
    started_ms: int = 0
    attempt: int = 1
    status: str = ""
    """Empty while the run is open."""
    output: bytes = b""
    error: dict[str, str] | None = None
    attempts: Mapping[str, int] | None = None
    """What `ctx.attempt` has returned, by the number of the step before it; None if that is not recorded."""
    steps: dict[str, RecordedStep] = field(default_factory=dict)

    def journal(self, step: str | None = None) -> dict[str, bytes]:
        """Return the `ForkJournal.journal` of the steps before a step; None: of all. Its values match any arguments."""
        values = {each.id: each.wildcard for each in self.before(step) if each.kind != "emit"}
        return values | {f"@{branch}": b"%d" % pieces for branch, pieces in self.emitted_before(step).items()}

    def emitted_before(self, step: str | None) -> dict[str, int]:
        """Return how many pieces of output each branch (by its name) has emitted before a step; None: in all."""
        found: dict[str, int] = {}
        for each in self.before(step):
            if each.kind == "emit":
                prefix, dot, _ = each.id.rpartition(".")
                branch = f"{prefix}{dot}{OUTPUT}"
                found[branch] = found.get(branch, 0) + each.pieces
        return found

    @property
    def last_place(self) -> int:
        """The place of the last step of its function."""
        places = (each.partition(".")[0] for each in self.steps)
        return max((int(place) for place in places if place.isdecimal()), default=0)

    def before(self, step: str | None) -> list[RecordedStep]:
        """Return the steps with a smaller path, in the program's order; None: all steps."""
        limit = None if step is None else place("", step)
        ordered = sorted((place("", each.id), each) for each in self.steps.values())
        return [each for where, each in ordered if limit is None or where < limit]


def runs_of(trajectory: TaskTrajectory) -> dict[str, RecordedRun]:
    """Return the agents' runs by run id; of several attempts, the last one.

    A fork's first run includes the results that it inherited.
    """
    runs: dict[str, RecordedRun] = {}
    last: dict[tuple[str, str], Step] = {}
    for row in trajectory.steps:
        last[row.run, row.step] = row
    for row in trajectory.inherited:
        run, step = (row.run, row.step) if row.step else _parent_of(row.run)
        if step:
            _run(runs, run).steps[step] = _step(step, row)
    for (run, step), row in last.items():
        if row.kind == "fork":
            _add_replacement(_run(runs, run), row)
            continue
        if step:
            _run(runs, run).steps[step] = _step(step, row)
            continue
        if row.kind == "agent":
            _fill(_run(runs, run), row)
        parent, parent_step = _parent_of(run)
        if parent:
            _run(runs, parent).steps[parent_step] = _step(parent_step, row)
    return runs


def _parent_of(run: str) -> tuple[str, str]:
    """Return the run and the step that started a run; both are empty for a task's first run."""
    parent, _, step = run.rpartition("/")
    return (parent, step) if parent else ("", "")


def _add_replacement(run: RecordedRun, row: Step) -> None:
    """Add the result with which a fork replaced a recorded one."""
    given = msgspec.json.decode(bytes(row.input), type=dict[str, msgspec.Raw]) if row.input else {}
    if "step" in given and "result" in given:
        step, payload = msgspec.json.decode(given["step"], type=str), bytes(given["result"])
        run.steps[step] = RecordedStep(step, "", "", "", b"", RESULT_OK, payload, int(row.ended))


def _run(runs: dict[str, RecordedRun], run: str) -> RecordedRun:
    return runs.setdefault(run, RecordedRun(run))


def _fill(run: RecordedRun, row: Step) -> None:
    run.agent, run.key, run.attempt, run.status = row.name, row.key, row.attempt, row.status
    run.input, run.output, run.started_ms = bytes(row.input), bytes(row.output), int(row.started)
    if (read := row.attributes.get(ATTEMPTS)) is not None:
        run.attempts = {place: int(attempt) for place, _, attempt in (text.partition("=") for text in read)}
    run.error = None if row.error is None else {"type": row.error.type, "message": row.error.message}


def _step(step: str, row: Step) -> RecordedStep:
    if row.kind in _OUTGOING:
        request = bytes(row.output) if row.kind == "emit" else bytes(row.input)
        recorded = str(row.attributes.get(DIGEST, ""))
        pieces = int(row.attributes.get(PIECES, 1))
        return RecordedStep(
            step, row.kind, row.name, row.key, request, RESULT_OK, b"null", int(row.ended), recorded, pieces
        )
    if row.status == Status.COMPLETED:
        status, payload = RESULT_OK, bytes(row.output) or b"null"
    else:
        error = {"type": row.status.capitalize(), "message": ""}
        if row.error is not None:
            error = {"type": row.error.type, "message": row.error.message}
        status, payload = RESULT_ERROR, msgspec.json.encode(error)
    if row.input_after:  # from the record stream, which has only the end of the messages
        return RecordedStep(step, row.kind, row.name, row.key, b"", status, payload, int(row.ended))
    recorded = str(row.attributes.get(DIGEST, ""))
    return RecordedStep(step, row.kind, row.name, row.key, bytes(row.input), status, payload, int(row.ended), recorded)


# -- reading from the broker ----------------------------------------------------------------------------------------


async def recorded(
    bus: EventBus, namespace: str, task: str, store: TrajectoryStore | None
) -> tuple[dict[str, RecordedRun], dict[str, object]]:
    """Return a task's runs by id and its context (session, metadata), from the broker and the trajectory store.

    The broker has the journal of an open task, and the record of an ended one until the record is trimmed.
    Raises InvalidInput(`task_id`) if both lack the task.
    """
    # The journals first: a run that ends while its rows are read takes its journal with it, but then has its rows.
    journals = await _journals(bus, task)
    fields = journals.pop(ROOT_RUN)
    known = await store.task(namespace, task) if store is not None else None
    if known is None or known.end is None:  # the store does not have the last rows yet
        rows = await from_record(bus, namespace, task)
        # The store once more: rows that it has written since then may have been trimmed before the record was read.
        known = _joined(await store.task(namespace, task) if store is not None else None, rows)
    runs = runs_of(known) if known is not None else {}
    run = _run(runs, ROOT_RUN)
    header = RunHeader.of(fields)
    run.agent, run.key = run.agent or header.agent, run.key or header.key
    run.input = run.input or fields.get(RunField.INPUT, b"")
    if not run.agent and known is not None and known.end is not None:
        run.agent = known.end.agent
    if not run.agent:
        raise InvalidInput(
            "task_id",
            f"the broker has no data of task {task!r}: check the id, or name the trajectory store that recorded it "
            "(WEFT_TRAJECTORY_URL; in Python also store=…)",
        )
    _add_journal(run, fields)
    for name, journal in journals.items():
        child = _run(runs, name)
        child.agent = child.agent or RunHeader.of(journal).agent
        _add_journal(child, journal)
    context: dict[str, object] = msgspec.json.decode(fields[RunField.CONTEXT]) if fields.get(RunField.CONTEXT) else {}
    if header.session:
        context.setdefault("session_id", header.session)
    elif known is not None and known.end is not None and known.end.session:
        context.setdefault("session_id", known.end.session)
    return runs, context


async def _journals(bus: EventBus, task: str) -> dict[str, dict[bytes, bytes]]:
    """Return the fields of the hash of each open run, by run id; those of the first run even if it has none."""
    found = {ROOT_RUN: await _fields(bus, bus.keys.task(task))}
    for name, value in found[ROOT_RUN].items():
        if name.startswith(RunField.CHILD) and not value.startswith(b"@"):
            run = name[2:].decode()
            found[run] = await _fields(bus, bus.keys.run(task, run))
    return found


async def _fields(bus: EventBus, key: str) -> dict[bytes, bytes]:
    flat = cast(list[bytes], await bus.transport.call("HGETALL", key))
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _joined(stored: TaskTrajectory | None, on_broker: TaskTrajectory | None) -> TaskTrajectory | None:
    """Return what the store and the record have together. A row may be in both."""
    if stored is None or on_broker is None:
        return stored or on_broker
    return replace(stored, end=stored.end or on_broker.end, steps=in_place([*stored.steps, *on_broker.steps]))


def _add_journal(run: RecordedRun, fields: Mapping[bytes, bytes]) -> None:
    """Add the results in the fields of a run's hash that the record does not have yet."""
    for name, value in fields.items():
        if name.startswith(b"j:"):
            step = name[2:].decode()
            run.steps.setdefault(
                step,
                RecordedStep(step, _kind_of(value), "", "", b"", status_of(value), payload_of(value), time_of(value)),
            )


_RELEASE = step_digest("release", "key", "", b"")


def _kind_of(value: bytes) -> str:
    """Return the kind of a step of which only the journal value is known: `release`, or nothing."""
    digest = value[:DIGEST_BYTES].decode()
    same = digest == _RELEASE or digest == digest_in_attempt(_RELEASE, attempt_in_digest(digest))
    return "release" if same else ""


async def from_record(bus: EventBus, namespace: str, task: str) -> TaskTrajectory | None:
    """Return what a partition's record stream still has of a task; None if nothing. Reads the whole stream."""
    from runtime_core.trajectory.recorder import (
        record_entries,
    )  # here: it imports SQLAlchemy, which takes half a second

    await bus.make_group(bus.keys.record, TRAJECTORY_RECORDER)
    steps: list[Step] = []
    end = None
    start = "-"
    while True:
        page = pairs(await bus.transport.call("XRANGE", bus.keys.record, start, "+", "COUNT", _PAGE_ENTRIES))
        for read in await record_entries([(entry, fields) for entry, fields in page if fields[1].decode() == task]):
            end = read.end or end
            if read.steps:
                steps += STEPS.decode(read.steps)
        if len(page) < _PAGE_ENTRIES:
            break
        start = "(" + page[-1][0].decode()
    if end is None and not steps:
        return None
    return TaskTrajectory(namespace, task, end, in_place(steps))


def in_place(steps: Iterable[Step]) -> list[Step]:
    """Return steps in the order of a trajectory."""
    return sorted(steps, key=in_order)


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork inherits."""

    run: RecordedRun
    input: bytes
    context: dict[str, object]
    begun: ForkJournal

    def submission(
        self,
        *,
        task_id: str,
        session_id: str | None = None,
        stream: bool | StreamingMode | str = False,
        options: SubmitOptions = NO_OPTIONS,
    ) -> Submission:
        """Return the fork's submission. Session, tenant, hooks and metadata default to the origin's if known.

        Raises InvalidInput.
        """
        metadata: Any = self.context.get("metadata")  # Any: JSON of the origin's submit
        hooks = named_before(self.run.steps[STEP].payload) if STEP in self.run.steps else None
        new = new_submission(
            self.run.agent,
            msgspec.json.decode(self.input),
            source=ANONYMOUS,
            event_id=task_id,
            key=self.run.key or None,
            task_id=task_id,
            session_id=(self.context.get("session_id") if session_id is None else session_id) or None,
            stream=stream,
            options=replace(
                options,
                tenant=options.tenant or str(self.context.get("tenant", "")),
                hooks=hooks if options.hooks is None else options.hooks,
                metadata=metadata if options.metadata is None else options.metadata,
            ),
        )
        # Two forks are equal if they begin with the same results.
        values = {step: value.decode(errors="replace") for step, value in self.begun.journal.items()}
        new.digest = digest(SUBMIT, [new.digest, self.begun.task, self.begun.step, values])
        new.begun = self.begun
        return new


async def plan_fork(
    bus: EventBus,
    namespace: str,
    origin: str,
    *,
    at: str | None,
    input: object,
    store: TrajectoryStore | None,
) -> ForkPlan:
    """Plan a fork, as in `Client.fork`; `bus` is the origin's partition."""
    if isinstance(at, str) and at.startswith(f"{ROOT_RUN}/"):
        at = at.removeprefix(f"{ROOT_RUN}/").removesuffix("/")  # as in a trajectory: the run and the step, if any
    if at is not None and not (isinstance(at, str) and _AT.fullmatch(at)):
        raise InvalidInput(
            "at",
            f"{quoted(at)} is not a step, such as 3.0.1, or 2/1 for step 1 of the run that step 2 started; "
            "`weft trajectory show` lists them. Output, such as 3e1, is not a step",
        )
    runs, context = await recorded(bus, namespace, origin, store)
    run = runs[ROOT_RUN]
    new_input = run.input
    journal: dict[str, bytes] = {}
    result = b""
    if at is None:
        if not isinstance(input, EllipsisType):
            new_input = encode(input, "input")
    else:
        inside = _run_of(runs, at, origin)
        journal = _inherited(runs, at)
        if not isinstance(input, EllipsisType):
            result = encode(input, "input")
            journal[at] = _replaced(inside, at, result).wildcard
    if not new_input:
        # The row with a run's input is not written if the run is cancelled or times out.
        raise InvalidInput(
            "input", f"is not recorded, since task {origin!r} was cancelled or timed out: give the input"
        )
    if sum(map(len, journal.values())) > MAX_JOURNAL_BYTES:
        raise InvalidInput(
            "at", f"the results before step {at} exceed {MAX_JOURNAL_BYTES} bytes: fork at an earlier step"
        )
    return ForkPlan(run, new_input, context, ForkJournal(origin, at or "", journal, result))


def _run_of(runs: Mapping[str, RecordedRun], at: str, origin: str) -> RecordedRun:
    """Return the run of a step. Raises InvalidInput(`at`) if the origin has no such run, or the step is too late."""
    above, _, step = at.rpartition("/")
    run = runs.get(f"{ROOT_RUN}/{above}" if above else ROOT_RUN)
    if run is None:
        raise InvalidInput("at", f"step {above} of task {origin!r} has no run: name the step of a call of an agent")
    last = run.last_place
    if int(step.partition(".")[0]) > last + 1:
        whose = f"run {run.id} of task {origin!r}" if above else f"task {origin!r}"
        raise InvalidInput("at", f"step {at} is too late: the last step of {whose} is {last}")
    return run


def _inherited(runs: Mapping[str, RecordedRun], at: str) -> dict[str, bytes]:
    """Return the results before `at`, as in `ForkJournal.journal`: of the first run, and of each run that the fork
    requests again, because its step has no result, or because `at` is inside it.
    """
    wanted = at.split("/")
    journal: dict[str, bytes] = {}
    for run in sorted(runs.values(), key=lambda each: each.id.count("/")):
        path = run.id.split("/")[1:]
        inside = path == wanted[: len(path)] and len(path) < len(wanted)
        step, above = "/".join(path), "/".join([*path[:-1], ""])
        if not inside and (not before(run.id, "", at) or step in journal or (above and above not in journal)):
            continue
        if path:
            journal[f"{step}/"] = run.agent.encode()
        inherited = run.journal(wanted[len(path)] if inside else None)
        for name in _about_its_key(run):
            inherited.pop(name, None)
        journal |= {f"{step}/{name}" if path else name: value for name, value in inherited.items()}
    return journal


def _about_its_key(run: RecordedRun) -> set[str]:
    """Return the steps by which a run gave up its key and got it back. A fork repeats them: the state that the origin
    got with its key is no longer that of the instance.
    """
    ends = {each.id for each in run.steps.values() if each.kind == "acquire" or each.id.endswith(KEY_RETURNS)}
    return (
        ends
        | {end.removesuffix(KEY_RETURNS) for end in ends}
        | {each.id for each in run.steps.values() if each.kind == "release"}
    )


def _replaced(run: RecordedRun, at: str, result: bytes) -> RecordedStep:
    step = at.rpartition("/")[2]
    there = run.steps.get(step)
    if there is None or there.kind in ("emit", "release", "acquire"):
        raise InvalidInput(
            "at",
            f"step {at} has no recorded result to replace with `input`: choose one that `weft trajectory show` lists",
        )
    return RecordedStep(step, there.kind, there.name, there.key, b"", RESULT_OK, result, there.ended_ms)
