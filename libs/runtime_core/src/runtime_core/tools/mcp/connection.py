"""A server that stays connected while the process lives: one session at a time, listed again when it is new."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mcp import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, Tool, ToolListChangedNotification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runtime_core.declare.declaration import one_line
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.mcp.failures import Refused, told
from runtime_core.tools.mcp.server import MCPServer
from runtime_core.tools.mcp.transport import streams_to

if TYPE_CHECKING:
    from runtime_core.tools.mcp.listing import Listing


MAX_PAGES = 1_000
LISTEN_AGAIN_SECONDS = 1.0

Progress = Callable[[float, float | None, str | None], Awaitable[None]]

logger = logging.getLogger(__name__)


class Session:
    """Opened and closed by one task, used by many.

    async with Session(declared) as session:
        tools = await session.tools()
        …                                       # calls of other tasks
        await session.news.wait()               # `changed`: list again; `lost`: leave
    """

    def __init__(self, declared: MCPServer) -> None:
        self.news = asyncio.Event()
        """Set where one of the next two is."""
        self.lost = False
        """Whether the other side is gone."""
        self.changed = False
        """Whether the server has other tools than were listed last."""
        self.released = asyncio.Event()
        """Set once the next session may be opened."""
        self._declared = declared
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stack = AsyncExitStack()
        self._client = Client(
            streams_to(declared, self.lose),
            mode=declared.mode,
            # A list is asked for when it has changed: a kept one would be the wrong one.
            cache=None,
            message_handler=self._on_message,
        )
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect and agree on a protocol. Raises whatever stands in the way."""
        await self._stack.enter_async_context(self._client)
        tools = self._client.server_capabilities.tools
        if tools is not None and tools.list_changed and self._client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            self._listening = asyncio.get_running_loop().create_task(self._listen(), name="listen to an MCP server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait((self._listening,))
        await self._stack.__aexit__(kind, error, trace)

    async def tools(self) -> list[Tool]:
        """All pages of the server's list. Raises MCPError."""
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise RuntimeError(f"its list of tools has more than {MAX_PAGES} pages")

    async def call(
        self, tool: str, arguments: dict[str, object], meta: dict[str, Any], on_progress: Progress
    ) -> CallToolResult:
        """Call a tool by the server's own name. Cancelling it cancels the request there.

        Raises NotSent, Lost or Refused where there is no result.
        """
        self._in_flight += 1
        self._idle.clear()
        try:
            # `meta` is the protocol's `_meta`: it may hold what the SDK's type does not name.
            return await self._client.call_tool(tool, arguments, progress_callback=on_progress, meta=meta)  # type: ignore[arg-type]
        except Exception as error:
            raise told(error) from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    def lose(self) -> None:
        """Say that this session is of no more use."""
        self.lost = True
        self.news.set()

    def change(self) -> None:
        """Say that the list of tools is not what it was."""
        self.changed = True
        self.news.set()

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.change()

    async def _listen(self) -> None:
        """Hear of changes, which the protocol of 2026-07-28 tells only to who has asked."""
        while not self.lost:
            try:
                async with self._client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self.change()
            except SubscriptionLost:
                pass
            except MCPError as error:
                if isinstance(told(error), Refused):
                    logger.info("%s tells of no changes of its tools: %s", self._declared.what, error)
                    return
            except Exception as error:
                logger.warning("%s: its changes cannot be heard: %s", self._declared.what, one_line(error))
                self.lose()
                return
            # What happened in between is not told again.
            await asyncio.sleep(LISTEN_AGAIN_SECONDS)
            self.change()


BACKOFF = RetryPolicy(base_seconds=0.5, factor=2.0, max_seconds=30.0, jitter=0.3)
"""Between the loss of a connection and the next try. A session that has served a call begins it again."""
CLOSING_SECONDS = 8.0
"""How long a server may take to end; the SDK closes its stdin, then asks it to end, then kills it."""
SILENT_CALLS = 3
"""So many calls that passed their limit, one after the other, without any answer between: the server hangs."""


class Connection:
    """Keeps one session after the other with a server. `on_tools` is called when its tools are others than before."""

    def __init__(
        self, declared: MCPServer, metrics: Metrics, on_tools: Callable[[], None], taken: Collection[str] = ()
    ) -> None:
        self.declared = declared
        self.session: Session | None = None
        """What calls go to; None while the server is away."""
        self.listing: Listing | None = None
        """Its tools, as they were listed last; None before the first time."""
        self.trouble = "it has not been started yet"
        """Why there is no session."""
        self.tried = asyncio.Event()
        """Set once the first try has ended, well or not."""
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
        metrics.mcp_restarts[declared.name].inc(0)  # shown from the start, so that a first loss is an increase

    def start(self) -> None:
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name=f"keep {self.declared.what}")

    async def stop(self) -> None:
        """End the session; a server that is a process of ours has ended when this returns."""
        self._stopping.set()
        if self.session is not None:
            self.session.lose()
            await asyncio.wait(self._lives, timeout=CLOSING_SECONDS)
        tasks = {*self._lives, *(() if self._keeping is None else (self._keeping,))}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def seconds_until_next_try(self) -> float:
        """At least this long there will be no session; 0 while it is being connected."""
        return max(0.0, self._next_try - time.monotonic())

    # -- what calls tell -----------------------------------------------------------------------------------------

    def answered(self) -> None:
        """A call was answered: the server works."""
        self._silent = 0
        self._served = True

    def silent(self, session: Session) -> None:
        """A call passed its limit."""
        self._silent += 1
        if self._silent >= SILENT_CALLS:
            logger.warning("%s has not answered %d calls in a row: restarting it", self.declared.what, self._silent)
            self.lose(session)

    def lose(self, session: Session) -> None:
        """A call has found that the session is of no more use."""
        if self.session is session:
            self.session = None
        session.lose()

    # -- keeping -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        # In a thread, since it takes a second: the loop that sends the heartbeat goes on.
        await asyncio.to_thread(importlib.import_module, "runtime_core.tools.mcp.listing")

        failures = 0
        while not self._stopping.is_set():
            self._served = False
            self._silent = 0
            session = Session(self.declared)
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
            logger.warning("%s is away, next try in %.2g s: %s", self.declared.what, delay, self.trouble)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _live(self, session: Session) -> None:
        """One session, from its start to its end."""
        self.trouble = "it is being connected"
        why = "the connection was closed"
        try:
            why = await self._opened(session)
        finally:
            if not session.released.is_set():
                self._down(session, why)

    async def _opened(self, session: Session) -> str:
        """Returns why it ended."""
        from runtime_core.tools.mcp.failures import cause_of

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
                    # What is in flight to a URL may end well, each on a connection of its own; the next session need
                    # not wait for it. Of a process there is one at a time.
                    self._down(session, "it cannot be reached, or has forgotten the session")
                    await session.idle()
        except Exception as error:
            why = one_line(cause_of(error))
            return f"the connection broke, {why}" if connected else why
        return "its process has ended" if self.declared.url is None else "the connection was closed"

    async def _attend(self, session: Session) -> None:
        """Wait until the session is lost; list its tools again whenever they change."""
        while not self._stopping.is_set():
            await session.news.wait()
            session.news.clear()
            if session.lost:
                return
            if session.changed:
                async with asyncio.timeout(self.declared.connect_seconds):
                    await self._list(session)

    async def _list(self, session: Session) -> None:
        from runtime_core.tools.mcp.listing import listing_of

        # First: a change in the middle of the list is one more change.
        session.changed = False
        listing = listing_of(self.declared, await session.tools(), self._taken)
        before = self.listing
        for line in listing.left_out:
            if before is None or line not in before.left_out:
                logger.warning("%s", line)
        self.listing = listing
        if before is None or before.tools != listing.tools:
            self._on_tools()

    def _up(self, session: Session) -> None:
        self.session = session
        self._next_try = 0.0
        self._metrics.mcp_server_up[self.declared.name].set(1)
        count = len(self.listing.tools) if self.listing is not None else 0
        logger.info("%s is connected: %d tools", self.declared.what, count)
        self.tried.set()

    def _down(self, session: Session, why: str) -> None:
        self.trouble = why
        self.session = None
        session.released.set()
        self._metrics.mcp_server_up[self.declared.name].set(0)
        self.tried.set()
