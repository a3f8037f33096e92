"""Values of a context: JSON by key, their comparison and encoding, and the merge of two branches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from runtime_core.errors import InvalidInput


class _Missing:
    """Marks a missing value, since None is a value."""

    def __repr__(self) -> str:
        return "MISSING"

    def __copy__(self) -> _Missing:
        return self

    def __deepcopy__(self, _memo: object) -> _Missing:
        return self


MISSING: Final = _Missing()
"""The value of a missing or deleted key."""

_SCALARS = (str, int, bool, type(None))
_SET = "$set"
_ESCAPED = "$object"
_MISSING = "$missing"


def checked(value: object, field: str) -> object:
    """Return `value` with lists for tuples. Raises InvalidInput if it is neither JSON nor a set of scalars."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        if isinstance(value, dict):
            if not all(isinstance(name, str) for name in value):
                raise InvalidInput(field, "has a member whose name is not text: use text names, as JSON does")
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
        field,
        f"{type(value).__name__} cannot be stored: use JSON values, or sets of strings and numbers, and encode others",
    )


def checked_key(key: object) -> str:
    """Return a valid key. Raises InvalidInput if it is not a string, since JSON would change it."""
    if not isinstance(key, str):
        raise InvalidInput("key", f"{key!r} is not a string: keys must be strings")
    return key


def same(one: object, other: object) -> bool:
    """Return whether two values are equal as JSON: `1` is not `True`."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def plain(value: Any) -> Any:  # Any: the user's own values
    """Return the value as JSON; sets and MISSING become objects with one member that begins with `$`."""
    if value is MISSING:
        return {_MISSING: True}
    if isinstance(value, set | frozenset):
        return {_SET: sorted(value, key=msgspec.json.encode)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        made = {name: plain(part) for name, part in value.items()}
        # Escape a user's object that looks like one of ours.
        return {_ESCAPED: made} if len(made) == 1 and next(iter(made)).startswith("$") else made
    return value


def from_plain(value: Any) -> Any:  # Any: as above
    """Return the value that `plain` has encoded."""
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
    """Conflicting changes of one value by two branches. The later branch wins."""

    key: str
    """The path of the value, as in `plan.title`."""
    base: Any  # the user's own values; MISSING: none
    ours: Any
    theirs: Any
    """The value after the merge."""
    branch: str
    """The id of the merged context."""


def merged(
    base: Any,  # Any: the user's own values, or MISSING, here and below
    ours: Any,
    theirs: Any,
    key: str,
    branch: str,
    conflicts: list[Conflict],
) -> Any:
    """Merge a branch's value `theirs`, which started as `base`, with `ours`.

    If only one side has changed the value, that side wins. Lists keep the items that either side appended, ours first,
    and the other changes. Sets apply the additions and removals of both. Objects merge by member. Otherwise `theirs`
    wins, and `conflicts` gets an entry.
    """
    if same(theirs, base):
        return ours
    if same(ours, base):
        return theirs
    if _all(dict, base, ours, theirs):
        return _merged_objects({} if base is MISSING else base, ours, theirs, key, branch, conflicts)
    if _all(list, base, ours, theirs):
        begun = [] if base is MISSING else base
        # Appended items survive whatever the other side has done to the list.
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
    """A dict that reads missing keys from its parent. Writes stay in this level.

    Reading an object, list or set from the parent copies it first: changing it changes only this level, and merges
    later like any other write.
    """

    def __init__(self, parent: ContextState | None = None) -> None:
        self.parent = parent
        self.own: dict[str, Any] = {}
        """Own values by key; MISSING hides the parent's value."""
        self.base: dict[str, Any] = {}
        """The value of each key of `own` before this level changed it."""

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
        # Check first: an invalid value must change nothing.
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
        """Return all readable values, not copied."""
        below = self.parent.visible() if self.parent is not None else {}
        below.update(self.own)
        return {name: value for name, value in below.items() if value is not MISSING}

    def fork(self) -> ContextState:
        """Return a deep copy of all readable values, without a parent."""
        forked = ContextState()
        forked.own = copy.deepcopy(self.visible())
        forked.base = copy.deepcopy(forked.own)
        return forked

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Return (before, now) of each changed key; MISSING: no value."""
        pairs = {key: (self.base.get(key, MISSING), value) for key, value in self.own.items()}
        return {key: pair for key, pair in pairs.items() if not same(*pair)}

    def merge_changes(
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
                # Copy it: the branch may continue to change its own.
                self.own[key] = copy.deepcopy(value)

    def settle(self) -> None:
        """Treat all changes so far as known."""
        self.base.update(copy.deepcopy(self.own))


Amounts = dict[str, float]


class Ledger:
    """Amounts added by each context, in one slot per context id. A context writes only its own slot.

    Amounts in a slot only grow (subtractions have their own amount), so the larger of two copies of a slot is the newer
    one. Therefore merging a branch twice, or by two paths, adds nothing.
    """

    def __init__(self, inherited: Mapping[str, float] | None = None) -> None:
        self.inherited: Amounts = dict(inherited or {})
        """Sums at the time of the fork, which its merge does not count again."""
        self.slots: dict[str, dict[str, list[float]]] = {}
        """Context id → name → [added, subtracted]."""

    def add(self, slot: str, name: str, amount: float) -> None:
        """Add an amount, which may be negative."""
        pair = self.slots.setdefault(slot, {}).setdefault(name, [0, 0])
        pair[amount < 0] += abs(amount)

    def take(self, slots: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Merge the slots of others."""
        for slot, amounts in slots.items():
            mine = self.slots.setdefault(slot, {})
            for name, (added, taken) in amounts.items():
                known = mine.get(name, [0, 0])
                mine[name] = [max(known[0], added), max(known[1], taken)]

    def totals(self) -> Amounts:
        """Return the sum of each name."""
        sums = dict(self.inherited)
        # In a fixed order, since sums of floats depend on it.
        for slot in sorted(self.slots):
            for name, (added, taken) in self.slots[slot].items():
                sums[name] = sums.get(name, 0) + added - taken
        return sums

    def fold(self) -> None:
        """Keep only the sums; for a ledger into which each branch is merged once."""
        self.inherited, self.slots = self.totals(), {}
