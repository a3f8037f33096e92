"""One gate for each provider, model and key in a process: after a rate limit it holds back the calls that follow.

A storm of conversations would otherwise ask, and be refused, each for itself. Who comes while the gate is closed is
given a time of its own to come again, in the order of asking and a little apart, and asks the provider nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

SPACING_SECONDS = 0.02
"""How far apart those who were held back come again; half of it more or less by chance."""

MAX_SPREAD_SECONDS = 30.0
"""However many are held back, the last one comes so much after the first at most."""


class Gate:
    """Open, or closed until a time. Not for several threads: all calls of an event loop pass it."""

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._closed_until = 0.0
        self._last_given = 0.0
        self.held_back = 0
        """Calls that were turned away without a request, in all."""

    def closed_for(self) -> float | None:
        """When this caller may come again, in seconds from now; None: the gate is open."""
        now = self._clock()
        if now >= self._closed_until:
            return None
        self.held_back += 1
        return self._place(now)

    def close(self, seconds: float) -> float:
        """Close it for so long, because the provider asked for it; gives the caller's own time, as `closed_for` does.

        What is closed for longer stays so.
        """
        now = self._clock()
        self._closed_until = max(self._closed_until, now + seconds)
        return self._place(now)

    def _place(self, now: float) -> float:
        step = SPACING_SECONDS * (0.5 + self._random())
        given = max(self._last_given + step, self._closed_until + step)
        self._last_given = min(given, self._closed_until + MAX_SPREAD_SECONDS)
        return self._last_given - now


class Pacing:
    """The gates of an event loop, by what a provider counts its limits by."""

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._gates: dict[Hashable, Gate] = {}

    def gate(self, of: Hashable) -> Gate:
        gate = self._gates.get(of)
        if gate is None:
            gate = self._gates[of] = Gate(self._clock, self._random)
        return gate
