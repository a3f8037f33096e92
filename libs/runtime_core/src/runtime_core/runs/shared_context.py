"""Contexts of a session, a task or an agent: values, tokens and counters, in levels and in branches that merge."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput
from runtime_core.runs.context_values import Conflict, ContextState, Ledger, checked_key, from_plain, plain

SNAPSHOT_VERSION: Final = 1
# Any below: the user's own values.
# Integers stay integers, so that a copy encodes to the same bytes.
Number = int | float
Slots = dict[str, dict[str, list[Number]]]
Merged = dict[str, tuple[int, str]]


class Context:
    """Values by key, used tokens, and counters: JSON, and the same at each replay.

    `child` creates a level below, which reads this one's current values: session → task → agent. `fork` creates a copy
    for a concurrent branch. `merge` brings back the changes of either, in the order in which you call it: it loses no
    write and counts nothing twice. Not thread-safe: use a context in one event loop.
    """

    def __init__(self, session_id: str = "", task_id: str = "", agent: str = "", *, id: str = "0") -> None:
        self.id = id
        """Unique among all contexts that it may be merged with."""
        self.session_id = session_id
        self.task_id = task_id
        self.agent = agent
        self.parent: Context | None = None
        self.context_info = ContextState()
        """Values by key, a MutableMapping that `get` and `put` use."""
        self.agent_info = ContextState()
        """Values by agent name: what agents report of themselves."""
        self.conflicts: list[Conflict] = []
        """Conflicting changes of branches, oldest first."""
        self._tokens = Ledger()
        self._counters = Ledger()
        self._forks = 0
        self._revision = 1
        self._known_conflicts = 0
        # Id of a branch → its newest merged revision, and a digest of it.
        self._merged: dict[str, tuple[int, str]] = {}

    def __repr__(self) -> str:
        where = "/".join(part for part in (self.session_id, self.task_id, self.agent) if part)
        return f"<Context {self.id} {where}>"

    # ---- values ------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:  # Any: the user's own values
        """Return the value of this level, or else the parent's, or else the default."""
        return self.context_info.get(key, default)

    def put(self, key: str, value: object) -> None:
        """Store a value in this level: JSON, or a set of strings and numbers. Raises InvalidInput with the key."""
        self.context_info[key] = value

    def delete(self, key: str) -> None:
        """Delete a key in this level, and hide the parent's. Raises KeyError if it does not exist."""
        del self.context_info[key]

    def increment(self, key: str, by: float = 1) -> float:
        """Add to a counter and return its value. Merging adds the counters of branches."""
        self._counters.add(self.id, checked_key(key), _number(f"counters.{key}", by))
        return self.count(key)

    def count(self, key: str) -> float:
        """Return the value of a counter; 0 if nothing was added."""
        return self.counters.get(key, 0)

    @property
    def counters(self) -> dict[str, float]:
        """Return all counters, with those of the levels above."""
        return _with(self.parent.counters if self.parent is not None else {}, self._counters.totals())

    def add_token(self, usage: Mapping[str, float]) -> None:
        """Add the tokens of a model call by kind, as in `{"input_tokens": 812, "output_tokens": 240}`."""
        if not isinstance(usage, Mapping):
            raise InvalidInput("usage", f"{usage!r} is not an object of token counts by kind")
        for name, amount in usage.items():
            if _number(f"usage.{name}", amount) < 0:
                raise InvalidInput(f"usage.{name}", f"{amount!r} is not a token count: use a number of 0 or more")
        for name, amount in usage.items():
            self._tokens.add(self.id, name, amount)

    @property
    def token_usage(self) -> dict[str, float]:
        """Tokens by kind, of this context, the levels above, and all merged branches."""
        return _with(self.parent.token_usage if self.parent is not None else {}, self._tokens.totals())

    # ---- levels and branches -----------------------------------------------------------------------------

    def child(self, *, task_id: str | None = None, agent: str | None = None, name: str = "") -> Context:
        """Create a level below, which reads this one's values and keeps its own writes until it is merged."""
        made = self._made(task_id, agent, name)
        made.parent = self
        made.context_info = ContextState(self.context_info)
        made.agent_info = ContextState(self.agent_info)
        return made

    def fork(self, *, task_id: str | None = None, agent: str | None = None, name: str = "") -> Context:
        """Create a deep copy for a concurrent branch.

        Its id is this one's with `name`, or with a number. Pass names if you fork a restored copy.
        """
        made = self._made(task_id, agent, name)
        made.context_info = self.context_info.fork()
        made.agent_info = self.agent_info.fork()
        made._tokens.inherited = self.token_usage
        made._counters.inherited = self.counters
        return made

    def _made(self, task_id: str | None, agent: str | None, name: str) -> Context:
        if not name:
            self._forks += 1
            name = str(self._forks)
        return Context(
            self.session_id,
            self.task_id if task_id is None else task_id,
            self.agent if agent is None else agent,
            id=f"{self.id}.{name}",
        )

    def merge(self, branch: Context) -> list[Conflict]:
        """Merge a child or a fork, or a descendant of one. Return the new conflicts.

        The branch may continue and be merged again: only new changes count. Raises InvalidInput, and merges nothing, if
        another copy of the same branch was merged with other changes.
        """
        if not isinstance(branch, Context):
            raise InvalidInput("branch", f"{branch!r} is not a Context: merge a child or a fork of this one")
        if branch is self:
            raise InvalidInput("branch", f"{self!r} cannot be merged with itself: merge a child or a fork of it")
        made = self.merge_changes(branch.export_changes())
        branch._settle()
        return made

    def export_changes(self) -> bytes:
        """Return all changes since this context was created, as JSON, for `merge_changes` in another process."""
        return write_branch(
            ContextChanges(
                id=self.id,
                revision=self._revision,
                info=_pairs(self.context_info),
                agents=_pairs(self.agent_info),
                tokens=self._tokens.slots,
                counters=self._counters.slots,
                merged=self._merged,
                conflicts=[_conflict_out(each) for each in self.conflicts[self._known_conflicts :]],
            )
        )

    @property
    def changed(self) -> bool:
        """Return whether there is anything to merge."""
        return bool(
            self._tokens.slots
            or self._counters.slots
            or self._known_conflicts < len(self.conflicts)
            or self.context_info.changes()
            or self.agent_info.changes()
        )

    def merge_changes(self, data: bytes, *, fold: bool = False) -> list[Conflict]:
        """Merge the result of `export_changes` of another process, as `merge` does.

        `fold` forgets the merged branches and keeps the sums of their amounts: for a long-lived context whose caller
        merges each branch once.
        """
        branch = read_branch(data)
        is_new = self._is_new(branch)
        self._tokens.take(branch.tokens)
        self._counters.take(branch.counters)
        made: list[Conflict] = []
        if is_new:
            made += [_conflict_in(each) for each in branch.conflicts]
            self.context_info.merge_changes(_unpaired(branch.info), branch.id, made)
            self.agent_info.merge_changes(_unpaired(branch.agents), branch.id, made, "agent_info.")
            self.conflicts += made
        if fold:
            self._tokens.fold()
            self._counters.fold()
            self._merged.clear()
        return made

    def _is_new(self, branch: ContextChanges) -> bool:
        # Not the amounts: merging those again changes nothing.
        encoded = msgspec.json.encode((branch.info, branch.agents, branch.conflicts))
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        revision, known = self._merged.get(branch.id, (0, ""))
        if branch.revision == revision and known and digest != known:
            raise InvalidInput(
                "branch",
                f"another copy of branch {branch.id} was merged with other changes: give forks of a copy names of "
                "their own, fork(name=…)",
            )
        if branch.revision <= revision:
            return False
        self._merged[branch.id] = branch.revision, digest
        for inner, (newest, inner_digest) in branch.merged.items():
            if newest > self._merged.get(inner, (0, ""))[0]:
                self._merged[inner] = newest, inner_digest
        return True

    def _settle(self) -> None:
        """Treat merged changes as known."""
        self.context_info.settle()
        self.agent_info.settle()
        self._known_conflicts = len(self.conflicts)
        self._revision += 1

    # ---- as JSON -----------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return all readable values as JSON, with a version and a checksum."""
        return write_snapshot(
            Snapshot(
                id=self.id,
                session_id=self.session_id,
                task_id=self.task_id,
                agent=self.agent,
                info=_state_out(self.context_info),
                agents=_state_out(self.agent_info),
                token_totals=_with(self.parent.token_usage if self.parent is not None else {}, self._tokens.inherited),
                tokens=self._tokens.slots,
                counter_totals=_with(self.parent.counters if self.parent is not None else {}, self._counters.inherited),
                counters=self._counters.slots,
                forks=self._forks,
                revision=self._revision,
                merged=self._merged,
                conflicts=[_conflict_out(each) for each in self.conflicts],
                known_conflicts=self._known_conflicts,
            )
        )

    @classmethod
    def restore(cls, data: bytes) -> Context:
        """Return the context of a snapshot, which includes the values of the levels above.

        Raises InvalidInput (`snapshot`) if it is damaged, not a snapshot, or from a newer release.
        """
        found = read_snapshot(data)
        made = cls(found.session_id, found.task_id, found.agent, id=found.id)
        made.context_info = _state_in(found.info)
        made.agent_info = _state_in(found.agents)
        made._tokens.inherited, made._tokens.slots = found.token_totals, found.tokens
        made._counters.inherited, made._counters.slots = found.counter_totals, found.counters
        made._forks = found.forks
        made._revision = found.revision
        made._merged = found.merged
        made.conflicts = [_conflict_in(each) for each in found.conflicts]
        made._known_conflicts = found.known_conflicts
        return made


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(field, f"{value!r} is not a finite number")
    return value


