"""A handler service: one consumer per partition over one connection, with the user's app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Consumer, Handler
from runtime_core.consumer.progress import HEALTHY, Health
from runtime_core.declare.announcement import announce
from runtime_core.errors import ConfigurationError, ServerError, WeftError
from runtime_core.periodic import Periodic
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

FINISH_PART = 0.7
"""Of the time to stop, in which what runs may still end; the rest is for handing back."""
LET_GO_PART = 0.1
"""In which what is cancelled then may end."""
ANNOUNCE_SECONDS = 5.0
"""How often the manifest is published again: a flushed server gets it back by itself."""


class Worker:
    """The role of a handler service (see `runtime_core.host.service`)."""

    def __init__(self, settings: Settings, metrics: Metrics, service: str, streams: list[str], app: App) -> None:
        self.app = app
        self._settings = settings
        self._metrics = metrics
        self._service = service
        self._streams = streams
        self._buses: list[EventBus] = []
        self._transports: list[Transport] = []
        self._consumers: list[Consumer] = []
        self._announcing = Periodic("announce", ANNOUNCE_SECONDS, self._announce)
        self._worn_out: Callable[[], bool] = lambda: False
        self._at_start: list[Callable[[], Awaitable[None]]] = []
        self._at_leaving: list[Callable[[Sequence[EventBus]], Awaitable[None]]] = []
        self._at_stop: list[Callable[[], Awaitable[None]]] = []
        self._also_announced: list[Callable[[Sequence[EventBus]], Awaitable[None]]] = []

    @classmethod
    async def open(
        cls, settings: Settings, metrics: Metrics, *, service: str, stream: str, app: App | None = None
    ) -> Worker:
        """Load the app, unless one is given, and connect. Raises ConfigurationError in one line."""
        if app is None and settings.app is None:
            raise ConfigurationError("WEFT_APP is not set: name your app, as in WEFT_APP=package.module:app")
        app = app or _app_of(settings.app or "")
        streams = [f"{stream}:{pool}" if pool else stream for pool in (settings.pools or ("",))]
        worker = cls(settings, metrics, service, streams, app)
        if settings.redis_url is None:
            raise ConfigurationError("WEFT_REDIS_URL is not set: name a broker, or use `weft up`, which starts one")
        for number in range(settings.partitions):
            # A connection per partition: in a Cluster each may live on another server.
            transport = await connect(settings.redis_url)
            worker._transports.append(transport)
            keys = await open_namespace(transport, settings.namespace, settings.partitions)
            worker._buses.append(EventBus(transport, keys[number]))
        return worker

    @property
    def streams(self) -> list[str]:
        """The work streams that it reads."""
        return list(self._streams)

    def consume(
        self,
        handler: Callable[[EventBus], Handler],
        abandoned: Callable[[], bool] | None = None,
        *,
        in_flight: int | None = None,
        finish_seconds: float | None = None,
        let_go_seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        """Make the consumers; `abandoned` says whether this process has lost too many threads to go on.

        `in_flight` is of all partitions together; None: 256 of each. `finish_seconds`, `let_go_seconds` and
        `stall_seconds`: see Consumer.
        """
        if abandoned is not None:
            self._worn_out = abandoned
        for bus in self._buses:
            self._consumers.append(
                Consumer(
                    bus,
                    self._streams,
                    handler(bus),
                    self._metrics,
                    service=self._service,
                    lease_seconds=self._settings.lease_seconds,
                    in_flight=256 if in_flight is None else max(1, in_flight // len(self._buses)),
                    finish_seconds=finish_seconds,
                    let_go_seconds=let_go_seconds,
                    stall_seconds=stall_seconds,
                )
            )

    def at_start(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Begin something of the handlers' once they read; what it raises ends the start."""
        self._at_start.append(begin)

    def announce_also(self, publish: Callable[[Sequence[EventBus]], Awaitable[None]]) -> None:
        """Publish something besides the app's manifest, now and then and whenever `announce_now` is called."""
        self._also_announced.append(publish)

    def announce_now(self) -> None:
        """Do not wait for the next time."""
        self._announcing.trigger()

    def at_leaving(self, tell: Callable[[Sequence[EventBus]], Awaitable[None]]) -> None:
        """Tell others, before what runs is finished, that this process takes no more."""
        self._at_leaving.append(tell)

    def at_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close something of the handlers' after the last of them has stopped."""
        self._at_stop.append(close)

    async def start(self) -> None:
        for consumer in self._consumers:
            await consumer.start()
        # Read at each scrape: two writes for each delivery would be felt.
        self._metrics.in_flight.set_function(lambda: sum(consumer.held for consumer in self._consumers))
        self._metrics.show_owner(
            lambda: max(consumer.silent_seconds for consumer in self._consumers), self._settings.lease_seconds
        )
        self._metrics.stalled.set_function(lambda: max(consumer.stalled_seconds for consumer in self._consumers))
        for begin in self._at_start:
            await begin()
        await self._announce()
        self._announcing.start()

    async def run(self) -> None:
        """Work until `stop`; ends by itself where too many threads were abandoned, to be started anew."""
        runs = [asyncio.ensure_future(consumer.run()) for consumer in self._consumers]
        watch = asyncio.ensure_future(self._watch_threads())
        done, _ = await asyncio.wait((*runs, watch), return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        for ended in done:
            ended.result()

    async def stop(self) -> None:
        await self._announcing.stop()
        for tell in self._at_leaving:
            await tell(self._buses)
        await asyncio.gather(*(consumer.stop() for consumer in self._consumers))
        for close in self._at_stop:
            await close()
        for transport in self._transports:
            await transport.close()

    def ready(self) -> bool:
        return all(consumer.ready() for consumer in self._consumers)

    def progress(self) -> Health:
        for consumer in self._consumers:
            health = consumer.progress()
            if not health.ok:
                return health
        return HEALTHY

    async def _announce(self) -> None:
        try:
            await announce(self._buses, self.app.manifest())
        except ServerError as error:
            if not str(error).startswith("OOM"):
                raise
            # What was announced before is there, and work for it ends, which makes room.
            logger.warning("the broker's memory is full: what this app offers is announced when it has room")
        for publish in self._also_announced:
            await publish(self._buses)

    async def _watch_threads(self) -> None:
        while not self._worn_out():  # noqa: ASYNC110  # threads end where no event can be set for it
            await asyncio.sleep(1)
        raise WeftError("too many functions passed their limit and still hold threads: ending to be started anew")


def _app_of(reference: str) -> App:
    try:
        return load_app(reference)
    except ConfigurationError as error:
        raise ConfigurationError(f"WEFT_APP: {error}") from error
