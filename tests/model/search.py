"""Breadth-first search of a model: shows that the invariants hold within its bounds, or finds a shortest trace."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Move(NamedTuple):
    """One step from a state to the next. An optional move, such as a fault or a person's act, need never happen."""

    name: str
    to: Hashable
    optional: bool = False


class Model(Protocol[S]):
    """A state machine with invariants. States are immutable and hashable."""

    def initial(self) -> S: ...

    def moves(self, state: S) -> Iterable[Move]: ...

    def broken(self, state: S, quiet: bool) -> str:
        """Return the invariant that the state breaks, or an empty string.

        In a quiet state nothing has to happen any more.
        """
        ...


class Result(NamedTuple):
    """The outcome of one search: `broken` and `trace` are empty if every state holds."""

    broken: str
    trace: tuple[str, ...]
    states: int
    edges: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.states:>9,} states {self.edges:>10,} edges {self.seconds:6.1f} s"
        if not self.broken:
            return f"{size}  holds"
        steps = "".join(f"\n    {number:>2}. {name}" for number, name in enumerate(self.trace, 1))
        return f"{size}  breaks in {len(self.trace)} steps: {self.broken}{steps}"


class TooManyStates(Exception):
    """The search has reached its limit without an answer."""


def search(model: Model[S], limit: int = 2_000_000) -> Result:
    """Visit and check every reachable state, then check that each one can come to rest without optional moves.

    Raises:
        TooManyStates: the model has more than `limit` states.
    """
    started = time.monotonic()
    states: list[S] = [model.initial()]
    known = {states[0]: 0}
    came_from = array("l", [-1])
    by: list[str] = [""]
    sources, targets = array("l"), array("l")
    quiet: list[int] = []
    edges = 0

    def result(broken: str, place: int) -> Result:
        trace = []
        while came_from[place] >= 0:
            trace.append(by[place])
            place = came_from[place]
        return Result(broken, tuple(reversed(trace)), len(states), edges, time.monotonic() - started)

    place = 0
    while place < len(states):
        state = states[place]
        forced = 0
        for move in model.moves(state):
            edges += 1
            number = known.setdefault(move.to, len(states))  # type: ignore[arg-type]
            if number == len(states):
                states.append(move.to)  # type: ignore[arg-type]
                came_from.append(place)
                by.append(move.name)
            if not move.optional:
                forced += 1
                sources.append(place)
                targets.append(number)
        if not forced:
            quiet.append(place)
        if broken := model.broken(state, not forced):
            return result(broken, place)
        if len(states) > limit:
            raise TooManyStates(f"more than {limit:,} states")
        place += 1
    restless = _cannot_rest(len(states), sources, targets, quiet)
    if restless < 0:
        return result("", 0)
    found = result("work goes on for ever", restless)
    return found._replace(trace=(*found.trace, *_loop(model, states[restless])))


def _loop(model: Model[S], state: S) -> list[str]:
    """Follow moves that are not optional until a state comes back."""
    seen: set[Hashable] = set()
    names: list[str] = []
    while state not in seen:
        seen.add(state)
        move = next(move for move in model.moves(state) if not move.optional)
        names.append(move.name)
        state = move.to  # type: ignore[assignment]
    return names


def _cannot_rest(count: int, sources: array[int], targets: array[int], quiet: list[int]) -> int:
    """Return the first state from which no quiet state can be reached, or -1."""
    first, following = array("l", [-1]) * count, array("l", [-1]) * len(sources)
    for edge, target in enumerate(targets):
        following[edge] = first[target]
        first[target] = edge
    reached = bytearray(count)
    todo = list(quiet)
    for place in todo:
        reached[place] = 1
    while todo:
        edge = first[todo.pop()]
        while edge >= 0:
            source = sources[edge]
            if not reached[source]:
                reached[source] = 1
                todo.append(source)
            edge = following[edge]
    return reached.find(0)
