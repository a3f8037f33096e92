"""Values by key, own over the parent's, which know what they were when the context was forked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

from runtime_core.context.merging import Conflict, merged
from runtime_core.context.values import MISSING, checked, checked_key, same


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
