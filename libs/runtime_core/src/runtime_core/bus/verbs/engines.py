"""Verbs for engines: who serves them, and the end of a step for which nobody comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from runtime_core.bus.delivery import Delivery
from runtime_core.bus.values import Gateways
from runtime_core.bus.verbs.partition import Partition
from runtime_core.telemetry.redaction import redactor


class EngineVerbs(Partition):
    """Steps of an engine wait on its stream (`ray`, `spark:big`), also where no gateway serves it yet."""

    async def announce_engine(self, streams: Sequence[str]) -> None:
        """Say that this owner, a gateway, serves these streams; it counts while the owner lives.

        Said before the first step is taken, and again now and then: what a flushed server has lost comes back by it.
        """
        await self.call("announce_engine", self.owner, "1", *streams)

    async def withdraw_engine(self, streams: Sequence[str]) -> None:
        """Say that this owner takes no more steps of these streams."""
        await self.call("announce_engine", self.owner, "0", *streams)

    async def gateways(self, stream: str) -> Gateways:
        """Who serves a stream of an engine."""
        live, silent, now, nobody = cast(tuple[int, int, int, bytes], await self.call("gateways", stream))
        return Gateways(live, None if silent < 0 else silent / 1000, now / 1000, nobody.decode())

    async def expire_call(self, delivery: Delivery, now_ms: int, error: bytes, record: bytes) -> bool:
        """End a step that has waited too long for a gateway, with an error (JSON); `record` is its row.

        False where a gateway serves the stream or has the step in hand, and where it has ended already.
        """
        secrets = redactor()
        reply = await self.call(
            "expire_call", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, b"E", now_ms,
            secrets.data(error), secrets.data(record), 1, b"",
        )  # fmt: skip
        self._fence(reply)
        return reply == b"OK"
