"""The MCP servers of an app in one tool-handler: their tools for its calls, their names and schemas for the broker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.announcement import announce
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.mcp.connection import Connection
from runtime_core.tools.mcp.server import MCPServer, need_sdk
from runtime_core.tools.tool import Away, Tool

if TYPE_CHECKING:
    from runtime_core.tools.mcp.tool import MCPTool

SHORTEST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 5.0

logger = logging.getLogger(__name__)


class ToolOwners(Protocol):
    """Finds the declared server that a tool's name belongs to."""

    def mcp_server_of(self, tool: str, /) -> MCPServer | None: ...


class AppOfServers(Protocol):
    """What MCP servers need of the app that declares them."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def tools(self) -> Mapping[str, Tool]: ...

    @property
    def mcp_servers(self) -> Mapping[str, MCPServer]: ...

    @property
    def functions(self) -> ToolOwners: ...


class MCPServers:
    """Starts the servers of these pools, and serves their tools. A server that is away stops nothing else."""

    def __init__(self, app: AppOfServers, metrics: Metrics, pools: Sequence[str] | None = None) -> None:
        """`pools`: those whose calls this process takes; None: all.

        Raises ConfigurationError where the MCP SDK is not installed.
        """
        self._app = app
        self._metrics = metrics
        declared = [server for server in app.mcp_servers.values() if pools is None or server.pool in pools]
        need_sdk(declared)
        self._connections = [Connection(server, metrics, self._renew, app.tools) for server in declared]
        self._tools: dict[str, MCPTool] = {}
        self._by_server: dict[str, dict[str, MCPTool]] = {}
        self._unannounced: set[str] = set()
        self._on_change: Callable[[], None] = lambda: None

    async def start(self, on_change: Callable[[], None]) -> None:
        """Begin to connect, and return. `on_change` is called whenever there is something to announce."""
        self._on_change = on_change
        for connection in self._connections:
            connection.start()

    async def tried(self) -> None:
        """Wait until each server was tried once, and has listed its tools or not."""
        await asyncio.gather(*(connection.tried.wait() for connection in self._connections))

    async def stop(self) -> None:
        """End all sessions, and the processes of ours."""
        await asyncio.gather(*(connection.stop() for connection in self._connections))

    # -- for calls (`ToolSource`) --------------------------------------------------------------------------------

    def find(self, name: str) -> MCPTool | None:
        """The tool of this name, as its server has listed it last."""
        return self._tools.get(name)

    def away(self, name: str) -> Away | None:
        """Where the server that owns this name cannot be asked now: what is to be done with a call."""
        owner = self._app.functions.mcp_server_of(name)
        for connection in self._connections:
            if connection.declared is owner and connection.session is None:
                return _away(connection)
        return None

    # -- for the broker ------------------------------------------------------------------------------------------

    async def announce(self, buses: Sequence[EventBus]) -> None:
        """Publish what is new, and what the broker has lost. What another replica has published stands."""
        for name, tools in self._by_server.items():
            manifest = Manifest(
                f"{self._app.name}/mcp/{name}",
                self._app.version,
                tools={tool.name: tool.entry() for tool in tools.values()},
            )
            new = name in self._unannounced
            if not new and all([await _stored(bus, manifest.app) is not None for bus in buses]):
                continue
            self._unannounced.discard(name)
            try:
                await _forget_gone(buses, manifest)
                await announce(buses, manifest)
            except BaseException:
                self._unannounced.add(name)
                raise

    def _renew(self) -> None:
        from runtime_core.tools.mcp.tool import MCPTool

        for connection in self._connections:
            if connection.listing is None:
                continue
            name = connection.declared.name
            listed = connection.listing.tools
            before = self._by_server.get(name)
            now = {each.name: MCPTool(each, connection, self._metrics) for each in listed.values()}
            if before is None or {tool.name: tool.entry() for tool in before.values()} != {
                tool.name: tool.entry() for tool in now.values()
            }:
                self._unannounced.add(name)
            self._by_server[name] = now
        self._tools = {name: tool for tools in self._by_server.values() for name, tool in tools.items()}
        self._on_change()


def _away(connection: Connection) -> Away:
    server: MCPServer = connection.declared
    message = f"{server.what} is away: {connection.trouble}"
    if server.when_down == "fail":
        return Away(None, message)
    # Not all at once: others may have the server, and what waits here asks the broker each time.
    wait = connection.seconds_until_next_try() + SHORTEST_WAIT_SECONDS * (1.0 + random.random())
    return Away(min(LONGEST_WAIT_SECONDS, wait), message)


async def _stored(bus: EventBus, app: str) -> bytes | None:
    return cast("bytes | None", await bus.transport.call("HGET", bus.keys.manifests, app))


async def _forget_gone(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Take names from the broker that the server has no more: a call of them ends with a clear error."""
    for bus in buses:
        stored = await _stored(bus, manifest.app)
        if stored is None:
            continue
        try:
            gone = Manifest.from_json(stored).tools.keys() - manifest.tools.keys()
        except InvalidInput:
            continue  # a newer release's: it knows what is gone
        if gone:
            await bus.transport.call("HDEL", bus.keys.tools, *sorted(gone))
