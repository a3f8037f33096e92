"""Virtual time, chance and names for the product's code, for as long as one history runs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import runtime_core.bus.partition
import runtime_core.consumer.consumer
import runtime_core.consumer.heartbeat
import runtime_core.state_manager.ingress
import runtime_core.state_manager.keeper
import runtime_core.state_manager.measures
import runtime_core.state_manager.relay
import runtime_core.state_manager.scheduler
from runtime_core.bus.library import Library
from tests.simulation.loop import SimLoop
from tests.simulation.server import EPOCH_MS


async def _measure_nothing(measures: object) -> None:
    """Replaces values that only metrics need: a server's figures differ from run to run."""


@contextmanager
def virtual(
    loop: SimLoop, library: Library, *, seed: int | str, poll_seconds: float = 5.0, quiet: bool = True
) -> Iterator[None]:
    """Make `time`, `random` and owner names follow the history, and polls less frequent than in production.

    `poll_seconds` is how often schedulers poll.
    """
    chance = random.Random(f"names {seed}")
    owners = itertools.count(1)
    epoch = EPOCH_MS / 1000
    replaced: list[tuple[object, str, object]] = [
        (time, "time", lambda: epoch + loop.now),
        (time, "time_ns", lambda: EPOCH_MS * 1_000_000 + round(loop.now * 1e9)),
        (time, "monotonic", lambda: 1000.0 + loop.now),
        (time, "perf_counter", lambda: 1000.0 + loop.now),
        (secrets, "token_hex", lambda size=8: f"{chance.getrandbits(8 * size):0{2 * size}x}"),
        (runtime_core.consumer.heartbeat, "incarnation", lambda service: f"{service}#{next(owners)}"),
        (runtime_core.bus.partition, "library", lambda: library),
        (runtime_core.consumer.consumer, "PROMOTE_SECONDS", 1.0),
        (runtime_core.state_manager.relay, "POLL_SECONDS", 0.8),
        (runtime_core.state_manager.ingress, "POLL_MIN_SECONDS", 0.2),
        (runtime_core.state_manager.keeper, "TIDY_SECONDS", 2.0),
        (runtime_core.state_manager.scheduler, "POLL_SECONDS", poll_seconds),
        (runtime_core.state_manager.measures.Measures, "refresh", _measure_nothing),
    ]
    real = [getattr(owner, name) for owner, name, _ in replaced]
    state = random.getstate()
    random.seed(f"jitter {seed}")
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        if quiet:
            logging.disable(logging.CRITICAL)
        yield
    finally:
        logging.disable(logging.NOTSET)
        for (owner, name, _), value in zip(replaced, real, strict=True):
            setattr(owner, name, value)
        random.setstate(state)
        asyncio.set_event_loop(None)
