"""Guarded work: hooks, the call itself, and what comes after it, in a branch of its own."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from runtime_core.agents.gather import Gather

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.run import Run

T = TypeVar("T")


class Ready(Generic[T]):
    """Gives a value that is there already."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol; this one yields nothing
        yield from ()
        return self._value


class Guarded(Generic[T]):
    """What `ctx.tool` and its like give where hooks run around them: awaited, and gathered, as a step is.

    It takes one place `k` in the program; what it does are the steps `k.0.1`, `k.0.2`, …
    """

    __slots__ = ("_label", "_work")

    def __init__(self, run: Run, branch: Branch, label: str, work: Coroutine[Any, Any, T]) -> None:
        self._label = label
        self._work = Gather(run, branch, [work], False)

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        results = yield from self._work.__await__()
        result: T = results[0]
        return result

    def __repr__(self) -> str:
        return f"<guarded step {self._work.id}: {self._label}>"
