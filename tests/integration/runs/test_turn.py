"""A turn that calls thousands of tools delays no other work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any  # Any: the arguments of the commit that the test counts

import pytest

from runtime_core.bus.commits import WIDE_PARTS
from runtime_core.bus.connection import RespTransport
from runtime_core.bus.event_bus import EventBus
from weft import AgentContext, App, SubmitOptions
from weft.testing import AppTest

COUNT_AT = 16
"""The place of the number of parts in the command of a commit."""
app = App("wide")


@app.tool
async def nothing() -> None:
    pass


@app.agent("wide")
async def wide(ctx: AgentContext, count: int) -> int:
    return len(await ctx.gather(*(ctx.tool("nothing") for _ in range(count))))


async def test_tool_handlers_move_calls_that_wait_before_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: set[str] = set()
    refill = EventBus.refill

    async def seen(bus: EventBus, count: int, streams: Sequence[str] = ()) -> int:
        moved.update(streams)
        return await refill(bus, count, streams)

    monkeypatch.setattr(EventBus, "refill", seen)
    async with AppTest(app) as test:
        bus = test.client.buses[0]
        await bus.transport.call("HSET", bus.keys.meta, "ready_max", 8)
        task = await test.client.submit("wide", 4_000, options=SubmitOptions(tenant="acme"))
        assert (await task.result(timeout=120)).value() == 4_000
    assert "tool" in moved


async def test_wide_commits_go_to_the_broker_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = {True: 0, False: 0}
    most = dict(under_way)
    call = RespTransport.call

    async def counted(transport: RespTransport, args: tuple[Any, ...]) -> object:
        is_wide = args[COUNT_AT] > WIDE_PARTS
        under_way[is_wide] += 1
        most[is_wide] = max(most[is_wide], under_way[is_wide])
        try:
            await asyncio.sleep(0.01)  # as a broker that is busy with it
            return await call(transport, *args)
        finally:
            under_way[is_wide] -= 1

    def seen(transport: RespTransport, *args: Any) -> Awaitable[object]:
        is_commit = args[0] == b"FCALL" and "commit_turn" in str(args[1])
        return counted(transport, args) if is_commit else call(transport, *args)

    monkeypatch.setattr(RespTransport, "call", seen)
    async with AppTest(app) as test:
        for count in (WIDE_PARTS + 1, 1):
            tasks = [await test.client.submit("wide", count) for _ in range(4)]
            assert [(await task.result(timeout=60)).value() for task in tasks] == [count] * 4
    assert most[True] == 1
    assert most[False] > 1
