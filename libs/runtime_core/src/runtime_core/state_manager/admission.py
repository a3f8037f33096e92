"""Starts the task of a valid submit and delivers a valid answer to a question. Every path into Weft uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from runtime_core.base.text import choices
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Submitted, find_place, submit_once
from runtime_core.consumer.announcements import MANIFESTS_FRESH_SECONDS, ManifestCache, announced_names, read_manifests
from runtime_core.declare.manifest import (
    GUARD_MARK,
    AgentEntry,
    HookPoint,
    Manifest,
    Schema,
    ValueCheck,
    point_named,
    short_line,
    value_check,
)
from runtime_core.errors import ConfigurationError, InvalidInput, Rejected
from runtime_core.wire.commands import Submission, default_task_id
from runtime_core.wire.ids import instance_address, partition_of

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})


class Admission:
    """Submits tasks to the partitions of a namespace."""

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses
        self._checks: dict[str, InputCheck] = {}
        self._apps: dict[str, Manifest] = {}
        """The manifest that declares each agent."""
        self._internal: set[str] = set()
        """Agents that only other agents may call."""
        self._manifest_cache = ManifestCache(buses[0])
        self._manifests: Sequence[Manifest] = ()
        """The manifests from which the checks were built."""
        self._read_at = -MANIFESTS_FRESH_SECONDS

    async def admit(self, new: Submission) -> Submitted:
        """Check and start a task.

        Raises `Rejected` (or its subclass `NotYet`) with the field, `InvalidInput` if the input does not match the
        agent's schema, `Fenced` if the submission's epoch is not the newest admitter's.
        """
        await self._check_input(new)
        if new.begun is None:  # a fork repeats a task that another agent has started
            self._check_outside(new.agent)
        if new.deadline is not None and new.deadline <= time.time() * 1000:
            raise Rejected("deadline", "has passed before the task was admitted", task_id=new.task_id)
        if new.hooks:
            new = replace(new, hooks=await self._hooks_of(new))
        if len(self._buses) == 1:
            return await self._buses[0].submit(new)
        id_home = partition_of(default_task_id(new.source, new.event_id), len(self._buses))
        return await submit_once(self._buses, self.partition_for(new), id_home, new)

    async def check(self, submission: Submission) -> None:
        """Check a submit that will be made later. Raises Rejected for an unknown agent, InvalidInput for its input.

        Raises nothing until a handler has published its agents.
        """
        bus = self._buses[self.partition_for(submission)]
        known = await announced_names(bus, "agent")
        if known and submission.agent not in known:
            names = [name for name in known if not name.startswith("weft.")]
            raise Rejected("data.agent", f"no agent is named {submission.agent}; {choices(names)}")
        await self._check_input(submission)
        self._check_outside(submission.agent)

    def partition_for(self, new: Submission) -> int:
        """Return the partition of a task: that of its instance if the user gave a key, else that of its id."""
        if len(self._buses) == 1:
            return 0
        place = instance_address(new.agent, new.key) if new.key else new.partition_key or new.task_id
        return partition_of(place, len(self._buses), "data.key" if new.key else "partitionkey")

    async def find(self, task: str) -> EventBus:
        """Return the partition that holds a task."""
        return await find_place(self._buses, task)

    async def _check_input(self, submission: Submission) -> None:
        check = self._checks.get(submission.agent)
        now = time.monotonic()
        if check is None or now - self._read_at > MANIFESTS_FRESH_SECONDS:
            self._read_at = now  # one submit reads them again; concurrent ones use the cached checks
            await self._read_manifests()
            check = self._checks.get(submission.agent)
        if check is not None:
            check.json(submission.input_json)

    def _check_outside(self, agent: str) -> None:
        if agent in self._internal:
            raise Rejected("data.agent", f"{agent} is internal: only other agents may call it")

    async def _hooks_of(self, submission: Submission) -> dict[str, list[str]]:
        """Return the hooks that the submit names, in the form of its context. The agent's app must declare them.

        Raises Rejected (`data.hooks.<point>`).
        """
        try:
            return _named_hooks(submission, self._apps.get(submission.agent))
        except Rejected:
            await self._read_manifests()  # the hook may be newer than the cache
            return _named_hooks(submission, self._apps.get(submission.agent))

    async def _read_manifests(self) -> None:
        """Read the inputs that the apps of this namespace declare. The broker refuses unknown agents."""
        manifests = await self._manifest_cache.newest()
        self._read_at = time.monotonic()
        if manifests is self._manifests:
            return  # compiling a schema's checks takes milliseconds
        checks: dict[str, InputCheck] = {}
        apps: dict[str, Manifest] = {}
        internal: set[str] = set()
        for manifest in manifests:
            for name, entry in manifest.agents.items():
                checks[name] = InputCheck(name, entry)
                apps[name] = manifest
                if entry.internal:
                    internal.add(name)
        self._checks, self._apps, self._internal, self._manifests = checks, apps, internal, manifests


def _named_hooks(submission: Submission, app: Manifest | None) -> dict[str, list[str]]:
    """Return the hooks that a submit names, for the task's context: points by current name, guards marked.

    `app` is the agent's manifest; None if it is not published, so that names cannot be looked up. Raises
    Rejected(`data.hooks.<point>`) for an unknown point or name.
    """
    found: dict[str, list[str]] = {}
    for written, names in submission.hooks.items():
        field = f"data.hooks.{written}"
        try:
            point = point_named(written, field)
        except InvalidInput as error:
            raise Rejected(error.field, error.message, task_id=submission.task_id) from None
        at_point = found.setdefault(str(point), [])
        for name in names:
            marked = name if app is None else _marked(app, point, name, submission, field)
            if marked not in at_point:
                at_point.append(marked)
    return {point: names for point, names in found.items() if names}


def _marked(app: Manifest, point: HookPoint, name: str, submission: Submission, field: str) -> str:
    known = app.hooks.get(point, {})
    if name not in known:
        there = f"it declares {', '.join(sorted(known))} there" if known else "it declares none there"
        raise Rejected(field, f"app {app.app!r} has no hook {name!r} at {point}; {there}", task_id=submission.task_id)
    return GUARD_MARK + name if known[name].guard else name


class SchemaCheck:
    """Checks values against the JSON schema of `what`, as in `input of agent 'writer'`.

    The first check compiles the schema, so an invalid one concerns only its own agent.
    """

    __slots__ = ("_check", "_kind", "_schema", "_what")

    def __init__(self, what: str, schema: Schema | None) -> None:
        self._kind = "any" if not schema else _plain_kind(schema)
        self._what = what
        self._schema = schema or {}
        self._check: ValueCheck | None = None

    def value(self, value: object, field: str = "data.input") -> None:
        """Raise InvalidInput with the path of the wrong part, as in `data.input.topic`.

        Raises ConfigurationError for an invalid schema.
        """
        if not self._kind:
            if self._check is None:
                self._check = self._compiled()
            self._check(value, field)
        elif self._kind == "null" and value is not None:
            raise InvalidInput(field, f"got {_quoted(value)} where no value is taken; leave it out")
        elif self._kind != "any" and not _is_kind(self._kind, value):
            raise InvalidInput(field, f'{_quoted(value)} is not of type "{self._kind}"')

    def json(self, data: bytes, field: str = "data.input") -> None:
        """Do the same for JSON. It is decoded only if the schema needs that."""
        if self._kind == "any" or (self._kind == "string" and data[:1] == b'"'):
            return
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise InvalidInput(field, f"cannot be read: {error}") from None
        self.value(value, field)

    def _compiled(self) -> ValueCheck:
        try:
            return value_check(self._schema)
        except InvalidInput as error:
            raise ConfigurationError(
                f"the manifest's schema for the {self._what} is not valid, {error.message}: fix its declaration. "
                "A schema contains everything that it refers to, under $defs"
            ) from None


class InputCheck(SchemaCheck):
    __slots__ = ()

    def __init__(self, name: str, agent: AgentEntry) -> None:
        super().__init__(f"input of agent {name!r}", agent.input)


async def check_data(bus: EventBus, stream: str, name: str, data: bytes, field: str = "data") -> None:
    """Check the input of an agent, or the arguments of a tool, by its published schema; `stream` is its work stream.

    Raises Rejected with the wrong part, as in `data.amount`. Without a published schema, any data passes.
    """
    kind = stream.partition(":")[0]
    for manifest in await read_manifests(bus):
        if kind == "agent" and name in manifest.agents:
            check = SchemaCheck(f"input of agent {name!r}", manifest.agents[name].input)
        elif kind == "tool" and name in manifest.tools:
            check = SchemaCheck(f"arguments of tool {name!r}", manifest.tools[name].arguments)
        else:
            continue
        try:
            check.json(data, field)
        except InvalidInput as error:
            raise Rejected(error.field, error.message) from None
        return


async def answer_question(
    bus: EventBus, task: str, request: str, value: bytes, event: str, *, trace: str = "", durable: bool = True
) -> list[str]:
    """Answer a question of a task, if the value (JSON) fits the question's schema. Returns what `EventBus.signal` does.

    Raises `NotDurable` as `EventBus.signal` does.
    """
    answer = await bus.signal(task, request, value, event, trace=trace, durable=durable)
    if answer[0] != "schema":
        return answer
    try:
        value_check(msgspec.json.decode(answer[1])["schema"], formats=True)(msgspec.json.decode(value), "value")
    except InvalidInput as error:
        return ["invalid", error.message, error.field]
    # The schema of a question never changes, so it need not be read again.
    return await bus.signal(task, request, value, event, trace=trace, durable=durable, fits=True)


def _plain_kind(schema: Schema) -> str:
    """Return the type's name if the schema has no other keyword, `any` if it has none at all, else an empty text."""
    asks = schema.keys() - _ANNOTATIONS
    if not asks:
        return "any"
    kind = schema.get("type")
    if asks == {"type"} and isinstance(kind, str) and kind in _KINDS:
        return kind
    # An object of any members, as `dict[str, object]` gives.
    if asks == {"type", "additionalProperties"} and kind == "object" and schema["additionalProperties"] is True:
        return "object"
    return ""


def _is_kind(kind: str, value: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _quoted(value: object) -> str:
    """Return the value as JSON on one short line. Its secrets are hidden before it is shortened."""
    try:
        text = msgspec.json.encode(value).decode()
    except (OverflowError, TypeError, ValueError):  # an integer of more than 64 bits, or half of a surrogate pair
        text = repr(value)
    return short_line(text, 60)
