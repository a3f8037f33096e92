"""Takes the app of tasks to the hosts that run them, in another process or on another machine, and keeps the hosts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.declare.declaration import one_line
from runtime_core.engines.protocol import Error, Report
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.integrations.aworld.runner import TaskRunner
from runtime_core.integrations.aworld.target import Part, TasksApp, declare
from runtime_core.settings import Settings

if TYPE_CHECKING:
    from runtime_core.host.host import Host

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""The wait between the death of a host and its replacement, which doubles after each early death."""
DEATHS_MAX = 6
"""How many hosts in a row may die early: then the app that they load kills them. With the pauses this takes longer
than to notice that all of Ray is gone."""
LEAST_IN_FLIGHT = 16
"""The least limit of concurrent turns in a host: turns that wait for other agents must not fill it."""


logger = logging.getLogger(__name__)

Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], object]
RunHost = Callable[[int, Callable[[], None]], Awaitable[str]]
"""Run the host of a place until it dies, call the second argument when it has started, and return why it died."""
_Carried = tuple[App | None, list[tuple[Any, str, object, str]]]  # Any: a Part's kind


class PackedApp(Struct, frozen=True):
    """An app in a form that another process can rebuild."""

    name: str
    base: str
    """`package.module:app`; empty: no base, or it is in `pickled`."""
    folder: str
    """The working directory of the sender."""
    paths: list[str]
    """The import path of the sender."""
    pickled: bytes
    """(the base or None, [(kind, name, object, field)]); empty: only the base."""


class HostsSpec(Struct, frozen=True):
    """Asks an engine to host an app's handlers."""

    app: PackedApp
    environ: dict[str, str]
    """The settings of the handlers, as environment variables."""
    number: int
    """How many processes; 0: one per CPU of the engine."""
    at_once: int
    """How many tasks run concurrently."""
    here_only: bool
    """Whether the broker is reachable only from this machine."""


def app_of(spec: HostsSpec, loads: Loads) -> App:
    """Rebuild the app of a HostsSpec in this process. Raises WeftError with a one-line message."""
    return unpack(spec.app, loads)


async def start_host(spec: HostsSpec, loads: Loads, in_flight: int) -> Host:
    """Start the handlers of a HostsSpec in this process. They take tasks from the broker like a handler service, so
    other hosts reclaim them if this one dies. Raises WeftError with a one-line message.
    """
    from runtime_core.host import app_services  # here: only hosts need its imports

    settings = Settings.from_environment(spec.environ)
    host = await app_services.build_task_host(app_of(spec, loads), settings, in_flight)
    await host.start()
    return host


def pack(made: TasksApp, reference: str, dumps: Dumps) -> PackedApp:
    """Return the app in a form that can be sent. `reference` names the base; if it is empty, search for the name.

    Raises InvalidInput that names an object that cannot be sent.
    """
    base = reference or (reference_of(made.base) if made.base is not None else "")
    carried = None if base else made.base
    parts = [(part.kind, part.name, part.value, part.field) for part in made.parts]
    pickled = b""
    if carried is not None or parts:
        try:
            pickled = dumps((carried, parts))
        except Exception as error:  # pickling runs the objects' own methods
            raise _unsendable(made, carried, dumps, error) from error
    paths = [os.path.abspath(path) for path in sys.path if path and os.path.isdir(path)]
    return PackedApp(made.app.name, base, os.getcwd(), paths, pickled)


def unpack(sent: PackedApp, loads: Loads) -> App:
    """Rebuild the app in this process. Raises ConfigurationError with a one-line message."""
    for path in (sent.folder, *sent.paths):
        if path not in sys.path:
            sys.path.append(path)
    base: App | None = None
    parts: list[Part] = []
    if sent.pickled:
        try:
            base, described = cast(_Carried, loads(sent.pickled))
        except Exception as error:  # unpickling imports and runs the user's code
            raise ConfigurationError(
                f"the tasks' objects cannot be rebuilt in another process: {one_line(error)}; the modules that they "
                "need must be importable there"
            ) from error
        parts = [Part(*one) for one in described]
    if sent.base:
        base = load_app(sent.base)
    if base is not None and not parts:
        base.add_runner(TaskRunner)
        base.check()
        return base
    app = App(sent.name)
    if base is not None:
        app.include(base)
    app.add_runner(TaskRunner)
    for part in parts:
        declare(app, part)
    app.check()
    return app


