"""The models that a process has open, and one gate for each provider, model and key."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.failures import Endpoint, wrong_settings
from runtime_core.llm.tokens import EstimateErrors

if TYPE_CHECKING:
    from runtime_core.llm.client import OpenModel


SPACING_SECONDS = 0.02
"""The average spacing of held-back calls when they return, in seconds; jitter of up to half in either direction."""

MAX_SPREAD_SECONDS = 30.0
"""The longest time over which held-back calls are spread, in seconds, however many there are."""


class Gate:
    """A gate that is open, or closed until a time. Not thread-safe: it serves the calls of one event loop."""

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._closed_until = 0.0
        self._last_given = 0.0
        self.held_back = 0
        """The total number of calls that were turned away without a request."""

    def closed_for(self) -> float | None:
        """Return in how many seconds this caller may try again; None if the gate is open."""
        now = self._clock()
        if now >= self._closed_until:
            return None
        self.held_back += 1
        return self._place(now)

    def close(self, seconds: float) -> float:
        """Close the gate for `seconds`, as the provider asked. Return the caller's own wait, like `closed_for`.

        A gate that is already closed for longer stays closed.
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
    """The gates of an event loop, by the key under which a provider counts its limits."""

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
class _LoopState:
    """The state of one event loop: connections belong to the loop that made them."""

    pacing: Pacing
    making: dict[Hashable, asyncio.Task[OpenModel]] = field(default_factory=dict)


class OpenModels:
    """Provides the open model of an agent's settings, and the gates that pace its calls."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()
        self.estimate_errors = EstimateErrors()
        self.stand_in: object | None = None
        """A pydantic-ai Model that answers in place of every model of the app, in tests."""

    def __reduce__(self) -> tuple[type[OpenModels], tuple[()]]:
        """Pickle without open models: another process opens its own."""
        return OpenModels, ()

    async def open(self, settings: ModelSettings, named: str | None = None) -> OpenModel:
        """Return the model of these settings, opened on first use. `named` selects another model with the same keys.

        Raises the client's errors for invalid settings.
        """
        if self.stand_in is not None:
            settings, named = replace(settings, model=self.stand_in), None
        loop = asyncio.get_running_loop()
        making = self._of(loop).making
        key = _key(settings, named)
        task = making.get(key)
        if task is None:
            task = making[key] = loop.create_task(_make(settings, named), name="open a model")
        try:
            # Shielded: other callers wait for the same model and must not be cancelled with this one.
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and (task.cancelled() or task.exception() is not None):
                making.pop(key, None)
            raise

    async def open_or_fail(self, settings: ModelSettings, named: str | None) -> OpenModel:
        """Like `open`, but raise ModelProblem (WrongModelSettings) for settings that the client cannot use."""
        try:
            return await self.open(settings, named)
        except Exception as error:
            if type(error).__module__.startswith("runtime_core."):
                raise
            endpoint = Endpoint("", str(named or settings.model), settings.base_url or "")
            raise wrong_settings(f"{type(error).__name__}: {error}", endpoint) from error

    def pacing(self) -> Pacing:
        return self._of(asyncio.get_running_loop()).pacing

    async def close(self) -> None:
        """Close the models of this event loop. A later call opens them again."""
        opened = self._loops.pop(asyncio.get_running_loop(), None)
        if opened is None:
            return
        for task in opened.making.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().close()
            else:
                task.cancel()

    def _of(self, loop: asyncio.AbstractEventLoop) -> _LoopState:
        opened = self._loops.get(loop)
        if opened is None:
            opened = self._loops[loop] = _LoopState(Pacing(loop.time, random.random))
        return opened


def _key(settings: ModelSettings, named: str | None) -> Hashable:
    if named is None and not isinstance(settings.model, str):
        return _ByIdentity(settings.model)
    name = settings.model if named is None else named
    return (name, settings.base_url, settings.api_key, settings.connect_seconds, settings.call_seconds)


class _ByIdentity:
    """A Model or its factory, compared by identity: equal ones may have different connections."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.of is self.of


async def _make(settings: ModelSettings, named: str | None) -> OpenModel:
    # In a thread: the import takes seconds, and the loop must send heartbeats.
    client = await asyncio.to_thread(importlib.import_module, "runtime_core.llm.client")
    return cast("OpenModel", await client.OpenModel.make(settings, named))
