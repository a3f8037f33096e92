"""The models that a process has open, and one gate for each provider, model and key."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.budget import Measured
from runtime_core.llm.failures import Place, wrong_settings

if TYPE_CHECKING:
    from runtime_core.llm.client import OpenModel


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


@dataclass
class _OfLoop:
    """Of one event loop: connections belong to the loop that made them."""

    pacing: Pacing
    making: dict[Hashable, asyncio.Task[OpenModel]] = field(default_factory=dict)


class OpenModels:
    """Gives the open model of an agent's settings, and the gate that paces the calls of it."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = WeakKeyDictionary()
        self.measured = Measured()

    def __reduce__(self) -> tuple[type[OpenModels], tuple[()]]:
        """What is open here is not open in another process."""
        return OpenModels, ()

    async def open(self, settings: ModelSettings, named: str | None = None) -> OpenModel:
        """The model of these settings, made where there is none; `named`: another model, by name, with their keys.

        Raises what the client raises for settings that it cannot use.
        """
        loop = asyncio.get_running_loop()
        making = self._of(loop).making
        key = _key(settings, named)
        task = making.get(key)
        if task is None:
            task = making[key] = loop.create_task(_make(settings, named), name="open a model")
        try:
            # Others wait for the same one: that this caller is cancelled is not their concern.
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and (task.cancelled() or task.exception() is not None):
                making.pop(key, None)
            raise

    async def open_or_fail(self, settings: ModelSettings, named: str | None) -> OpenModel:
        """As `open`. Raises ModelProblem (WrongModelSettings) for settings that the client cannot use."""
        try:
            return await self.open(settings, named)
        except Exception as error:
            if type(error).__module__.startswith("runtime_core."):
                raise
            place = Place("", str(named or settings.model), settings.base_url or "")
            raise wrong_settings(f"{type(error).__name__}: {error}", place) from error

    def pacing(self) -> Pacing:
        return self._of(asyncio.get_running_loop()).pacing

    async def close(self) -> None:
        """Close what this event loop has opened. A call after that opens again."""
        opened = self._loops.pop(asyncio.get_running_loop(), None)
        if opened is None:
            return
        for task in opened.making.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().close()
            else:
                task.cancel()

    def _of(self, loop: asyncio.AbstractEventLoop) -> _OfLoop:
        opened = self._loops.get(loop)
        if opened is None:
            opened = self._loops[loop] = _OfLoop(Pacing(loop.time, random.random))
        return opened


def _key(settings: ModelSettings, named: str | None) -> Hashable:
    if named is None and not isinstance(settings.model, str):
        return _Same(settings.model)
    name = settings.model if named is None else named
    return (name, settings.base_url, settings.api_key, settings.connect_seconds, settings.call_seconds)


class _Same:
    """A Model, or what makes one, by identity: two that compare equal may have other connections."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of


async def _make(settings: ModelSettings, named: str | None) -> OpenModel:
    # In a thread: it loads for seconds, and the loop has heartbeats to send.
    client = await asyncio.to_thread(importlib.import_module, "runtime_core.llm.client")
    return cast("OpenModel", await client.OpenModel.make(settings, named))
