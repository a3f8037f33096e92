"""Hosts of whole tasks on Spark: calls on the executors that run the handlers of the tasks' app until stopped."""

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
from runtime_core.integrations.aworld.engines.packing import Hosts, HostsEnded, HostsSpec, app_of, start_host

EARLY_SECONDS = 10.0
"""A host that dies sooner has died early: its call starts before it has loaded the app."""
NO_PLACE_SECONDS = 20.0
"""How often a warning says that a host waits for a free place."""
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
        return await SparkHosts(self._calls, work.call.payload, report).run(self._cpus)


class SparkHosts(Hosts):
    """The hosts of one app. `spec` is an encoded HostsSpec."""

    def __init__(self, calls: SessionCalls, spec: bytes, report: Report) -> None:
        super().__init__(spec, report, EARLY_SECONDS)
        self._calls = calls

    async def run(self, places: int) -> Outcome:
        """Keep the hosts until cancelled, or until they cannot work."""
        try:
            # First, so that an app that cannot be rebuilt is an error before any task is submitted.
            await self._call("check", check_app, self.encoded)
            # One place stays free for the steps of the tasks.
            await self.keep(self.spec.number or max(1, places - 1), self._host)
        except HostsEnded as ended:
            return ended.error
        raise AssertionError("hosts end only with an error")

    async def _host(self, place: int, start: Callable[[], None]) -> str:
        waiting = asyncio.create_task(self._warn_of_no_place(place), name=f"wait for a place of host {place}")

        def begin() -> None:
            waiting.cancel()
            start()

        try:
            return await self._call(f"host {place}", host_tasks, self.encoded, self.in_flight, on_start=begin)
        finally:
            waiting.cancel()

    async def _warn_of_no_place(self, place: int) -> None:
        while True:
            await asyncio.sleep(NO_PLACE_SECONDS)
            logger.warning(
                "host %d waits for a free place on Spark, where %d of %d hosts run: give the server more places, ask "
                "for fewer workers, or end other work there",
                place,
                len(self.started),
                self.number,
            )

    async def _call(
        self, name: str, function: object, *arguments: object, on_start: Callable[[], None] | None = None
    ) -> str:
        """Run a function on an executor and return why it died. Raises HostsEnded if it refuses, or Spark is lost."""
        payload = cloudpickle.dumps((function, arguments, {}))
        answer = await self._calls.run(Pickled(payload), StepInfo(), f"task {name}", "", 0.0, on_start)
        [outcome] = answer.ends
        if not isinstance(outcome, Error):
            refused = cast(str, cloudpickle.loads(outcome.data))
            if refused:
                raise HostsEnded(refused)
            return "its handlers ended unexpectedly"
        if outcome.cause in ("lost", "invalid"):
            raise HostsEnded(outcome)
        return f"{outcome.type}: {outcome.message}"