def _with(above: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    sums = dict(above)
    for name, amount in own.items():
        sums[name] = sums.get(name, 0) + amount
    return sums


def _pairs(state: ContextState) -> dict[str, tuple[Any, Any]]:  # Any: the user's own values
    return {key: (plain(before), plain(now)) for key, (before, now) in state.changes().items()}


def _unpaired(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {key: (from_plain(before), from_plain(now)) for key, (before, now) in pairs.items()}


def _state_out(state: ContextState) -> StateSnapshot:
    above = state.parent.visible() if state.parent is not None else {}
    return StateSnapshot(own=_plain(state.own), base=_plain(state.base), above=_plain(above))


def _state_in(found: StateSnapshot) -> ContextState:
    state = ContextState()
    if found.above:
        state.parent = ContextState()
        state.parent.own = _from_plain(found.above)
        state.parent.base = copy.deepcopy(state.parent.own)
    state.own, state.base = _from_plain(found.own), _from_plain(found.base)
    return state


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in values.items()}


def _from_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: from_plain(value) for key, value in values.items()}


def _conflict_out(conflict: Conflict) -> list[Any]:
    return [conflict.key, plain(conflict.base), plain(conflict.ours), plain(conflict.theirs), conflict.branch]


def _conflict_in(written: list[Any]) -> Conflict:
    key, base, ours, theirs, branch = written
    return Conflict(key, from_plain(base), from_plain(ours), from_plain(theirs), branch)


