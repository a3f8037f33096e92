"""Ends engine steps that no gateway serves, after the wait that their tasks allow."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import msgspec

from runtime_core.bus.deliveries import Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.engines.runtime_engine import UNAVAILABLE, wait_until
from runtime_core.errors import InvalidInput
from runtime_core.record.step import ENCODER, Step, StepError
from runtime_core.wire.events import ENDED

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""The time between two checks in a process without a keeper."""
WARN_SECONDS = 60.0
STEPS_PAGE = 500
"""Steps of a stream per check; the next check continues behind them."""


class EngineWatch:
    """Checks one partition; its leader runs it. If a stream has a live gateway, that ends its steps."""

    def __init__(self, bus: EventBus, *, gateways_may_start: bool = True) -> None:
        """`gateways_may_start` is False in a process that is alone on its broker: then no step waits."""
        self._bus = bus
        self._gateways_may_start = gateways_may_start
        self._warned: dict[str, float] = {}
        self._read: dict[str, str] = {}
        """The last entry read of a stream that has more."""

    async def check(self) -> None:
        """Check all engine streams. Most namespaces have none."""
        now = time.monotonic()
        for stream in cast(list[bytes], await self._bus.transport.call("HKEYS", self._bus.keys.engines)):
            await self._check_stream(stream.decode(), now)

    async def _check_stream(self, stream: str, now: float) -> None:
        waiting = cast(int, await self._bus.transport.call("XLEN", self._bus.keys.stream(stream)))
        if not waiting:
            return
        gateways = await self._bus.gateways(stream)
        if gateways.live:
            return
        if now - self._warned.get(stream, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[stream] = now
            logger.warning("steps wait on %s (%d): %s", stream, waiting, gateways.problem)
        # If no gateway was ever seen, only the deadline in the step counts.
        away_since = 0.0 if gateways.silent_seconds is None else gateways.now - gateways.silent_seconds
        steps = await self._steps(stream)
        for step, status in zip(steps, await self._statuses(steps), strict=True):
            late = not self._gateways_may_start or wait_until(step.context, away_since) <= gateways.now
            # Steps of ended tasks stay here until they are ended too.
            if late or status is None or status.decode() in ENDED:
                await self._end(step, gateways.problem)

    async def _steps(self, stream: str) -> list[Delivery]:
        key, after = self._bus.keys.stream(stream), self._read.pop(stream, "")
        found = pairs(
            await self._bus.transport.call("XRANGE", key, f"({after}" if after else "-", "+", "COUNT", STEPS_PAGE)
        )
        if len(found) == STEPS_PAGE:
            self._read[stream] = found[-1][0].decode()
        steps = []
        for entry, fields in found:
            try:
                steps.append(Delivery(self._bus.keys.partition, stream, entry, fields))
            except InvalidInput:
                continue  # not written by the bus: the gateway that reads it dead-letters it
        return steps

    async def _statuses(self, steps: list[Delivery]) -> list[bytes | None]:
        call, keys = self._bus.transport.call, self._bus.keys
        return cast(
            list[bytes | None], await asyncio.gather(*(call("HGET", keys.task(step.task), "status") for step in steps))
        )

    async def _end(self, step: Delivery, reason: str) -> None:
        now = time.time() * 1000
        error = StepError(UNAVAILABLE, reason, at=now)
        put = float(step.entry.partition(b"-")[0])
        row = Step(step.run, step.stream.partition(":")[0], step.name, "failed", put, now)
        row.attempt = step.attempt
        row.input = msgspec.Raw(step.data)
        row.error = error
        row.owner = self._bus.owner
        if step.errors:
            row.errors = msgspec.json.decode(step.errors, type=list[StepError])
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        if await self._bus.expire_call(step, int(now), payload, ENCODER.encode([row])):
            logger.warning("%r ended: no gateway started in time", step)
