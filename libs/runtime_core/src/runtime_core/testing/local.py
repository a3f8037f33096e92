"""An app in one process: `async with LocalApp(app) as client` submits tasks to it, and no server is needed.

Agents, tools, journals, retries, timers and mailboxes are the same as with the services, since the broker in memory
runs the same functions. What is not here: `weft:tasks`, `replyto` and the trajectory store, which are services' work.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from prometheus_client import CollectorRegistry

from runtime_core.admission import announce
from runtime_core.agents.turn_handler import TurnHandler
from runtime_core.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.memory.server import MemoryServer, MemoryTransport
from runtime_core.bus.transport import Transport
from runtime_core.client import Client
from runtime_core.consumer.consumer import Consumer
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.call import AbandonedThreads
from runtime_core.tools.call_handler import CallHandler

NAMESPACE = "local"
THREADS = 8


class LocalApp:
    """Runs an app until the `async with` ends, and gives a client of it. Raises ConfigurationError as `app.check()`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._server = MemoryServer()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="local tool")
        self._consumers: list[Consumer] = []
        self._running: list[asyncio.Task[None]] = []
        self._client = _MemoryClient(self._server)

    async def __aenter__(self) -> Client:
        self._app.check()
        metrics = Metrics(CollectorRegistry(), "local")
        turns, calls = self._bus(), self._bus()
        await turns.load_library()
        self._consumers = [
            Consumer(
                turns,
                _streams("agent", {agent.pool for agent in self._app.agents.values()}),
                TurnHandler(turns, self._app, metrics),
                metrics,
                service="agent-handler",
            ),
            Consumer(
                calls,
                _streams("tool", {tool.pool for tool in self._app.tools.values()}),
                CallHandler(calls, self._app, self._threads, AbandonedThreads(), metrics),
                metrics,
                service="tool-handler",
            ),
        ]
        for consumer in self._consumers:
            await consumer.start()
            self._running.append(asyncio.create_task(consumer.run()))
        await announce([turns], self._app.manifest())
        await self._client.open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
        for consumer in self._consumers:
            await consumer.stop()
        await asyncio.gather(*self._running)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _bus(self) -> EventBus:
        return EventBus(MemoryTransport(self._server), Keys(NAMESPACE, 0))


class _MemoryClient(Client):
    """A client whose connections lead to a broker in this process."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__("memory://", NAMESPACE, 1, "")
        self._server = server

    async def _open_transport(self, url: str, like: Transport | None = None) -> Transport:
        transport = MemoryTransport(self._server)
        self._transports.append(transport)
        return transport


def _streams(kind: str, pools: set[str]) -> list[str]:
    return [f"{kind}:{pool}" if pool else kind for pool in sorted(pools | {""})]
