"""The desk's processes: the four services, and a broker if none is configured. They end with the desk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import ConfigurationError
from weft.hosting import SERVICES, EmbeddedServer, Settings, Supervisor, child_specs

APP = "examples.research_desk.app:app"


@dataclass(frozen=True)
class Desk:
    """The running desk."""

    url: str
    """The broker's URL."""
    services: tuple[str, ...]
    log: Path
    """The services' log file."""


@contextlib.asynccontextmanager
async def open_desk(settings: Settings, wanted: Sequence[str] = SERVICES) -> AsyncIterator[Desk]:
    """Start everything, and stop it at the end. Raises ConfigurationError, on one line, if that fails.

    A service that dies is restarted. If the services cannot work at all, the body is cancelled and the reason raised.
    """
    if settings.redis_url is not None and settings.redis_url.startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL: memory:// lives in one process and services are several; leave it unset"
            " for the embedded server, or name a Redis or Valkey"
        )
    folder = settings.make_data_dir()
    log = folder / "services.log"
    async with contextlib.AsyncExitStack() as stack:
        url = settings.redis_url
        if url is None:
            server = EmbeddedServer(folder, appendfsync="everysec" if settings.durability == "fast" else "always")
            stack.push_async_callback(server.stop)
            await server.start()
            url = server.url
            stack.push_async_callback(_cancelled, asyncio.create_task(server.keep(), name="keep the server"))
        try:
            output = stack.enter_context(log.open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"{log}: cannot be written ({error.strerror}); set WEFT_DATA_DIR") from None
        specs = child_specs(replace(settings, redis_url=url, app=APP), 1, wanted)
        supervisor = Supervisor(specs, output, shutdown_seconds=settings.shutdown_seconds)
        services = asyncio.create_task(supervisor.run(), name="services")
        stack.push_async_callback(_stopped, supervisor, services)
        work = asyncio.current_task()
        assert work is not None  # an async context is entered in a task

        def gave_up(_: asyncio.Task[int]) -> None:
            if supervisor.failure:
                work.cancel()

        services.add_done_callback(gave_up)
        try:
            yield Desk(url, tuple(spec.name for spec in specs), log)
        except asyncio.CancelledError:
            if not supervisor.failure:
                raise
            work.uncancel()
            raise ConfigurationError(supervisor.failure) from None


async def _stopped(supervisor: Supervisor, services: asyncio.Task[int]) -> None:
    if not services.done():
        supervisor.stop()
    await asyncio.wait([services])


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
