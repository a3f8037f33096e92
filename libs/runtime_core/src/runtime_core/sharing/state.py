"""Values of a context by key: a context's own stand before its parent's; counters only add up."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from runtime_core.sharing.merging import Conflict, merged
from runtime_core.sharing.values import MISSING, checked, checked_key, same


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
