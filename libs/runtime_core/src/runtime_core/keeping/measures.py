"""Measures the work streams of a partition."""

from __future__ import annotations

import time
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, group_of
from runtime_core.bus.transport import Reply
from runtime_core.errors import ServerError
from runtime_core.telemetry.metrics import Metrics


async def measure(bus: EventBus, metrics: Metrics) -> None:
    """Lag and pending of every work stream: all on it is work to do, so the lag is what is not pending."""
    call, keys = bus.transport.call, bus.keys
    streams = {name.decode() for name in cast(list[bytes], await call("HVALS", keys.agents))}
    streams |= {name.decode() for name in cast(list[bytes], await call("HVALS", keys.tools))}
    streams |= {name.decode() for name in cast(list[bytes], await call("HKEYS", keys.engines))}
    for stream in streams | set(GROUPS):
        length = cast(int, await call("XLEN", keys.stream(stream)))
        place = (stream, group_of(stream))
        pending, oldest = 0, 0.0
        try:
            summary = cast(list[Reply], await call("XPENDING", keys.stream(stream), group_of(stream)))
            pending = cast(int, summary[0])
            if summary[1] is not None:
                oldest = max(0.0, time.time() - int(cast(bytes, summary[1]).split(b"-")[0]) / 1000)
        except ServerError:
            if length == 0:
                continue  # a stream that this namespace has no use for
        metrics.stream_lag[place].set(max(0, length - pending))
        metrics.stream_pending[place].set(pending)
        metrics.stream_oldest_pending[place].set(oldest)
    metrics.timers_due[str(keys.partition)].set(
        cast(int, await call("ZCOUNT", keys.timers, "-inf", time.time_ns() // 1_000_000))
    )
