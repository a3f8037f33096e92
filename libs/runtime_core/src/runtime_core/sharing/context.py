"""What a session, a task or an agent knows: values, tokens, counters; in levels, and in branches that join again."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime_core.errors import InvalidInput
from runtime_core.sharing.snapshot import Branch, Snapshot, StateSnapshot, read, read_branch, write, write_branch
from runtime_core.sharing.values import Conflict, ContextState, Ledger, checked_key, from_plain, plain


class Context:
    """Values by key, tokens used, and counters; JSON all through, and the same at each replay.

    `child` is a level below, which reads this one's values as they are: session → task → agent. `fork` is a copy, for a
    branch that runs beside others. Both are brought back by `merge`, in the order in which the branches are to count;
    no write is lost, and nothing is counted twice. Belongs to one event loop; not thread-safe.
    """

    def __init__(self, session_id: str = "", task_id: str = "", agent: str = "", *, id: str = "0") -> None:
        self.id = id
        """Tells it from all other contexts that it may ever be merged with."""
        self.session_id = session_id
        self.task_id = task_id
        self.agent = agent
        self.parent: Context | None = None
        self.context_info = ContextState()
        """Values by key, a MutableMapping; `get` and `put` are about these."""
        self.agent_info = ContextState()
        """The same for what agents say of themselves, by the agent's name."""
        self.conflicts: list[Conflict] = []
        """What branches have changed in ways that could not both hold, oldest first."""
        self._tokens = Ledger()
        self._counters = Ledger()
        self._forks = 0
        self._revision = 1
        self._known_conflicts = 0
        # Id of a branch → its newest revision that was merged, and a digest of it.
        self._merged: dict[str, tuple[int, str]] = {}

    def __repr__(self) -> str:
        where = "/".join(part for part in (self.session_id, self.task_id, self.agent) if part)
        return f"<Context {self.id} {where}>"

    # ---- values ------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:  # Any: the user's own values
        """The value here, else the parent's, else the default."""
        return self.context_info.get(key, default)

    def put(self, key: str, value: object) -> None:
        """Keep a value here: JSON, or a set of texts and numbers. InvalidInput, naming the key, for anything else."""
        self.context_info[key] = value

    def delete(self, key: str) -> None:
        """Hide a key from here on, the parent's too. KeyError where there is none."""
        del self.context_info[key]

    def increment(self, key: str, by: float = 1) -> float:
        """Add to a counter, and return it. Counters of branches add up when they are merged."""
        self._counters.add(self.id, checked_key(key), _number(f"counters.{key}", by))
        return self.count(key)

    def count(self, key: str) -> float:
        """What a counter has come to; 0 where nothing was added."""
        return self.counters.get(key, 0)

    @property
    def counters(self) -> dict[str, float]:
        """All counters that can be read here."""
        return _with(self.parent.counters if self.parent is not None else {}, self._counters.totals())

    def add_token(self, usage: Mapping[str, float]) -> None:
        """Add tokens that a model call took, by kind, as in `{"input_tokens": 812, "output_tokens": 240}`."""
        if not isinstance(usage, Mapping):
            raise InvalidInput("usage", f"{usage!r} is no object of kinds of tokens and their numbers")
        for name, amount in usage.items():
            if _number(f"usage.{name}", amount) < 0:
                raise InvalidInput(f"usage.{name}", f"{amount!r} is no amount of tokens: give a number of 0 or more")
        for name, amount in usage.items():
            self._tokens.add(self.id, name, amount)

    @property
    def token_usage(self) -> dict[str, float]:
        """Tokens by kind: those of this context, of its levels above, and of all branches that were merged."""
        return _with(self.parent.token_usage if self.parent is not None else {}, self._tokens.totals())

    # ---- levels and branches -----------------------------------------------------------------------------

    def child(self, *, task_id: str | None = None, agent: str | None = None, name: str = "") -> Context:
        """A level below, which sees what this one has and keeps its own writes until it is merged."""
        made = self._made(task_id, agent, name)
        made.parent = self
        made.context_info = ContextState(self.context_info)
        made.agent_info = ContextState(self.agent_info)
        return made

    def fork(self, *, task_id: str | None = None, agent: str | None = None, name: str = "") -> Context:
        """A deep copy for a branch that runs beside others.

        Its id is made of this one's and of `name`, or of a number: give names where forks are made of a restored copy.
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
        """Bring back a child or a fork, or one of theirs; return the conflicts that this has made.

        It may go on afterwards and be merged again: only what is new then counts. InvalidInput, and nothing is merged,
        where another copy of the same branch was merged with other changes.
        """
        if not isinstance(branch, Context):
            raise InvalidInput("branch", f"{branch!r} is no Context: merge a child or a fork of this one")
        if branch is self:
            raise InvalidInput("branch", f"{self!r} cannot be merged with itself: merge a child or a fork of it")
        made = self.bring_in(branch.to_branch())
        branch._settle()
        return made

    def to_branch(self) -> bytes:
        """All that this context has changed since it was made, as JSON, for `bring_in` in another process."""
        return write_branch(
            Branch(
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
        """Whether there is anything to bring back."""
        return bool(
            self._tokens.slots
            or self._counters.slots
            or self._known_conflicts < len(self.conflicts)
            or self.context_info.changes()
            or self.agent_info.changes()
        )

    def bring_in(self, data: bytes, *, fold: bool = False) -> list[Conflict]:
        """As `merge`, for what `to_branch` of another process has written.

        `fold` forgets which branches have come in and adds their amounts up: for a context that lives long, and whose
        caller brings in each branch once.
        """
        branch = read_branch(data)
        is_new = self._is_new(branch)
        self._tokens.take(branch.tokens)
        self._counters.take(branch.counters)
        made: list[Conflict] = []
        if is_new:
            made += [_conflict_in(each) for each in branch.conflicts]
            self.context_info.bring_in(_unpaired(branch.info), branch.id, made)
            self.agent_info.bring_in(_unpaired(branch.agents), branch.id, made, "agent_info.")
            self.conflicts += made
        if fold:
            self._tokens.fold()
            self._counters.fold()
            self._merged.clear()
        return made

    def _is_new(self, branch: Branch) -> bool:
        # Without the amounts, which may come in as often as they like.
        said = msgspec.json.encode((branch.info, branch.agents, branch.conflicts))
        digest = hashlib.blake2b(said, digest_size=8).hexdigest()
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
        """What was merged is known from here on."""
        self.context_info.settle()
        self.agent_info.settle()
        self._known_conflicts = len(self.conflicts)
        self._revision += 1

    # ---- as JSON -----------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """All that can be read here, as JSON with its version and a checksum."""
        return write(
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
        """The context of a snapshot; a level's parent is part of it, as it was.

        InvalidInput, field `snapshot`, where it is damaged, none at all, or of a newer release: never an empty context.
        """
        found = read(data)
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
        raise InvalidInput(field, f"{value!r} is no number: give a finite one")
    return value


def _with(above: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    sums = dict(above)
    for name, amount in own.items():
        sums[name] = sums.get(name, 0) + amount
    return sums


def _pairs(state: ContextState) -> dict[str, tuple[Any, Any]]:  # Any: the user's own values, here and below
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
