"""Writes facts to the streams that users named with `replyto`: at least once, with the same event id."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from runtime_core.bus.connection import Argument, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.errors import ServerError, WeftError, is_temporary
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.envelope import Envelope, to_fields

logger = logging.getLogger(__name__)

UNDELIVERABLE = "undeliverable"
WRITE_SECONDS = 1.0
"""How long one answer may take: in a Cluster nobody may serve the slot of its stream, and the call waits for ever."""


class NotNow(WeftError):
    """An answer cannot be written at the moment."""


class Answers:
    """Appends facts to any key. One that can never be written (another type, no right) becomes a dead letter."""

    def __init__(self, edge: Transport, bus: EventBus, metrics: Metrics) -> None:
        """`edge` is a connection for keys of any slot; what cannot be delivered is kept in the partition of `bus`."""
        self._edge = edge
        self._bus = bus
        self._metrics = metrics

    async def write(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact`, or keep it as a dead letter where it can never be. Raises NotNow where it may be later."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._edge.call("XADD", reply_to, "*", *to_fields(fact))
        except TimeoutError:
            # A broker that is away says nothing about this stream: wait until it is back.
            await self._bus.transport.call("PING")
            raise NotNow(f"no answer within {WRITE_SECONDS:g} s") from None
        except (ServerError, UnicodeError) as error:
            if isinstance(error, ServerError) and is_temporary(error):
                raise NotNow(str(error)) from error
            logger.warning("replyto %r of task %s cannot be written: %s", reply_to, fact.taskid, error)
            await self.keep(reply_to, fact.taskid, error, fact.data)

    async def send(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact` as `write` does, or leave it to the relay of this partition, which tries again."""
        try:
            await self.write(reply_to, fact)
        except NotNow as error:
            logger.warning("replyto %r of task %s is tried again: %s", reply_to, fact.taskid, error)
            fields: list[Argument] = [
                "to", reply_to, "type", fact.type, "t", fact.taskid, "d", fact.data, "id", fact.causationid,
                "x", fact.traceparent, "e", fact.id,
            ]  # fmt: skip
            await self._bus.transport.call("XADD", self._bus.keys.replies, "*", *fields)

    async def keep(self, reply_to: str, task: str, error: Exception, data: bytes) -> None:
        """Keep an answer that is not written as a dead letter."""
        reason = msgspec.json.encode({"type": type(error).__name__, "message": str(error)})
        await self._bus.keep_letter((
            "reason", UNDELIVERABLE,
            "stream", reply_to.encode(errors="replace"), "group", STATE_MANAGER,
            "time", time.time_ns() // 1_000_000, "taskid", task, "error", reason, "errors", "[]", "d", data,
        ))  # fmt: skip
        self._metrics.dead_letters[UNDELIVERABLE].inc()
