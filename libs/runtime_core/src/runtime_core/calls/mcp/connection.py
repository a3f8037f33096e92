"""Keeps an MCP server connected: one session at a time, with reconnects, and a fresh list of its tools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
from mcp import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    Tool,
    ToolAnnotations,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from runtime_core.base.periodic import cancel_and_wait
from runtime_core.base.text import counted
from runtime_core.calls.mcp.transport import NOT_SENT, streams_to
from runtime_core.declare.declaration import NAME, RetryPolicy, one_line
from runtime_core.declare.manifest import Schema, value_check
from runtime_core.declare.mcp_server import MCPServer
from runtime_core.errors import InvalidInput
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import kept


class BadSchema(Exception):
    """A schema that cannot be used for checks; the message says why."""


class ArgumentsCheck:
    """Decodes the arguments of one tool by their JSON schema."""

    __slots__ = ("_check",)

    def __init__(self, schema: Schema) -> None:
        """Raises BadSchema."""
        if schema.get("type") != "object":
            raise BadSchema(f"its type is {schema.get('type')!r}, not 'object'")
        try:
            self._check = value_check(schema)
        except InvalidInput as error:
            raise BadSchema(f"{error.field}: {error.message}" if error.field else error.message) from None

    def decode(self, data: bytes) -> dict[str, object]:
        """Decode and check arguments (a JSON object). Raises InvalidInput with the member, as in `arguments.path`."""
        try:
            value = msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise InvalidInput("arguments", f"cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise InvalidInput("arguments", "must be an object")
        self._check(value, "arguments")
        return value


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A checked tool of a server's list."""

    name: str
    """The name in the app: `<prefix>.<tool>`."""
    own_name: str
    """The server's name for it."""
    description: str
    arguments: Schema
    result: Schema | None
    repeatable: bool
    check: ArgumentsCheck = field(compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools that a server offers now."""

    tools: dict[str, ListedTool]
    """Tools by their name in the app."""
    left_out: tuple[str, ...]
    """One line per unusable tool."""


def listing_of(declared: MCPServer, tools: Iterable[Tool], taken: Collection[str] = ()) -> Listing:
    """Check a server's list. `taken` are names of the app's own tools, which take precedence."""
    usable: dict[str, ListedTool] = {}
    left_out: list[str] = []
    for tool in tools:
        if not declared.takes(tool.name):
            continue
        name = f"{declared.prefix}.{tool.name}"
        try:
            if not NAME.fullmatch(name):
                raise BadSchema("its name may contain only letters, digits, _ . and -, at most 128 with the prefix")
            if name in taken:
                raise BadSchema(f"the app itself declares a tool {name!r}")
            if name in usable:
                raise BadSchema("the server lists it twice")
            try:
                check = ArgumentsCheck(tool.input_schema)
            except BadSchema as error:
                raise BadSchema(f"its input schema is not valid, {error}") from None
        except BadSchema as error:
            left_out.append(f"{declared.what}: the tool {tool.name!r} is left out: {error}")
            continue
        usable[name] = ListedTool(
            name=name,
            own_name=tool.name,
            description=tool.description or tool.title or "",
            arguments=tool.input_schema,
            result=tool.output_schema,
            repeatable=may_repeat(declared, tool.name, tool.annotations),
            check=check,
        )
    return Listing(usable, tuple(left_out))


def may_repeat(declared: MCPServer, tool: str, annotations: ToolAnnotations | None) -> bool:
    """Return whether an attempt with an unknown outcome may be repeated.

    The app's declaration counts first. Otherwise a tool is repeatable if its server calls it read-only or idempotent.
    Without annotations it is neither, as the protocol defines.
    """
    allowed = declared.may_repeat(tool)
    if allowed is not None:
        return allowed
    return annotations is not None and bool(annotations.read_only_hint or annotations.idempotent_hint)


logger = logging.getLogger(__name__)

MAX_PAGES = 1_000
MAX_TOOLS = 1_000
"""The most tools that a server may list: to check and announce 100,000 takes longer than a lease."""
MAX_LIST_BYTES = 4 * 1024 * 1024
"""The most bytes of a server's list of tools. Most of them are schemas, and each is compiled."""
LISTEN_AGAIN_SECONDS = 1.0
Progress = Callable[[float, float | None, str | None], Awaitable[None]]
BACKOFF = RetryPolicy(base_seconds=0.5, factor=2.0, max_seconds=30.0, jitter=0.3)
"""Between the loss of a connection and the next attempt. A session that has served a call resets it."""
CLOSING_SECONDS = 8.0
"""How long a server may take to end: its stdin is closed, then it is terminated, then killed."""
SILENT_CALLS = 3
"""Consecutive calls over their limit after which the server counts as hung."""


class NotSent(Exception):
    """The server has not received the call; the session is unusable."""


class Lost(Exception):
    """The connection was lost or the server failed: the outcome of the call is unknown."""

    def __init__(self, message: str, *, broken: bool) -> None:
        super().__init__(message)
        self.broken = broken
        """Whether the session is unusable."""


class Refused(Exception):
    """The server has answered with an error, and would do so again."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


def failure_of(error: Exception) -> NotSent | Lost | Refused:
    """Classify an error of the SDK."""
    if isinstance(error, MCPError):
        return _failure_of_mcp(error)
    if isinstance(error, ValidationError | RuntimeError):
        # The answer violates the protocol or the tool's output schema.
        return Refused("InvalidResult", kept(" ".join(str(error).split()), 1000))
    return Lost(one_line(error), broken=True)


def _failure_of_mcp(error: MCPError) -> NotSent | Lost | Refused:
    code, message, data = error.error.code, error.error.message, error.error.data
    if isinstance(data, dict) and NOT_SENT in data:
        # Each HTTP request has its own connection, so the session stays usable.
        return NotSent(message) if data[NOT_SENT] else Lost(message, broken=False)
    if code == CONNECTION_CLOSED:
        return Lost(message, broken=True)
    if code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
        return Lost(message, broken=False)
    return Refused("MCPError", f"{message} (code {code})")


def cause_of(error: BaseException) -> BaseException:
    """Return the first plain error inside a group: why a connection ended."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class MCPSession:
    """One session with a server. One task opens and closes it; many use it.

    async with MCPSession(declared) as session:
        tools = await session.tools()
        …                                       # calls of other tasks
        await session.news.wait()               # `changed`: list again; `lost`: leave
    """

    def __init__(self, declared: MCPServer) -> None:
        self.news = asyncio.Event()
        """Set when `lost` or `changed` becomes True."""
        self.lost = False
        """Whether the connection is lost."""
        self.changed = False
        """Whether the server's tools have changed since the last list."""
        self.released = asyncio.Event()
        """Set once the next session may be opened."""
        self._declared = declared
        self.why = ""
        """Why the server lost the session, if it broke the protocol."""
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stack = AsyncExitStack()
        self._client = Client(
            streams_to(declared, self.lose),
            mode=declared.mode,
            # The list is requested when it has changed, so a cached one would be wrong.
            cache=None,
            message_handler=self._on_message,
        )
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect and negotiate the protocol. Raises the errors of SDK and transport."""
        await self._stack.enter_async_context(self._client)
        tools = self._client.server_capabilities.tools
        if tools is not None and tools.list_changed and self._client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            self._listening = asyncio.get_running_loop().create_task(self._listen(), name="listen to an MCP server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening is not None:
            await cancel_and_wait(self._listening)
        await self._stack.__aexit__(kind, error, trace)

    async def tools(self) -> list[Tool]:
        """Return all pages of the server's list. Raises MCPError."""
        found: list[Tool] = []
        size = 0
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            if len(found) > MAX_TOOLS:
                raise RuntimeError(f"it lists more than {MAX_TOOLS} tools")
            size += len(page.model_dump_json())
            if size > MAX_LIST_BYTES:
                raise RuntimeError(f"its list of tools is larger than {MAX_LIST_BYTES} bytes")
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise RuntimeError(f"its list of tools has more than {MAX_PAGES} pages")

    async def call(
        self, tool: str, arguments: dict[str, object], meta: dict[str, Any], on_progress: Progress
    ) -> CallToolResult:
        """Call a tool by the server's name. Cancellation cancels the request on the server.

        Raises NotSent, Lost or Refused if there is no result.
        """
        self._in_flight += 1
        self._idle.clear()
        try:
            # `meta` is the protocol's `_meta`, which may have members that the SDK's type lacks.
            return await self._client.call_tool(tool, arguments, progress_callback=on_progress, meta=meta)  # type: ignore[arg-type]
        except Exception as error:
            failure = failure_of(error)
            if isinstance(failure, Lost) and self.why:
                raise Lost(f"the connection was closed: {self.why}", broken=True) from error
            raise failure from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    def lose(self, why: str = "") -> None:
        """Mark this session as unusable, because the server broke the protocol if there is a reason."""
        self.why = self.why or why
        self.lost = True
        self.news.set()

    def change(self) -> None:
        """Mark the list of tools as changed."""
        self.changed = True
        self.news.set()

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.change()

    async def _listen(self) -> None:
        """Subscribe to changes, as the protocol of 2026-07-28 requires."""
        while not self.lost:
            try:
                async with self._client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self.change()
            except SubscriptionLost:
                pass
            except MCPError as error:
                if isinstance(failure_of(error), Refused):
                    logger.info(
                        "%s does not support subscriptions to changes of its tools: %s", self._declared.what, error
                    )
                    return
            except Exception as error:
                logger.warning("%s: cannot subscribe to changes of its tools: %s", self._declared.what, one_line(error))
                self.lose()
                return
            # Changes between two subscriptions are not reported: assume one.
            await asyncio.sleep(LISTEN_AGAIN_SECONDS)
            self.change()


class Connection:
    """Keeps a server connected, with one session after the other. Calls `on_tools` when its tools change."""

    def __init__(
        self, declared: MCPServer, metrics: Metrics, on_tools: Callable[[], None], taken: Collection[str] = ()
    ) -> None:
        self.declared = declared
        self.session: MCPSession | None = None
        """The current session; None while the server is unavailable."""
        self.listing: Listing | None = None
        """The last list of its tools; None before the first one."""
        self.trouble = "it has not been started yet"
        """Why there is no session."""
        self.tried = asyncio.Event()
        """Set after the first attempt to connect, successful or not."""
        self._metrics = metrics
        self._on_tools = on_tools
        self._taken = taken
        self._stopping = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._lives: set[asyncio.Task[None]] = set()
        self._next_try = 0.0
        self._silent = 0
        self._served = False
        metrics.mcp_server_up[declared.name].set(0)
        metrics.mcp_restarts[declared.name].inc(0)  # exports 0 from the start, so that a first loss is an increase

    def start(self) -> None:
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name=f"keep {self.declared.what}")

    async def stop(self) -> None:
        """End the session. A server that this process has started has ended when this returns."""
        self._stopping.set()
        if self.session is not None:
            self.session.lose()
            await asyncio.wait(self._lives, timeout=CLOSING_SECONDS)
        tasks = {*self._lives, *(() if self._keeping is None else (self._keeping,))}
        await cancel_and_wait(*tasks)

    def seconds_until_next_try(self) -> float:
        """Return the time until the next attempt to connect; 0 while connecting."""
        return max(0.0, self._next_try - time.monotonic())

    # -- reports of calls ----------------------------------------------------------------------------------------

    def answered(self) -> None:
        """Report that the server has answered a call."""
        self._silent = 0
        self._served = True

    def silent(self, session: MCPSession) -> None:
        """Report that a call exceeded its limit."""
        self._silent += 1
        if self._silent >= SILENT_CALLS:
            logger.warning("%s has not answered %d calls in a row: restarting it", self.declared.what, self._silent)
            self.lose(session)

    def lose(self, session: MCPSession) -> None:
        """Report that a session is unusable."""
        if self.session is session:
            self.session = None
        session.lose()

    # -- connecting ----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._served = False
            self._silent = 0
            session = MCPSession(self.declared)
            life = asyncio.get_running_loop().create_task(
                self._live(session), name=f"a session of {self.declared.what}"
            )
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)
            await session.released.wait()
            if self._stopping.is_set():
                return
            failures = 1 if self._served else failures + 1
            delay = BACKOFF.delay_seconds(failures, random.random)
            self._next_try = time.monotonic() + delay
            self._metrics.mcp_restarts[self.declared.name].inc()
            logger.warning("%s is unavailable, next try in %.2g s: %s", self.declared.what, delay, self.trouble)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _live(self, session: MCPSession) -> None:
        """Run one session from start to end."""
        self.trouble = "it is being connected"
        why = "the connection was closed"
        try:
            why = await self._opened(session)
        finally:
            if not session.released.is_set():
                self._down(session, why)

    async def _opened(self, session: MCPSession) -> str:
        """Open a session and keep it until it ends. Return why it ended."""
        connected = False
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self.declared.connect_seconds):
                        await stack.enter_async_context(session)
                        await self._list(session)
                except TimeoutError:
                    return f"it was not connected and listed within {self.declared.connect_seconds:g} s"
                connected = True
                self._up(session)
                await self._attend(session)
                if self.declared.url is not None and not self._stopping.is_set():
                    # Calls to a URL have their own connections and may still succeed, so the next session need not
                    # wait for them. A process serves one session at a time.
                    self._down(session, "the server is unreachable or has dropped the session")
                    await session.idle()
        except Exception as error:
            why = session.why or one_line(cause_of(error))
            return f"the connection broke, {why}" if connected else why
        if session.why:
            return session.why
        return "its process has ended" if self.declared.url is None else "the connection was closed"

    async def _attend(self, session: MCPSession) -> None:
        """Wait until the session is lost, and list its tools again whenever they change."""
        while not self._stopping.is_set():
            await session.news.wait()
            session.news.clear()
            if session.lost:
                return
            if session.changed:
                async with asyncio.timeout(self.declared.connect_seconds):
                    await self._list(session)

    async def _list(self, session: MCPSession) -> None:
        # Reset before listing: a change during the list needs another one.
        session.changed = False
        listing = listing_of(self.declared, await session.tools(), self._taken)
        before = self.listing
        for line in listing.left_out:
            if before is None or line not in before.left_out:
                logger.warning("%s", line)
        self.listing = listing
        if before is None or before.tools != listing.tools:
            self._on_tools()

    def _up(self, session: MCPSession) -> None:
        self.session = session
        self._next_try = 0.0
        self._metrics.mcp_server_up[self.declared.name].set(1)
        count = len(self.listing.tools) if self.listing is not None else 0
        logger.info("%s is connected: %s", self.declared.what, counted(count, "tool"))
        self.tried.set()

    def _down(self, session: MCPSession, why: str) -> None:
        self.trouble = why
        self.session = None
        session.released.set()
        self._metrics.mcp_server_up[self.declared.name].set(0)
        self.tried.set()
