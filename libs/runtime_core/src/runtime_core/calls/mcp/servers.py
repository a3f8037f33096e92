"""The MCP servers of an app in one tool-handler: calls their tools, and announces these to the broker."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from mcp_types import CallToolResult, TextContent

from runtime_core.bus.event_bus import EventBus
from runtime_core.calls.mcp.connection import Connection, ListedTool, Lost, MCPSession, NotSent, Progress, Refused
from runtime_core.consumer.announcements import announce, read_manifest
from runtime_core.declare.manifest import Manifest, ToolEntry
from runtime_core.declare.mcp_server import MCPServer
from runtime_core.declare.schema import encode
from runtime_core.declare.tool import AbandonedThreads, Tool, ToolContext, ToolUnavailable, run_limited
from runtime_core.errors import InvalidInput, NotReady, Reject
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

IDEMPOTENCY_KEY = "dev.weft/idempotency-key"
TASK_ID = "dev.weft/task-id"
ATTEMPT = "dev.weft/attempt"
AWAY_MIN_SECONDS = 0.25
AWAY_MAX_SECONDS = 5.0


def value_of(result: CallToolResult) -> object:
    """Return structured content if there is any, or else the text, or else the parts of the content as JSON.

    A part is `{"type": "text" | "image" | "audio" | "resource" | "resource_link", …}`, as in MCP. No content is None.
    """
    if result.structured_content is not None:
        return result.structured_content
    if not result.content:
        return None
    if all(isinstance(part, TextContent) for part in result.content):
        return text_of(result)
    return [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in result.content]


def text_of(result: CallToolResult) -> str:
    """Return the text parts, joined by line breaks."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


