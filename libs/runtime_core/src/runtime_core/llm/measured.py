"""What providers have counted beside what was estimated: later reservations are raised by it, never lowered."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_TOKENS = 256
"""From so many estimated tokens on a count says how wrong the estimate of text is; below, what is added to any text."""


@dataclass(slots=True)
class _Error:
    added: float = 0.0
    """The most tokens by which the count of a small request was over its estimate."""
    times: float = 1.0
    """The most by which that of a large one was over it."""

    def note(self, estimated: float, counted: float) -> None:
        if estimated < LARGE_TOKENS:
            self.added = max(self.added, counted - estimated)
        else:
            self.times = max(self.times, counted / estimated)


class Measured:
    """Of one process, by model. A model that was not asked yet is taken for as wrong as the worst of the others."""

    def __init__(self) -> None:
        self._of: dict[str, _Error] = {}
        self._worst = _Error()

    def note(self, model: str, estimated: float, counted: float) -> None:
        """The provider has counted the input of a call that was estimated before. Both in tokens."""
        for error in (self._of.setdefault(model, _Error()), self._worst):
            error.note(estimated, counted)

    def corrected(self, model: str, estimated: int) -> int:
        """The estimate in the light of what was counted until now."""
        error = self._of.get(model, self._worst)
        return max(int(estimated + error.added), int(estimated * error.times))
