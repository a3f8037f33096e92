"""`RayEngine` and `SparkEngine`: run any functions on a cluster, without a gateway."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import sys
from importlib.util import find_spec
from typing import ClassVar, cast

from runtime_core.engines.driver.process import Driver
from runtime_core.engines.protocol import Error, Pickled, Work
from runtime_core.engines.ray.cluster import ADDRESS_VARIABLE
from runtime_core.engines.runtime_engine import EngineCall, Failure, RunConfig, RuntimeEngine
from runtime_core.errors import ConfigurationError, InvalidInput

TYPES = {"limit": "TimeoutError"}
"""Error types by cause, where all engines use the same one."""


class DriverEngine(RuntimeEngine):
    """Runs calls through its own driver process. A subclass names its engine."""

    engine: ClassVar[str]
    """The engine's name, which is also the name of the extra."""
    package: ClassVar[str]
    """The package that must be installed."""
    cloudpickle: ClassVar[str]
    """The module that pickles functions for the engine's workers."""
    address: ClassVar[str]
    """The environment variable with the engine's address."""

    def __init__(self, config: RunConfig | None = None) -> None:
        super().__init__(config)
        self._driver: Driver | None = None

    async def _start(self) -> None:
        if find_spec(self.package) is None:
            raise ConfigurationError(
                f"{type(self).__name__}: {self.package} is not installed: pip install 'weft[{self.engine}]'"
            )
        self._driver = driver = Driver(self.engine, self._environment())
        await driver.start()
        reached = False
        try:
            state = await driver.reached()
            reached = state.connected
            if not reached:
                raise ConfigurationError(f"{type(self).__name__}: {state.reason}")
        finally:
            if not reached:
                self._driver = None
                await driver.stop()
        if self.config.worker_num is None:
            self._slots = asyncio.Semaphore(max(1, int(float(state.info["cpus"]))))

    async def _stop(self) -> None:
        if self._driver is not None:
            await self._driver.stop()

    def _prepare(self, call: EngineCall) -> Work:
        cloudpickle = importlib.import_module(self.cloudpickle)
        try:
            payload = cloudpickle.dumps((call.function, call.args, dict(call.kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the arguments' own methods may raise anything
            raise InvalidInput("calls", f"cannot be pickled for a cluster, {error}: give plain arguments") from error
        return Work(Pickled(payload), call.shown)

    async def _run(self, prepared: Work, timeout_seconds: float | None) -> object:
        assert self._driver is not None
        outcome = await self._driver.run(Work(prepared.call, prepared.name, timeout_seconds=timeout_seconds or 0.0))
        if isinstance(outcome, Error):
            raise await asyncio.to_thread(_failure, outcome)
        return await asyncio.to_thread(_loaded, outcome.data)

    def _environment(self) -> dict[str, str]:
        """Return the driver's environment, in which its workers find this program's modules."""
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self.config.address:
            environ[self.address] = self.config.address
        return environ


def _loaded(data: bytes) -> object:
    try:
        return cast(object, pickle.loads(data))  # noqa: S301  # created by our own worker
    except Exception as error:  # the result's own methods may raise anything
        raise Failure("PicklingError", f"the result cannot be unpickled here: {error}", error) from None


def _failure(error: Error) -> Failure:
    original = None
    if error.pickled:
        try:
            original = pickle.loads(error.pickled)  # noqa: S301  # as above
        except Exception:  # its class may not be found here
            original = None
    if not isinstance(original, BaseException):
        original = None
    elif error.traceback:
        original.add_note(f"In the worker process:\n{error.traceback}")
    return Failure(TYPES.get(error.cause, error.type), error.message, original)


class RayEngine(DriverEngine):
    """Runs calls as tasks of the cluster at `RunConfig.address`, or WEFT_RAY_ADDRESS, or on its own local Ray.

    Functions and arguments are sent with cloudpickle. Workers import code from modules, so the modules must be
    installed there. Each call uses one CPU. Without `worker_num`, as many calls run in parallel as there are CPUs.
    """

    engine = "ray"
    package = "ray"
    cloudpickle = "ray.cloudpickle"
    address = ADDRESS_VARIABLE


class SparkEngine(DriverEngine):
    """Runs calls as queries of the server at `RunConfig.address`, or WEFT_SPARK_REMOTE, or on its own local one.

    Functions and arguments are sent with cloudpickle. Workers import code from modules, so the modules must be
    installed there. Without `worker_num`, as many calls run in parallel as the server runs tasks. Large data passes
    through the server's memory, except with its own local server.
    """

    engine = "spark"
    package = "pyspark"
    cloudpickle = "pyspark.cloudpickle"
    address = "WEFT_SPARK_REMOTE"