# -- as JSON, with a version and a checksum that detects damage ------------------------------------------------------


class StateSnapshot(msgspec.Struct):
    own: dict[str, Any]
    base: dict[str, Any]
    above: dict[str, Any]
    """Values of the levels above."""


class Snapshot(msgspec.Struct):
    """A whole context."""

    id: str
    session_id: str
    task_id: str
    agent: str
    info: StateSnapshot
    agents: StateSnapshot
    token_totals: dict[str, Number]
    tokens: Slots
    counter_totals: dict[str, Number]
    counters: Slots
    forks: int
    revision: int
    merged: Merged
    conflicts: list[list[Any]]
    known_conflicts: int


class ContextChanges(msgspec.Struct):
    """The changes of one context."""

    id: str
    revision: int
    info: dict[str, tuple[Any, Any]]
    """(before, now) by key."""
    agents: dict[str, tuple[Any, Any]]
    tokens: Slots
    counters: Slots
    merged: Merged
    conflicts: list[list[Any]]


class _Envelope(msgspec.Struct):
    version: int = msgspec.field(name="weft.context")
    kind: str
    digest: str
    body: msgspec.Raw


Body = TypeVar("Body", Snapshot, ContextChanges)

_envelope = msgspec.json.Decoder(_Envelope).decode


