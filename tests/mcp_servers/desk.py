"""A server whose tools behave well or badly: `python -m tests.mcp_servers.desk [port]`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from runtime_core.base.lazy import collect_seldom

if __name__ == "__main__":
    collect_seldom()  # before the imports below: they take most of this process's time

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

from tests.mcp_servers.ledger import note

server = MCPServer("desk")
READS = ToolAnnotations(read_only_hint=True)
IDEMPOTENT = ToolAnnotations(read_only_hint=False, idempotent_hint=True)
ONCE = ToolAnnotations(read_only_hint=False, idempotent_hint=False)


def saw(ctx: Context, event: str, **more: object) -> None:
    """Log an event of a call, with what the caller reports about itself."""
    meta = ctx.request_context.meta or {}
    note(
        event=event,
        key=meta.get("dev.weft/idempotency-key"),
        task=meta.get("dev.weft/task-id"),
        attempt=meta.get("dev.weft/attempt"),
        traceparent=meta.get("traceparent"),
        **more,
    )


async def lasts(ctx: Context, name: str, seconds: float) -> None:
    """Run for this long, and log whether it was cut short."""
    saw(ctx, "begun", name=name)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        saw(ctx, "cancelled", name=name)
        raise
    saw(ctx, "ended", name=name)


@server.tool(annotations=READS)
async def echo(ctx: Context, text: str, times: int = 1) -> dict[str, Any]:
    """Return a text."""
    saw(ctx, "echo")
    return {"text": text * times}


@server.tool(annotations=READS, structured_output=False)
async def say(text: str) -> str:
    """Return a text, as text."""
    return text


@server.tool(annotations=READS, structured_output=False)
async def nothing() -> None:
    """Return nothing."""


@server.tool(annotations=IDEMPOTENT)
async def slow(ctx: Context, name: str, seconds: float) -> dict[str, Any]:
    """Last, and do no harm when it is repeated."""
    await lasts(ctx, name, seconds)
    return {"name": name}


@server.tool(annotations=ONCE)
async def pay(ctx: Context, name: str, seconds: float = 0.0) -> dict[str, Any]:
    """Last, and do what must not be done twice."""
    await lasts(ctx, name, seconds)
    return {"paid": name}


@server.tool()
async def unmarked(ctx: Context) -> dict[str, Any]:
    """Say nothing of repeating it."""
    saw(ctx, "unmarked")
    return {}


@server.tool(annotations=READS)
async def counts(ctx: Context, to: int) -> dict[str, Any]:
    """Tell how far it is, in steps."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"step {number} ✓")
    return {"counted": to}


@server.tool(annotations=READS)
async def fails(ctx: Context, text: str) -> dict[str, Any]:
    """Answer with an error of its own."""
    saw(ctx, "fails")
    raise ToolError(text)


@server.tool(annotations=IDEMPOTENT)
async def dies_first(ctx: Context, marker: str) -> dict[str, Any]:
    """End the server's process, but only the first time."""
    saw(ctx, "dies_first")
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(3)
    return {"pid": os.getpid()}


@server.tool(annotations=ONCE)
async def dies(ctx: Context) -> dict[str, Any]:
    """End the server's process."""
    saw(ctx, "dies")
    os._exit(3)


@server.tool(annotations=READS)
async def large(size: int) -> dict[str, Any]:
    """Return a long text."""
    return {"text": "x" * size}


async def grown() -> dict[str, Any]:
    """A tool that was not there at first."""
    return {"grown": True}


@server.tool(annotations=IDEMPOTENT)
async def grow(ctx: Context) -> dict[str, Any]:
    """Add a tool, and tell of it in both ways of the protocol."""
    if "grown" not in [tool.name for tool in await server.list_tools()]:
        server.add_tool(grown, name="grown", annotations=READS)
    await changed(ctx)
    return {}


@server.tool(annotations=IDEMPOTENT)
async def shrink(ctx: Context) -> dict[str, Any]:
    """Take the tool away again."""
    if "grown" in [tool.name for tool in await server.list_tools()]:
        server.remove_tool("grown")
    await changed(ctx)
    return {}


async def changed(ctx: Context) -> None:
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()


def main() -> None:
    note(event="started")
    print("desk: ready to serve ✓", file=sys.stderr, flush=True)
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
    note(event="stopped")


if __name__ == "__main__":
    main()
