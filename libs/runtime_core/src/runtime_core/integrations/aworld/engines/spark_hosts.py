"""Hosts of whole tasks on Spark: calls on the executors that run the handlers of the tasks' app until stopped.

Spark schedules only these calls. Tasks run wherever a host takes them from the broker, so the death of an executor
loses no finished work: other hosts reclaim its deliveries, and the host is started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec
from pyspark import cloudpickle

from runtime_core.engines.protocol import Error, Outcome, Pickled, Report, StepInfo, Work
from runtime_core.engines.spark.backend import SparkBackend
from runtime_core.engines.spark.calls import SessionCalls
from runtime_core.errors import WeftError
from runtime_core.integrations.aworld.engines.packing import HostsSpec, app_of, start_host

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""The wait between the death of a host and its replacement, which doubles after each early death."""
EARLY_SECONDS = 10.0
"""A host that dies sooner has died early."""
DEATHS_MAX = 6
"""How many hosts in a row may die early: then the app that they load kills them."""
NO_PLACE_SECONDS = 20.0
"""How often a warning says that a host waits for a free place."""
LEAST_IN_FLIGHT = 16
"""The least limit of concurrent turns in a host: turns that wait for other agents must not fill it."""

logger = logging.getLogger(__name__)


def check_app(spec: bytes) -> str:
    """Rebuild the app of an encoded HostsSpec in this process. Return an empty string, or a one-line error."""
    try:
        app_of(msgspec.msgpack.decode(spec, type=HostsSpec), cloudpickle.loads)
    except WeftError as error:
        return str(error) or type(error).__name__
    return ""


def host_tasks(spec: bytes, in_flight: int) -> str:
    """Run the handlers of an encoded HostsSpec in this process, until it is ended. Return a one-line error."""

    async def run() -> str:
        try:
            host = await start_host(msgspec.msgpack.decode(spec, type=HostsSpec), cloudpickle.loads, in_flight)
        except WeftError as error:
            return str(error) or type(error).__name__
        await host.run()
        return ""

    return asyncio.run(run())


class SparkHostsBackend(SparkBackend):
    """A Spark driver whose only work is to keep the hosts of a HostsSpec until it is cancelled."""

    async def run(self, work: Work, report: Report) -> Outcome:
        """Keep the hosts. Report `{"hosts": n}` whenever the number of running hosts changes."""
        assert isinstance(work.call, Pickled)
        assert self._calls is not None
        return await _Hosts(self._calls, work.call.payload, report, self._cpus).run()


class _Ended(Exception):
    """No host can run any more."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class _Hosts:
    def __init__(self, calls: SessionCalls, spec: bytes, report: Report, places: int) -> None:
        self._calls = calls
        self._encoded = spec
        self._spec = msgspec.msgpack.decode(spec, type=HostsSpec)
        self._report = report
        # One place stays free for the steps of the tasks.
        self._number = self._spec.number or max(1, places - 1)
        self._in_flight = max(LEAST_IN_FLIGHT, -(-self._spec.at_once // self._number))
        self._running = 0

    async def run(self) -> Outcome:
        """Keep the hosts until cancelled, or until they cannot work."""
        try:
            # First, so that an app that cannot be rebuilt is an error before any task is submitted.
            await self._call("check", check_app, self._encoded)
            async with asyncio.TaskGroup() as group:
                for place in range(self._number):
                    group.create_task(self._keep(place), name=f"keep host {place}")
        except (_Ended, BaseExceptionGroup) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, _Ended):
                raise
            return first.error
        raise AssertionError("hosts end only with an error")

    async def _keep(self, place: int) -> None:
        pause, deaths = FIRST_PAUSE_SECONDS, 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            started: list[float] = []
            waiting = loop.create_task(self._warn_of_no_place(place), name=f"wait for a place of host {place}")

            def start(started: list[float] = started, waiting: asyncio.Task[None] = waiting) -> None:
                waiting.cancel()
                started.append(loop.time())
                self._count(1)

            try:
                why = await self._call(f"host {place}", host_tasks, self._encoded, self._in_flight, on_start=start)
            finally:
                waiting.cancel()
                if started:
                    self._count(-1)
            if loop.time() - (started or [began])[0] > EARLY_SECONDS:
                pause, deaths = FIRST_PAUSE_SECONDS, 0
            deaths += 1
            if deaths == DEATHS_MAX:
                raise _Ended(_invalid(f"{deaths} hosts in a row died before they were ready; the last one: {why}"))
            logger.warning("lost host %d, starting another one in %g s: %s", place, pause, why)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _warn_of_no_place(self, place: int) -> None:
        while True:
            await asyncio.sleep(NO_PLACE_SECONDS)
            logger.warning(
                "host %d waits for a free place on Spark, where %d of %d hosts run: give the server more places, ask "
                "for fewer workers, or end other work there",
                place,
                self._running,
                self._number,
            )

    async def _call(
        self, name: str, function: object, *arguments: object, on_start: Callable[[], None] | None = None
    ) -> str:
        """Run a function on an executor and return why it died. Raises _Ended if it refuses, or Spark is lost."""
        payload = cloudpickle.dumps((function, arguments, {}))
        answer = await self._calls.run(Pickled(payload), StepInfo(), f"task {name}", "", 0.0, on_start)
        [outcome] = answer.ends
        if not isinstance(outcome, Error):
            refused = cast(str, cloudpickle.loads(outcome.data))
            if refused:
                raise _Ended(_invalid(refused))
            return "its handlers ended unexpectedly"
        if outcome.cause in ("lost", "invalid"):
            raise _Ended(outcome)
        return f"{outcome.type}: {outcome.message}"

    def _count(self, change: int) -> None:
        self._running += change
        self._report(msgspec.json.encode({"hosts": self._running}))


def _invalid(message: str) -> Error:
    return Error("invalid", "ConfigurationError", message, retryable=False)
