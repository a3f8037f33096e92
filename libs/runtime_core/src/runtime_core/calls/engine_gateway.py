"""A gateway: it reads the steps of one engine, has its driver process run them, and commits what they return.

    no such function ─> requeued           away ─> waits, or fails after the longest wait
    invalid ─> fails                       lost ─> redriven with the same key
    begun ─> value ─> committed            function, worker, limit ─> retried by the function's policy

All attempts of a step share one key until one of them ends, so a gateway that reclaims the step finds work that still
runs. If this gateway gives the step up (another owns it, or it stops), the work continues. If the task is over, the
gateway stops the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass

import msgspec

from runtime_core.base.text import LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_TYPE
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.spans import call_span
from runtime_core.consumer.announcements import is_announced
from runtime_core.consumer.effects import Failed
from runtime_core.consumer.in_flight import STOPPED
from runtime_core.consumer.settle import Calls
from runtime_core.engines.driver.driver import Driver
from runtime_core.engines.function import EngineFunction, EngineFunctions
from runtime_core.engines.protocol import ConnectionState, Error, Mapped, Outcome, Registered, StepInfo, Value, Work
from runtime_core.engines.results import MAP, MapRequest, Results, map_outcome
from runtime_core.engines.runtime_engine import UNAVAILABLE, wait_until
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.settings import Settings
from runtime_core.telemetry import gen_ai, names
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import kept
from runtime_core.telemetry.spans import tracing
from runtime_core.wire.step import StepFailure

logger = logging.getLogger(__name__)

ENGINE_LOST = "EngineLost"
"""The error type of an attempt whose progress is unknown."""
STEADY_SECONDS = 15.0
"""If the engine lost a step and is still connected after this time, in seconds, it lost only that step."""
AWAY_SECONDS = 1.0
"""The delay of a step whose engine is away, in seconds."""
MAX_REPORTED = 10_000
"""The most steps that this gateway remembers as reported to be waiting."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
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


RAY = ServedEngine("ray", "Ray", in_flight=64, redrives=None, attaches=True)
SPARK = ServedEngine("spark", "Spark", in_flight=8, redrives=1, attaches=False)


class EngineGateway:
    """One process's connection to its engine. The service reads steps even while the engine is away."""

    def __init__(
        self, engine: ServedEngine, functions: EngineFunctions, settings: Settings, metrics: Metrics, backend: str = ""
    ) -> None:
        """`backend` is a custom backend, `package.module:Class`, in place of the engine's."""
        environ = {**os.environ, **settings.to_environment()}
        starts = metrics.engine_driver_starts[engine.name]
        self.engine = engine
        self.functions = functions
        self.driver = Driver(backend or engine.name, environ, on_start=starts.inc)
        self.reference = settings.app or ""
        """The app's import reference for workers of the cluster: `package.module:app`."""
        self.folder = os.getcwd()
        """Where it may be imported from."""
        self.connected_at = time.time()
        """The time when the engine was last connected or this gateway started, in seconds since 1970."""
        self.results = Results.from_environment(environ)
        """Where large results and inputs are."""
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
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        await self.driver.stop()

    def kept(self, value: bytes, task: str) -> Outcome:
        """Return a result (JSON) that was assembled here, or a Reference to it if it is large. Blocks."""
        try:
            return Value(self.results.kept(value, task))
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
                logger.warning("%s is unavailable, so steps wait: %s", self.engine.title, state.reason)
            while state.connected and self.driver.state == state:
                self.connected_at = time.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self.driver.changed(state)


def _shown(state: ConnectionState) -> str:
    return ", ".join(f"{name} {value}" for name, value in state.info.items())


class _EngineContext(msgspec.Struct):
    """The fields of a call's context that gateways use."""

    deadline: float = 0.0
    traceparent: str = ""


_CONTEXT = msgspec.json.Decoder(_EngineContext)
_ERRORS = msgspec.json.Decoder(list[StepFailure])