class MCPTool:
    """A tool of a connected server."""

    def __init__(self, listed: ListedTool, connection: Connection, metrics: Metrics) -> None:
        self.name = listed.name
        self.what = f"tool {listed.name!r}"
        self.repeatable = listed.repeatable
        self.retry = connection.declared.retry
        self.counted_as, self.limits = connection.declared.limits_of(listed.own_name)
        self._listed = listed
        self._connection = connection
        self._count = functools.partial(_count, metrics, connection.declared.name)

    def entry(self) -> ToolEntry:
        """Return the tool's entry in the manifest."""
        return ToolEntry(
            arguments=self._listed.arguments,
            result=self._listed.result,
            pool=self._connection.declared.pool,
            description=self._listed.description,
            repeatable=self.repeatable,
        )

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the tool with `arguments` (a JSON object). Return its result as JSON.

        Raises InvalidInput (`arguments.…`, `result`), Reject with the server's error, NotReady if the server has not
        received the call. If that is unknown, raises TimeoutError or ConnectionError for a repeatable tool, otherwise
        Reject of type UnknownOutcome.
        """
        given = self._listed.check.decode(arguments)
        session = self._connection.session
        if session is None:
            raise NotReady(f"{self._connection.declared.what} is unavailable: {self._connection.trouble}")
        call = functools.partial(session.call, self._listed.own_name, given, _meta(context), _progress_to(context))
        try:
            result = await run_limited(self.what, self._connection.declared.timeout_seconds, call)
        except (TimeoutError, NotSent, Lost, Refused) as error:
            raise self._failure(error, session) from None
        except BaseException:
            context.cancel()
            self._count("cancelled")
            raise
        assert isinstance(result, CallToolResult)  # the session returns nothing else
        self._connection.answered()
        if result.is_error:
            self._count("error")
            # Not shortened here: redaction would not find the half of a key.
            raise Reject(text_of(result) or "the tool failed without a message", "ToolError")
        self._count("completed")
        return encode(value_of(result), "result")

    def _failure(self, error: TimeoutError | NotSent | Lost | Refused, session: MCPSession) -> Exception:
        """Report the error to the connection, and return the error of the attempt."""
        if isinstance(error, Refused):
            self._connection.answered()
            self._count("error")
            return Reject(str(error), error.type)
        if isinstance(error, NotSent):
            self._connection.lose(session)
            self._count("not_sent")
            return NotReady(f"{self._connection.declared.what}: {error}")
        if isinstance(error, TimeoutError):
            self._connection.silent(session)
            self._count("timeout")
            unclear: Exception = error
        else:
            if error.broken:
                self._connection.lose(session)
            self._count("lost")
            unclear = ConnectionError(f"{self.what}: {error}")
        if self.repeatable:
            return unclear
        return Reject(f"{unclear}; the tool is not repeatable: find out whether it took effect", "UnknownOutcome")


def _count(metrics: Metrics, server: str, outcome: str) -> None:
    metrics.mcp_calls[server, outcome].inc()


def _meta(context: ToolContext) -> dict[str, Any]:  # Any: the protocol's `_meta`
    meta: dict[str, Any] = {
        IDEMPOTENCY_KEY: context.idempotency_key,
        TASK_ID: context.task_id,
        ATTEMPT: context.attempt,
    }
    if context.traceparent:
        meta["traceparent"] = context.traceparent
    if context.tracestate:
        meta["tracestate"] = context.tracestate
    return meta


def _progress_to(context: ToolContext) -> Progress:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        data = {"progress": progress, "total": total, "message": message}
        context.progress({name: value for name, value in data.items() if value is not None})

    return report


class ToolOwners(Protocol):
    """Finds the declared server of a tool."""

    def mcp_server_of(self, tool: str, /) -> MCPServer | None: ...


class AppOfServers(Protocol):
    """The app's side that MCP servers need."""

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
    """Connects the servers of these pools and serves their tools. An unavailable server does not affect the others."""

    def __init__(self, app: AppOfServers, metrics: Metrics, pools: Sequence[str] | None = None) -> None:
        """`pools` are those whose calls this process handles; None: all."""
        self._app = app
        self._metrics = metrics
        declared = [server for server in app.mcp_servers.values() if pools is None or server.pool in pools]
        self._connections = [Connection(server, metrics, self._renew, app.tools) for server in declared]
        self._tools: dict[str, MCPTool] = {}
        self._by_server: dict[str, dict[str, MCPTool]] = {}
        self._unannounced: set[str] = set()
        self._on_change: Callable[[], None] = lambda: None

    async def start(self, on_change: Callable[[], None]) -> None:
        """Start connecting and return. Calls `on_change` whenever there is something to announce."""
        self._on_change = on_change
        for connection in self._connections:
            connection.start()

    async def tried(self) -> None:
        """Wait until the first attempt to connect each server has ended."""
        await asyncio.gather(*(connection.tried.wait() for connection in self._connections))

    async def stop(self) -> None:
        """End all sessions and the processes that were started for them."""
        await asyncio.gather(*(connection.stop() for connection in self._connections))

    # -- for calls (`ToolSource`) --------------------------------------------------------------------------------

    def find(self, name: str) -> MCPTool | None:
        """Return the tool of this name from its server's last list."""
        return self._tools.get(name)

    def away(self, name: str) -> ToolUnavailable | None:
        """Return how to treat a call if the tool's server is unavailable; None if it is available."""
        owner = self._app.functions.mcp_server_of(name)
        for connection in self._connections:
            if connection.declared is owner and connection.session is None:
                return _away(connection)
        return None

    # -- for the broker ------------------------------------------------------------------------------------------

    async def announce(self, buses: Sequence[EventBus]) -> None:
        """Publish new tools, and tools that the broker has lost. Keep what other replicas have published."""
        for name, tools in self._by_server.items():
            manifest = Manifest(
                f"{self._app.name}/mcp/{name}",
                self._app.version,
                tools={tool.name: tool.entry() for tool in tools.values()},
            )
            new = name in self._unannounced
            if not new and all([await read_manifest(bus, manifest.app) is not None for bus in buses]):
                continue
            self._unannounced.discard(name)
            try:
                await _forget_gone(buses, manifest)
                await announce(buses, manifest)
            except BaseException:
                self._unannounced.add(name)
                raise

    def _renew(self) -> None:
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


def _away(connection: Connection) -> ToolUnavailable:
    server: MCPServer = connection.declared
    message = f"{server.what} is unavailable: {connection.trouble}"
    if server.when_down == "fail":
        return ToolUnavailable(None, message)
    # With jitter: another replica may reach the server, and each retry is a command to the broker.
    wait = connection.seconds_until_next_try() + AWAY_MIN_SECONDS * (1.0 + random.random())
    return ToolUnavailable(min(AWAY_MAX_SECONDS, wait), message)


async def _forget_gone(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Remove tools that the server no longer has, so that calls of them end with a clear error."""
    for bus in buses:
        stored = await read_manifest(bus, manifest.app)
        if stored is None:
            continue
        try:
            gone = Manifest.from_json(stored).tools.keys() - manifest.tools.keys()
        except InvalidInput:
            continue  # written by a newer release, which removes them
        if gone:
            await bus.transport.call("HDEL", bus.keys.tools, *sorted(gone))
