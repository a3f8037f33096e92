"""One server, kept connected for as long as the process lives: listed, listed again, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from runtime_core.declaration import one_line
from runtime_core.mcp.declared import MCPServer
from runtime_core.policy import RetryPolicy
from runtime_core.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from runtime_core.mcp.listing import Listing
    from runtime_core.mcp.session import Session

BACKOFF = RetryPolicy(base_seconds=0.5, factor=2.0, max_seconds=30.0, jitter=0.3)
"""Between the loss of a connection and the next try. A session that has served a call begins it anew."""
CLOSING_SECONDS = 8.0
"""How long a server may take to end; the SDK closes its stdin, then asks it to end, then kills it."""
SILENT_CALLS = 3
"""So many calls that passed their limit, one after the other, without any answer between: the server hangs."""

logger = logging.getLogger(__name__)


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
        await asyncio.to_thread(importlib.import_module, "runtime_core.mcp.tool")
        from runtime_core.mcp.session import Session

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
        from runtime_core.mcp.failures import cause_of

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
        from runtime_core.mcp.listing import listing_of

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