class StepHandler:
    """Runs steps on one engine, for the deliveries of one consumer."""

    def __init__(self, bus: EventBus, gateway: EngineGateway, metrics: Metrics) -> None:
        self._bus = bus
        self._gateway = gateway
        self._engine = gateway.engine
        self._driver = gateway.driver
        self._metrics = metrics
        self._calls = Calls(bus, metrics, self._engine.name)
        self._reported: set[str] = set()

    async def handle(self, delivery: Delivery) -> None:
        began, started = time.monotonic(), time.time() * 1000
        end = "released"
        try:
            if tracing():
                with call_span(delivery, self._bus.keys, self._bus.owner):
                    end = await self._handle(delivery, started)
            else:
                end = await self._handle(delivery, started)
        finally:
            self._metrics.engine_steps[self._engine.name, end].inc()
            if end in ("completed", "failed", "retried"):
                self._metrics.engine_step_seconds[self._engine.name].observe(time.monotonic() - began)

    def forget(self) -> None:
        """Do nothing: a running step ends with its delivery, and this handler stores nothing else."""

    def drain(self) -> None:
        """Do nothing: a call is one step, and it has already started."""

    def stop_task(self, task: str) -> None:
        """Do nothing: the consumer cancels running steps, and this handler stores nothing else."""

    # -- one step and its outcome -----------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery, started: float) -> str:
        try:
            function = self._gateway.functions.engine_function(delivery.name)
            lacking = f"there is no engine function {delivery.name!r}"
        except ConfigurationError as error:
            function, lacking = None, str(error)
        if function is None:
            known = await is_announced(self._bus, "engine function", delivery.name)
            await self._calls.hand_on(delivery, known, lacking)
            return "requeued"
        context = _CONTEXT.decode(delivery.context) if delivery.context else _EngineContext()
        mapped: MapRequest | None = None
        try:
            mapped = await self._map_request(delivery) if delivery.key == MAP else None
            work = self._work(delivery, function, mapped, context)
        except InvalidInput as error:
            refused = Error("invalid", "InvalidInput", str(error), retryable=False)
            return await self._settle_error(delivery, function, refused, started)
        if not self._driver.state.connected:
            return await self._wait_or_fail(delivery, self._driver.state.reason, started)
        if self._may_be_going_down(delivery):
            await self._calls.wait(delivery, AWAY_SECONDS)
            return "waits"
        with gen_ai.engine_span(self._engine.name, delivery.name, call=delivery.run) as span:
            if span.recording:
                delivery.trace = span.traceparent
                step = msgspec.structs.replace(work.step, traceparent=delivery.trace)
                work = msgspec.structs.replace(work, step=step)
            outcome = await self._run(delivery, work)
            if isinstance(outcome, Value) and mapped is not None:
                outcome = await asyncio.to_thread(self._map_value, outcome.data, mapped, delivery.task)
            if isinstance(outcome, Error):
                span.failed(outcome.type, outcome.message)
        if isinstance(outcome, Error):
            return await self._settle_error(delivery, function, outcome, started, work.key)
        await self._calls.complete(delivery, outcome.data, started)
        self._ended(delivery, work.key)
        return "completed"

    async def _map_request(self, delivery: Delivery) -> MapRequest:
        """Return the map of a step, with its items. Raises InvalidInput."""
        mapped = MapRequest.from_json(delivery.data)
        if not mapped.is_large:
            return mapped
        return await asyncio.to_thread(mapped.loaded, self._gateway.results.blob_url)

    def _may_be_going_down(self, delivery: Delivery) -> bool:
        """Return whether the engine lost an earlier attempt on this connection within STEADY_SECONDS.

        A server that shuts down ends its steps before it stops listening. It would end the only redrive, too.
        """
        if self._engine.attaches:
            return False
        lost_at = max((error.at / 1000 for error in _errors(delivery) if error.type == ENGINE_LOST), default=0.0)
        return self._driver.connected_since <= lost_at and time.time() < lost_at + STEADY_SECONDS

    def _work(
        self, delivery: Delivery, function: EngineFunction, mapped: MapRequest | None, context: _EngineContext
    ) -> Work:
        """Return the work for the driver. Raises InvalidInput."""
        refusal = function.refusal(self._engine.name)
        if refusal:
            raise InvalidInput("engine", refusal)
        gateway = self._gateway
        arguments = delivery.data if mapped is None else msgspec.json.encode(mapped.arguments)
        registered = Registered(gateway.reference, gateway.folder, delivery.name, arguments)
        step = StepInfo(
            task=delivery.task,
            run=delivery.run,
            attempt=delivery.attempt,
            key=f"{delivery.task}/{delivery.run}",
            deadline=context.deadline,
            traceparent=context.traceparent,
        )
        work = function.work(registered, self._key(delivery), step)
        if mapped is None:
            return work
        over = function.item_argument(mapped.over, mapped.arguments.keys())
        call = Mapped(registered, over, msgspec.json.encode(mapped.listed), mapped.in_flight)
        return msgspec.structs.replace(work, call=call)

    def _key(self, delivery: Delivery) -> str:
        """Return the work's key. It changes when an attempt fails, so that the next one does not find the old work."""
        ended = sum(error.type != ENGINE_LOST for error in _errors(delivery))
        key = f"{self._bus.keys.namespace}/{delivery.task}/{delivery.run}"
        return f"{key}#{ended}" if ended else key

    async def _run(self, delivery: Delivery, work: Work) -> Outcome:
        try:
            begun = self._driver.begin(work, lambda value: self._calls.report(delivery, value))
        except ValueError as error:
            return Error("invalid", "InvalidInput", f"arguments: {error}", retryable=False)
        try:
            await asyncio.wait((begun.ended,))
        except asyncio.CancelledError as error:
            if STOPPED in error.args or not self._engine.attaches:
                await begun.stop()
                self._ended(delivery, work.key)
            else:
                begun.leave()
            raise
        return begun.ended.result()

    def _map_value(self, outcomes: bytes, mapped: MapRequest, task: str) -> Outcome:
        outcome = map_outcome(outcomes, mapped.return_exceptions)
        return self._gateway.kept(outcome.data, task) if isinstance(outcome, Value) else outcome

    async def _settle_error(
        self, delivery: Delivery, function: EngineFunction, error: Error, started: float, key: str = ""
    ) -> str:
        if error.cause == "away":
            return await self._wait_or_fail(delivery, error.message, started)
        # The texts of a driver, its engine or a function's class may have any length.
        failed = Failed(
            kept(error.type, LONGEST_TYPE),
            kept(error.message, LONGEST_MESSAGE),
            kept(error.traceback, LONGEST_TRACEBACK, end=True),
            retryable=error.retryable and error.cause != "invalid",
            retry_after_seconds=error.retry_after_seconds,
            # A function's own rejection is an answer, not a defect.
            rejected=error.cause == "function" and not error.retryable,
        )
        if error.cause == "lost":
            before = sum(each.type == ENGINE_LOST for each in _errors(delivery))
            failed.type = ENGINE_LOST
            failed.retryable = self._engine.redrives is None or before < self._engine.redrives
            failed.retry_after_seconds = 0.0
        again = await self._calls.fail(delivery, function.retry, failed, started)
        if error.cause != "lost":
            self._ended(delivery, key)
        if not again:
            return "failed"
        return "lost" if error.cause == "lost" else "retried"

    async def _wait_or_fail(self, delivery: Delivery, reason: str, started: float) -> str:
        """Wait for an absent engine as long as the task allows, on the broker and without counting an attempt."""
        # An engine that is being connected or started is not away yet.
        there = time.time() if self._driver.state.trying else self._gateway.connected_at
        since = max([there, *(error.at / 1000 for error in _errors(delivery))])
        left = wait_until(delivery.context, since) - time.time()
        if left <= 0:
            await self._calls.end(delivery, StepFailure(UNAVAILABLE, reason, at=time.time() * 1000), started)
            self._ended(delivery, "")
            return "unavailable"
        step = f"{delivery.task}/{delivery.run}"
        if step not in self._reported:
            if len(self._reported) >= MAX_REPORTED:
                self._reported.clear()
            self._reported.add(step)
            self._calls.report(delivery, msgspec.json.encode({"waiting": self._engine.name, "reason": reason}))
        await self._calls.wait(delivery, min(AWAY_SECONDS, left))
        return "waits"

    def _ended(self, delivery: Delivery, key: str) -> None:
        """Forget the step and the driver's work for it: nobody asks for it again."""
        self._reported.discard(f"{delivery.task}/{delivery.run}")
        if key:
            self._driver.forget(key)


def _errors(delivery: Delivery) -> list[StepFailure]:
    """Return the errors of earlier attempts."""
    return _ERRORS.decode(delivery.errors) if delivery.errors else []
