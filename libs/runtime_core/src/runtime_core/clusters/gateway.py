"""A gateway: a worker on the streams of its engine, and the driver process that does the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass

from runtime_core.app.app import App
from runtime_core.clusters.driver.process import Driver
from runtime_core.config.settings import Settings
from runtime_core.engines.protocol import Error, Outcome, State, Value
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry import names
from runtime_core.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that a gateway serves."""

    name: str
    """The name that agents use, which is also the work stream's."""
    title: str
    """The display name."""
    in_flight: int
    """The default number of concurrent steps."""
    redrives: int | None
    """How often a step that was lost with its engine is redriven; None for its function's retry policy."""
    attaches: bool
    """Whether work outlives the gateway that started it, so that another one can attach to it by its key."""


RAY = Served("ray", "Ray", in_flight=64, redrives=None, attaches=True)
SPARK = Served("spark", "Spark", in_flight=8, redrives=1, attaches=False)


logger = logging.getLogger(__name__)


class Gateway:
    """One process's connection to its engine. The service reads steps even while the engine is away."""

    def __init__(self, engine: Served, app: App, settings: Settings, metrics: Metrics, backend: str = "") -> None:
        """`backend` is a custom backend, `package.module:Class`, in place of the engine's."""
        environ = {**os.environ, **settings.to_environment()}
        starts = metrics.engine_driver_starts[engine.name]
        self.engine = engine
        self.app = app
        self.driver = Driver(backend or engine.name, environ, on_start=starts.inc)
        self.reference = settings.app or ""
        """The app's import reference for workers of the cluster: `package.module:app`."""
        self.folder = os.getcwd()
        """Where it may be imported from."""
        self.connected_at = time.time()
        """The time when the engine was last connected or this gateway started, in seconds since 1970."""
        self._results = Results.from_environment(environ)
        self._following: asyncio.Task[None] | None = None
        for end in names.STEP_ENDS:
            metrics.engine_steps[engine.name, end].inc(0)  # shown from the start, so that a first loss is an increase
        metrics.engine_running[engine.name].set_function(lambda: self.driver.running)
        metrics.engine_connected[engine.name].set_function(lambda: self.driver.state.connected)
        metrics.engine_driver_memory[engine.name].set_function(lambda: self.driver.memory_bytes)

    async def start(self) -> None:
        """Start the driver without waiting for the engine."""
        self.connected_at = time.time()
        self._following = asyncio.get_running_loop().create_task(self._follow(), name="follow the engine")
        await self.driver.start()

    async def stop(self) -> None:
        """Stop the driver."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        await self.driver.stop()

    def kept(self, value: bytes, task: str) -> Outcome:
        """Return a result (JSON) that was assembled here, or a Reference to it if it is large. Blocks."""
        try:
            return Value(self._results.kept(value, task))
        except (InvalidInput, ConfigurationError, OSError) as error:
            return Error("invalid", type(error).__name__, str(error), retryable=False)

    async def _follow(self) -> None:
        """Log each change of the connection and keep `connected_at` current."""
        state = self.driver.state
        while True:
            state = await self.driver.changed(state)
            if state.connected:
                logger.info("connected to %s: %s", self.engine.title, _shown(state))
            else:
                logger.warning("%s cannot be used now, steps wait: %s", self.engine.title, state.reason)
            while state.connected and self.driver.state == state:
                self.connected_at = time.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self.driver.changed(state)


def _shown(state: State) -> str:
    return ", ".join(f"{name} {value}" for name, value in state.info.items())
