"""Amounts that many add to and that are never counted twice: tokens, counters."""

from __future__ import annotations

from collections.abc import Mapping

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
