"""Connections of commands: to an existing namespace on the broker, and to the trajectory store."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import typer

from runtime_core.bus.connection import Transport
from runtime_core.bus.embedded import find_endpoint
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys, namespace_settings
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.errors import BusUnavailable, ConfigurationError
from runtime_core.settings import Settings, without_password
from runtime_core.state_manager.admission import Admission

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore

ANSWER_SECONDS = 60.0
"""The limit for a command that neither waits for a task nor handles many items, in seconds."""

Given = ParamSpec("Given")
Verb = Callable[Given, Coroutine[Any, Any, None]]  # Any: asyncio's own


class Commands(typer.Typer):
    """Commands that are coroutine functions. Help is plain text, so that it reads the same in a file."""

    def __init__(self, help: str | None = None) -> None:
        super().__init__(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    def verb(self, name: str, *, seconds: float | None = ANSWER_SECONDS) -> Callable[[Verb[Given]], Verb[Given]]:
        """Register a function as a command; it fails if it takes longer than `seconds` (None: no limit)."""

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
            raise BusUnavailable(f"the broker did not answer within {seconds:g} s: check that it is running") from None
        raise


@dataclass(frozen=True)
class Broker:
    """The partitions of a namespace."""

    settings: Settings
    url: str
    transport: Transport
    buses: Sequence[EventBus]
    admission: Admission

    async def now_ms(self) -> int:
        """Return the broker's time, since stored times must not be compared with this machine's clock."""
        return await self.buses[0].time_ms()


def read_settings() -> Settings:
    """Read the settings from the environment. Raises ConfigurationError."""
    return Settings.from_environment(os.environ)


def broker_url(settings: Settings) -> str:
    """Return the configured broker's URL, or that of `weft up` on this data folder. Raises ConfigurationError."""
    url = settings.operator_redis_url or settings.redis_url or find_endpoint(settings.data_dir)
    if url is None:
        raise ConfigurationError(
            f"no broker: start one with `weft up`, or set WEFT_REDIS_URL. No server runs for the data folder "
            f"{settings.data_dir}; to use that of another `weft up`, set WEFT_DATA_DIR or run in its folder"
        )
    if url.startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL: commands cannot reach a memory:// broker, which is private to its process: use the URL of "
            "a Redis or Valkey server"
        )
    return url


@asynccontextmanager
async def broker(*, unchecked: bool = False) -> AsyncIterator[Broker]:
    """Connect to an existing namespace, so that a mistyped name does not create one.

    `unchecked` also connects to one that is missing or damaged, for `weft doctor`.
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
                f"the namespace {settings.namespace!r} does not exist on this broker: start services in it, or set "
                "WEFT_NAMESPACE to the one that they use"
            )
        else:
            keys = await open_namespace(transport, settings.namespace, partitions)
        buses = [EventBus(transport, one, durability=settings.durability) for one in keys]
        yield Broker(settings, url, transport, buses, Admission(buses))
    finally:
        await transport.close()


@asynccontextmanager
async def trajectories(settings: Settings) -> AsyncIterator[TrajectoryStore | None]:
    """Open the trajectory store; None if it is a SQLite file that does not exist yet."""
    from runtime_core.trajectory.store import TrajectoryStore  # here: the import takes half a second

    store = await TrajectoryStore.open_existing(settings.trajectory_url)
    try:
        yield store
    finally:
        if store is not None:
            await store.close()


@asynccontextmanager
async def existing_trajectories(settings: Settings) -> AsyncIterator[TrajectoryStore]:
    """Open the trajectory store. Raises ConfigurationError if there is none."""
    async with trajectories(settings) as store:
        if store is None:
            raise ConfigurationError(
                f"there is no trajectory store at {without_password(settings.trajectory_url)}: set WEFT_TRAJECTORY_URL "
                "(or WEFT_DATA_DIR) to the value that the trajectory-recorder uses"
            )
        yield store
