"""Wires a gateway: the steps of one engine, and the driver process that is connected to it."""

from __future__ import annotations

import contextlib
import math
from functools import partial

from runtime_core.bus.event_bus import EventBus
from runtime_core.clusters.gateway import RAY, SPARK, Gateway, Served
from runtime_core.clusters.step_handler import StepHandler
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Handler
from runtime_core.errors import BusError
from runtime_core.host.apps import app_host, streams
from runtime_core.host.host import Host
from runtime_core.telemetry.metrics import Metrics

FINISH_PART = 0.3
"""The part of the time to stop in which steps may still end; the rest is for handing back and for the driver."""


async def build(engine: Served, settings: Settings, metrics: Metrics, *, backend: str = "") -> Host:
    """Wire a gateway; `backend`: see Gateway. Raises ConfigurationError in one line."""
    host, app, buses = await app_host(settings, metrics)
    gateway = Gateway(engine, app, settings, metrics, backend)
    served = streams(engine.name, settings.pools or ("",))

    def handler(bus: EventBus) -> Handler:
        return StepHandler(bus, gateway, metrics)

    async def announce() -> None:
        for bus in buses:
            await bus.announce_engine(served)

    async def withdraw() -> None:
        for bus in buses:
            with contextlib.suppress(BusError):
                await bus.withdraw_engine(served)

    host.add(start=gateway.start, stop=gateway.stop)
    host.consume(
        buses,
        served,
        handler,
        service=f"{engine.name}-gateway",
        in_flight=settings.engine_in_flight or engine.in_flight,
        finish_part=FINISH_PART,
        let_go_part=None,
        # A step may take hours. What hangs is the driver, which is watched by itself.
        stall_seconds=math.inf,
    )
    # Last, so that it stops first: others learn that this gateway takes no more before it finishes its steps.
    host.add(stop=withdraw)
    host.announce(announce)
    return host


build_ray = partial(build, RAY)
build_spark = partial(build, SPARK)
