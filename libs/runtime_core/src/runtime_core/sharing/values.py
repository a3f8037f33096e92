"""Values of a context: JSON by key, how they are compared and written, and how two branches merge."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from runtime_core.errors import InvalidInput


class _Missing:
    """No value, where None is one."""

    def __repr__(self) -> str:
        return "MISSING"

    def __copy__(self) -> _Missing:
        return self

    def __deepcopy__(self, _memo: object) -> _Missing:
        return self


MISSING: Final = _Missing()
"""Stands for a key that is not there, or was deleted."""

_SCALARS = (str, int, bool, type(None))
_SET = "$set"
_ESCAPED = "$object"
_MISSING = "$missing"


def checked(value: object, field: str) -> object:
    """Return `value`, with lists for tuples. InvalidInput for what is neither JSON nor a set of scalars."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        if isinstance(value, dict):
            if not all(isinstance(name, str) for name in value):
                raise InvalidInput(field, "has a member whose name is no text: use text names, as JSON does")
            return {name: checked(part, f"{field}.{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [checked(part, f"{field}[{at}]") for at, part in enumerate(value)]
        if isinstance(value, set | frozenset):
            if all(type(part) in (*_SCALARS, float) for part in value):
                return set(value)
            raise InvalidInput(field, "is a set of more than scalars: use a list")
    except RecursionError:
        raise InvalidInput(field, "contains itself or is nested too deeply: put plain JSON values") from None
    raise InvalidInput(
        field, f"{type(value).__name__} cannot be kept: put JSON values, or sets of texts and numbers; encode the rest"
    )


def checked_key(key: object) -> str:
    """The name of a value. InvalidInput for what is no text: a copy of it would have another name."""
    if not isinstance(key, str):
        raise InvalidInput("key", f"{key!r} is no text: name values by texts")
    return key


def same(one: object, other: object) -> bool:
    """Whether two values are equal as JSON is: `1` is not `True`."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def plain(value: Any) -> Any:  # Any: the user's own values
    """Return the value as JSON; sets and what is missing are written as objects with one name that begins with `$`."""
    if value is MISSING:
        return {_MISSING: True}
    if isinstance(value, set | frozenset):
        return {_SET: sorted(value, key=msgspec.json.encode)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        made = {name: plain(part) for name, part in value.items()}
        # A user's own object that looks like one of ours.
        return {_ESCAPED: made} if len(made) == 1 and next(iter(made)).startswith("$") else made
    return value


def from_plain(value: Any) -> Any:  # Any: as above
    """The value that `plain` was given."""
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (name, part), *_ = value.items()
        if name == _MISSING:
            return MISSING
        if name == _SET:
            return set(part)
        if name == _ESCAPED:
            return {inner: from_plain(each) for inner, each in part.items()}
    return {name: from_plain(part) for name, part in value.items()}


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two branches have changed one value in ways that cannot both hold. The later branch's holds."""

    key: str
    """As in `plan.title`: names of objects inside objects, between dots."""
    base: Any  # the user's own values, here and below; MISSING: there was none
    ours: Any
    theirs: Any
    """The value that holds now."""
    branch: str
    """Id of the context that was merged."""


def merged(
    base: Any,  # Any: the user's own values, or MISSING, here and below
    ours: Any,
    theirs: Any,
    key: str,
    branch: str,
    conflicts: list[Conflict],
) -> Any:
    """Return what holds after a branch that began with `base` and has made `theirs` of it joins `ours`.

    A value that only one side has changed is that side's. Lists: what a side has appended is kept, ours first, and so
    is what the other has changed. Sets: what either has added or taken away. Objects: name by name. For anything else
    that both have changed to different values, `theirs` holds and `conflicts` gets an entry.
    """
    if same(theirs, base):
        return ours
    if same(ours, base):
        return theirs
    if _all(dict, base, ours, theirs):
        return _merged_objects({} if base is MISSING else base, ours, theirs, key, branch, conflicts)
    if _all(list, base, ours, theirs):
        begun = [] if base is MISSING else base
        # Who has only appended keeps that, whatever the other has made of the list.
        if _begins_with(theirs, begun):
            return [*ours, *theirs[len(begun) :]]
        if _begins_with(ours, begun):
            return [*theirs, *ours[len(begun) :]]
    if _all(set, base, ours, theirs):
        begun_set = set() if base is MISSING else base
        return (ours | (theirs - begun_set)) - (begun_set - theirs)
    if not same(ours, theirs):
        conflicts.append(Conflict(key, base, ours, theirs, branch))
    return theirs


def _merged_objects(
    base: dict[str, Any],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    key: str,
    branch: str,
    conflicts: list[Conflict],
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in dict.fromkeys((*ours, *theirs)):
        value = merged(
            base.get(name, MISSING),
            ours.get(name, MISSING),
            theirs.get(name, MISSING),
            f"{key}.{name}" if key else name,
            branch,
            conflicts,
        )
        if value is not MISSING:
            made[name] = value
    return made


def _all(kind: type, base: object, ours: object, theirs: object) -> bool:
    return isinstance(ours, kind) and isinstance(theirs, kind) and (base is MISSING or isinstance(base, kind))


def _begins_with(value: list[Any], begun: list[Any]) -> bool:
    return len(value) >= len(begun) and same(value[: len(begun)], begun)


class ContextState(MutableMapping[str, Any]):
    """A dict whose reads fall through to the parent's where a key has no value of its own. Writes stay here.

    An object, list or set that is read from the parent is copied here first: changing it changes this level only, and
    is merged later like any other write.
    """

    def __init__(self, parent: ContextState | None = None) -> None:
        self.parent = parent
        self.own: dict[str, Any] = {}
        """By key; MISSING hides the parent's value."""
        self.base: dict[str, Any] = {}
        """What a key of `own` was before this level had it."""

    def __getitem__(self, key: str) -> Any:  # the user's own values
        if key in self.own:
            value = self.own[key]
        elif self.parent is not None and key in self.parent:
            value = self.parent[key]
            if isinstance(value, dict | list | set):
                self.base[key] = copy.deepcopy(value)
                value = self.own[key] = copy.deepcopy(value)
        else:
            value = MISSING
        if value is MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: object) -> None:
        checked_key(key)
        # Looked at first: a value that cannot be kept changes nothing.
        kept = checked(value, key)
        self._note_base(key)
        self.own[key] = kept

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._note_base(key)
        self.own[key] = MISSING

    def __contains__(self, key: object) -> bool:
        if key in self.own:
            return self.own[key] is not MISSING
        return self.parent is not None and key in self.parent

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*(self.parent or ()), *self.own))
        return iter([name for name in names if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ContextState({self.visible()!r})"

    def _note_base(self, key: str) -> None:
        if key not in self.base:
            above = self.parent.get(key, MISSING) if self.parent is not None else MISSING
            self.base[key] = copy.deepcopy(above)

    def visible(self) -> dict[str, Any]:
        """All values that can be read here. Not copies."""
        below = self.parent.visible() if self.parent is not None else {}
        below.update(self.own)
        return {name: value for name, value in below.items() if value is not MISSING}

    def fork(self) -> ContextState:
        """A deep copy of all that can be read here, with no parent."""
        forked = ContextState()
        forked.own = copy.deepcopy(self.visible())
        forked.base = copy.deepcopy(forked.own)
        return forked

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """(before, now) of each key that differs; MISSING stands for no value."""
        pairs = {key: (self.base.get(key, MISSING), value) for key, value in self.own.items()}
        return {key: pair for key, pair in pairs.items() if not same(*pair)}

    def bring_in(
        self,
        changes: dict[str, tuple[Any, Any]],  # Any: the user's own values
        branch: str,
        conflicts: list[Conflict],
        prefix: str = "",
    ) -> None:
        """Merge the changes of a branch."""
        for key, (before, now) in changes.items():
            ours = self.get(key, MISSING)
            value = merged(before, ours, now, f"{prefix}{key}", branch, conflicts)
            if not same(value, ours):
                self._note_base(key)
                # A copy: the branch may go on with its own.
                self.own[key] = copy.deepcopy(value)

    def settle(self) -> None:
        """What is changed by now counts as known: only later changes are changes."""
        self.base.update(copy.deepcopy(self.own))


Amounts = dict[str, float]


class Ledger:
    """What each context has added, in a slot under its id; a context writes its own slot only.

    Amounts in a slot only grow (what is taken away grows in an amount of its own), so that of two readings of one slot
    the larger one is the later: bringing the same branch in twice, or by two ways, adds nothing.
    """

    def __init__(self, inherited: Mapping[str, float] | None = None) -> None:
        self.inherited: Amounts = dict(inherited or {})
        """Sums of what was there when the context was forked; its own merge does not bring them back."""
        self.slots: dict[str, dict[str, list[float]]] = {}
        """Id of a context → name → [added, taken away]."""

    def add(self, slot: str, name: str, amount: float) -> None:
        """Add an amount, which may be below zero."""
        pair = self.slots.setdefault(slot, {}).setdefault(name, [0, 0])
        pair[amount < 0] += abs(amount)

    def take(self, slots: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Bring in what others have added."""
        for slot, amounts in slots.items():
            mine = self.slots.setdefault(slot, {})
            for name, (added, taken) in amounts.items():
                known = mine.get(name, [0, 0])
                mine[name] = [max(known[0], added), max(known[1], taken)]

    def totals(self) -> Amounts:
        """The sum of each name."""
        sums = dict(self.inherited)
        # In a fixed order: sums of fractions depend on it.
        for slot in sorted(self.slots):
            for name, (added, taken) in self.slots[slot].items():
                sums[name] = sums.get(name, 0) + added - taken
        return sums

    def fold(self) -> None:
        """Forget who has added what; only for a ledger that nothing is brought into twice."""
        self.inherited, self.slots = self.totals(), {}
