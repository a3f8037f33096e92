"""One connection to a server, shared by all calls until it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from mcp import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, Tool, ToolListChangedNotification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runtime_core.declaration import one_line
from runtime_core.mcp.declared import MCPServer
from runtime_core.mcp.failures import Refused, told
from runtime_core.mcp.streams import streams_to

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
