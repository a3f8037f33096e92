"""Watches engine steps without a gateway: they wait as long as their tasks allow, and then end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import Delivery, pairs
from runtime_core.engines.runtime_engine import UNAVAILABLE, wait_until
from runtime_core.errors import InvalidInput
from runtime_core.record.step import ENCODER, Step, StepError
from runtime_core.wire.results import ENDED

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The time between two checks, unless other housekeeping sets it."""
WARN_SECONDS = 60.0
PAGE = 500
"""How many steps of a stream one check reads; the next one continues behind them."""


class EngineWatch:
    """The watch of one partition, run by its leader. The gateways of a served stream end its steps."""

    def __init__(self, bus: EventBus, *, anyone_may_come: bool = True) -> None:
        """In a single process without a gateway, none can come, so no step waits."""
        self._bus = bus
        self._anyone_may_come = anyone_may_come
        self._warned: dict[str, float] = {}
        self._read: dict[str, str] = {}
        """The last entry that was read of a stream, if there were more."""

    async def look(self) -> None:
        """Check all streams; most namespaces have none."""
        now = time.monotonic()
        for stream in cast(list[bytes], await self._bus.transport.call("HKEYS", self._bus.keys.engines)):
            await self._look_at(stream.decode(), now)

    async def _look_at(self, stream: str, now: float) -> None:
        waiting = cast(int, await self._bus.transport.call("XLEN", self._bus.keys.stream(stream)))
        if not waiting:
            return
        gateways = await self._bus.gateways(stream)
        if gateways.live:
            return
        if now - self._warned.get(stream, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[stream] = now
            logger.warning("steps wait on %s (%d): %s", stream, waiting, gateways.nobody)
        # With none that was ever heard, the time that came with the step counts alone.
        away_since = 0.0 if gateways.silent_seconds is None else gateways.now - gateways.silent_seconds
        steps = await self._steps(stream)
        for step, status in zip(steps, await self._statuses(steps), strict=True):
            late = not self._anyone_may_come or wait_until(step.context, away_since) <= gateways.now
            # What a task that is over has asked for lies here until somebody takes it away.
            if late or status is None or status.decode() in ENDED:
                await self._end(step, gateways.nobody)

    async def _steps(self, stream: str) -> list[Delivery]:
        key, after = self._bus.keys.stream(stream), self._read.pop(stream, "")
        found = pairs(await self._bus.transport.call("XRANGE", key, f"({after}" if after else "-", "+", "COUNT", PAGE))
        if len(found) == PAGE:
            self._read[stream] = found[-1][0].decode()
        steps = []
        for entry, fields in found:
            try:
                steps.append(Delivery(self._bus.keys.partition, stream, entry).parse(fields))
            except InvalidInput:
                continue  # not the bus's own: who takes it makes it a dead letter
        return steps

    async def _statuses(self, steps: list[Delivery]) -> list[bytes | None]:
        call, keys = self._bus.transport.call, self._bus.keys
        return cast(
            list[bytes | None], await asyncio.gather(*(call("HGET", keys.task(step.task), "status") for step in steps))
        )

    async def _end(self, step: Delivery, nobody: str) -> None:
        now = time.time() * 1000
        error = StepError(UNAVAILABLE, nobody, at=now)
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
            logger.warning("%r has waited as long as it may", step)