def reference_of(app: App) -> str:
    """Return `package.module:name` of an app in an imported module; empty if no module has it."""
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name == "__mp_main__":
            continue
        for attribute, value in list(vars(module).items()):
            if value is app:
                # Another process cannot import a script as __main__; `python -m` knows its real name.
                own = getattr(getattr(module, "__spec__", None), "name", "")
                if module_name != "__main__" or own:
                    return f"{own or module_name}:{attribute}"
    return ""


def _unsendable(made: TasksApp, carried: App | None, dumps: Dumps, error: Exception) -> InvalidInput:
    """Return an error that names the object that cannot be sent."""
    tried: Sequence[tuple[str, object, str]] = (
        *((part.field, part.value, f"{part.kind} {part.name!r}") for part in made.parts),
        *(("app", item, item.what) for item in (carried.functions.all() if carried is not None else ())),
    )
    for field, value, shown in tried:
        try:
            dumps(value)
        except Exception as own:
            return InvalidInput(field, f"{shown} cannot be sent to another process: {one_line(own)}")
    return InvalidInput("app", f"cannot be sent to another process: {one_line(error)}; define it in a module")


class HostsEnded(Exception):
    """No host can run any more."""

    def __init__(self, error: Error | str) -> None:
        if isinstance(error, str):
            error = Error("invalid", "ConfigurationError", error, retryable=False)
        super().__init__(error.message)
        self.error = error


class Hosts:
    """The hosts of one app. `spec` is an encoded HostsSpec. A host that dies in `early_seconds` has died early.

    The cluster schedules only the hosts. Tasks run wherever a host takes them from the broker, so the death of a host,
    a worker or a node loses no finished work: the other hosts reclaim its deliveries.
    """

    def __init__(self, spec: bytes, report: Report, early_seconds: float) -> None:
        self.encoded = spec
        self.spec = msgspec.msgpack.decode(spec, type=HostsSpec)
        self.number = 0
        self.started: dict[int, float] = {}
        """When the host of each place started, without those that have died."""
        self._report = report
        self._early_seconds = early_seconds

    @property
    def in_flight(self) -> int:
        """The limit of one host, so that the first host to start does not take all tasks."""
        return max(LEAST_IN_FLIGHT, -(-self.spec.at_once // self.number))

    async def keep(self, number: int, run: RunHost) -> None:
        """Keep `number` hosts until cancelled. Raises HostsEnded, the first, if they cannot work."""
        self.number = number
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(number):
                    group.create_task(self._keep(place, run), name=f"keep host {place}")
        except BaseExceptionGroup as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, HostsEnded):
                raise
            raise first from None

    async def _keep(self, place: int, run: RunHost) -> None:
        loop = asyncio.get_running_loop()

        def start() -> None:
            self.started[place] = loop.time()
            self._tell()

        pause, deaths = FIRST_PAUSE_SECONDS, 0
        while True:
            why = await run(place, start)
            started = self.started.pop(place, None)
            if started is not None:
                self._tell()
                if loop.time() - started > self._early_seconds:
                    pause, deaths = FIRST_PAUSE_SECONDS, 0
            deaths += 1
            if deaths == DEATHS_MAX:
                raise HostsEnded(f"{deaths} hosts in a row died before they were ready; the last one: {why}")
            logger.warning("lost host %d, starting another one in %g s: %s", place, pause, why)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def _tell(self) -> None:
        self._report(msgspec.json.encode({"hosts": len(self.started)}))
