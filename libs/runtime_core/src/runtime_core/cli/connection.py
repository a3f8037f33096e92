"""What a command needs: the partitions of a namespace that exists, and the trajectory store where there is one."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import typer

from runtime_core.bus.connection import Transport
from runtime_core.bus.embedded import find_endpoint
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys, namespace_settings
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.config.settings import Settings
from runtime_core.config.values import without_password
from runtime_core.errors import BusUnavailable, ConfigurationError
from runtime_core.ingress.admission import Admission

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore

ANSWER_SECONDS = 60.0
"""How long a command that only asks or changes something may take."""

Given = ParamSpec("Given")
Verb = Callable[Given, Coroutine[Any, Any, None]]  # Any: asyncio's own


class Commands(typer.Typer):
    """Commands that are coroutine functions. Help is plain text, so that it reads the same in a file."""

    def __init__(self, help: str | None = None) -> None:
        super().__init__(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    def verb(self, name: str, *, seconds: float | None = ANSWER_SECONDS) -> Callable[[Verb[Given]], Verb[Given]]:
        """Make a command of a function; after so many seconds the broker counts as away."""

        def register(function: Verb[Given]) -> Verb[Given]:
            @functools.wraps(function)
            def command(*args: Given.args, **kwargs: Given.kwargs) -> None:
                asyncio.run(_bounded(function(*args, **kwargs), seconds))

            self.command(name)(command)
            return function

        return register


async def _bounded(work: Coroutine[Any, Any, None], seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds) as limit:
            await work
    except TimeoutError:
        if limit.expired():
            raise BusUnavailable(f"the broker has not answered within {seconds:g} s: is it running?") from None
        raise


@dataclass(frozen=True)
class Broker:
    """The partitions of a namespace, for commands that look at the broker itself."""

    settings: Settings
    url: str
    transport: Transport
    buses: Sequence[EventBus]
    admission: Admission

    async def now_ms(self) -> int:
        """The broker's own time: what it stores must not be compared with this machine's clock."""
        return await self.buses[0].time_ms()


def read_settings() -> Settings:
    """What the environment says. Raises ConfigurationError."""
    return Settings.from_environment(os.environ)


def broker_url(settings: Settings) -> str:
    """The broker that was named, or the one of a `weft up` on this data folder. Raises ConfigurationError."""
    url = settings.operator_redis_url or settings.redis_url or find_endpoint(settings.data_dir)
    if url is None:
        raise ConfigurationError(
            f"no broker: start one with `weft up`, or set WEFT_REDIS_URL (no server runs for the data folder "
            f"{settings.data_dir}; WEFT_DATA_DIR names another)"
        )
    if url.startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL: memory:// lives in one process, which a command is not part of; name a Redis or Valkey"
        )
    return url


@asynccontextmanager
async def broker(*, unchecked: bool = False) -> AsyncIterator[Broker]:
    """Connect to a namespace that exists: a command that looks must not make one by a mistyped name.

    `unchecked` connects to whatever is there, for who looks for what is wrong with it.
    """
    settings = read_settings()
    url = broker_url(settings)
    transport = await connect(url)
    try:
        stored = await transport.call("HGET", namespace_settings(settings.namespace), "partitions")
        partitions = settings.partitions if stored is None else int(cast(bytes, stored))
        if unchecked:
            keys = [Keys(settings.namespace, number) for number in range(partitions)]
        elif stored is None:
            raise ConfigurationError(
                f"the namespace {settings.namespace!r} does not exist on this broker: start services with it, or "
                "set WEFT_NAMESPACE to the one that they use"
            )
        else:
            keys = await open_namespace(transport, settings.namespace, partitions)
        buses = [EventBus(transport, one, durability=settings.durability) for one in keys]
        yield Broker(settings, url, transport, buses, Admission(buses))
    finally:
        await transport.close()


@asynccontextmanager
async def trajectories(settings: Settings) -> AsyncIterator[TrajectoryStore | None]:
    """The trajectory store; None where it would be a file that nobody has made yet."""
    if not _has_trajectories(settings):
        yield None
        return
    from runtime_core.trajectory.store import TrajectoryStore  # half a second, for those who need it

    store = await TrajectoryStore.open(settings.trajectory_url)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def known_trajectories(settings: Settings) -> AsyncIterator[TrajectoryStore]:
    """The trajectory store. Raises ConfigurationError where there is none."""
    async with trajectories(settings) as store:
        if store is None:
            raise ConfigurationError(
                f"there is no trajectory store at {without_password(settings.trajectory_url)}: set WEFT_TRAJECTORY_URL "
                "(or WEFT_DATA_DIR) as the trajectory-recorder has it"
            )
        yield store


def _has_trajectories(settings: Settings) -> bool:
    """False where the store is a SQLite file that is not there: opening it would make it."""
    path = settings.trajectory_url.removeprefix("sqlite:///")
    return path == settings.trajectory_url or Path(path).exists()