def write_snapshot(snapshot: Snapshot) -> bytes:
    """Encode a context as JSON. Raises InvalidInput if a value is not JSON, or all are too large together."""
    return _written("snapshot", snapshot)


def read_snapshot(data: bytes) -> Snapshot:
    """Decode the JSON of `write_snapshot`. Raises InvalidInput (`snapshot`)."""
    return _read("snapshot", Snapshot, data)


def write_branch(branch: ContextChanges) -> bytes:
    """Encode the changes of a context as JSON. Raises as `write_snapshot`."""
    return _written("branch", branch)


def read_branch(data: bytes) -> ContextChanges:
    """Decode the JSON of `write_branch`. Raises InvalidInput (`branch`)."""
    return _read("branch", ContextChanges, data)


def _written(kind: str, body: Snapshot | ContextChanges) -> bytes:
    what = f"values of the context ({kind})"
    try:
        plain = msgspec.to_builtins(body)
    except (TypeError, RecursionError) as error:
        # Values were checked when stored, but a list or object may have changed since.
        raise InvalidInput(what, f"cannot be encoded as JSON ({error}): store only JSON values and sets") from None
    raw = encode(plain, what)
    return msgspec.json.encode(_Envelope(SNAPSHOT_VERSION, kind, _digest(raw), msgspec.Raw(raw)))


def _read(kind: str, shape: type[Body], data: bytes) -> Body:
    remedy = "pass the unchanged output of a context"
    try:
        envelope = _envelope(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(kind, f"is damaged or not from a context ({error}): {remedy}") from None
    if envelope.version > SNAPSHOT_VERSION:
        raise InvalidInput(
            kind, f"has version {envelope.version}, but this release reads {SNAPSHOT_VERSION}: upgrade weft"
        )
    if envelope.kind != kind:
        raise InvalidInput(kind, f"is a {envelope.kind} of a context: {remedy}")
    if _digest(bytes(envelope.body)) != envelope.digest:
        raise InvalidInput(kind, f"is damaged, its checksum does not match: {remedy}")
    try:
        return msgspec.json.decode(envelope.body, type=shape)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidInput(kind, f"cannot be read ({error}): {remedy}") from None


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


_RESULT = b'{"weft.context.branch":'
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_MEMBER = "context"
_MARK = b'"context":'


class _Result(msgspec.Struct):
    branch: msgspec.Raw = msgspec.field(name="weft.context.branch")
    value: msgspec.Raw


_result = msgspec.json.Decoder(_Result).decode


def with_snapshot(x: bytes, snapshot: bytes) -> bytes:
    """Return the event's context with a snapshot in it."""
    members = _members(x) if x else {}
    members[_MEMBER] = msgspec.Raw(snapshot)
    return msgspec.json.encode(members)


def without_snapshot(x: bytes) -> bytes:
    """Return the event's context without a snapshot."""
    if _MARK not in x:
        return x
    members = _members(x)
    members.pop(_MEMBER, None)
    return msgspec.json.encode(members) if members else b""


def with_member(x: bytes, name: str, value: object) -> bytes:
    """Return the event's context with this member (JSON)."""
    members = _members(x) if x else {}
    members[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(members)


def snapshot_in(x: bytes) -> bytes:
    """Return the snapshot in the event's context; empty if there is none."""
    if _MARK not in x:
        return b""
    return bytes(_members(x).get(_MEMBER, b""))


def wrapped(output: bytes, branch: bytes) -> bytes:
    """Return a result together with the changes of the context."""
    return b'%b%b,"value":%b}' % (_RESULT, branch, output)


def unwrapped(payload: bytes) -> tuple[bytes, bytes]:
    """Return the result and the changes of the context; most results have none."""
    if not payload.startswith(_RESULT):
        return payload, b""
    found = _result(payload)
    return bytes(found.value), bytes(found.branch)
