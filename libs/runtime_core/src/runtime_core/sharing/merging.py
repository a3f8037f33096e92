"""How two branches of a context come together: each value by its kind, against what both began with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime_core.sharing.values import MISSING, same


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
