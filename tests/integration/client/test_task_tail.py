"""Readers of one client that follow the same stream share a connection, and each has its own cursor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.client import task as task_module
from runtime_core.client.client import TaskHandle
from runtime_core.host.local import LocalApp
from weft import AgentContext, App, Client, StreamEvent, TaskOutput
from weft.errors import InvalidInput

app = App("streams")


@app.agent("counts")
async def counts(ctx: AgentContext, pieces: int) -> str:
    for number in range(pieces):
        await ctx.emit(f"{number} ")
    await ctx.human("go on?")
    await ctx.emit("last")
    return "done"


@app.agent("swells")
async def swells(ctx: AgentContext, pieces: int) -> str:
    """Emits small pieces, then large ones."""
    for number in range(pieces):
        await ctx.emit(str(number) * (1 if number < pieces / 2 else 1_000))
    return "done"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with LocalApp(app) as connected:
        yield connected


@pytest.fixture
def opened(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Transport]:
    """The connections that readers have opened; those that are closed are removed."""
    open_reader, close_reader = client.open_reader, client.close_reader
    connections: list[Transport] = []

    async def opening(bus: EventBus) -> Transport:
        reader = await open_reader(bus)
        connections.append(reader)
        return reader

    async def closing(reader: Transport) -> None:
        connections.remove(reader)
        await close_reader(reader)

    monkeypatch.setattr(client, "open_reader", opening)
    monkeypatch.setattr(client, "close_reader", closing)
    return connections


async def texts_of(task: TaskHandle, after: str = "0-0", answers: bool = False) -> list[str]:
    texts = []
    async with asyncio.timeout(60):
        async for event in task.stream(after):
            if event.request_id and answers:
                await event.answer(True)
            texts.append(event.text or event.type)
    return texts


def expected(pieces: int) -> list[str]:
    return [*(f"{number} " for number in range(pieces)), "weft.human.requested", "last", "weft.task.completed"]


async def test_a_thousand_readers_of_a_task_share_a_connection(client: Client, opened: list[Transport]) -> None:
    task = await client.submit("counts", 20, stream=True)
    seen = [0]

    async def read() -> list[str]:
        texts = []
        async for event in task.stream():
            texts.append(event.text or event.type)
            if event.request_id:
                seen[0] += 1
                if seen[0] == 1_000:
                    assert len(opened) == 1
                    await event.answer(True)
        return texts

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(read() for _ in range(1_000)))
    assert all(texts == expected(20) for texts in found)
    assert opened == []


async def test_each_reader_begins_at_its_own_cursor(client: Client) -> None:
    task = await client.submit("counts", 30, stream=True)
    first = task.stream()
    events = [await anext(first) for _ in range(31)]
    others = [asyncio.create_task(texts_of(task, event.entry_id)) for event in (events[4], events[29], events[30])]
    await asyncio.sleep(0)
    await events[30].answer(True)
    rest = [event.text or event.type async for event in first]
    assert [event.text or event.type for event in events] + rest == expected(30)
    assert await asyncio.gather(*others) == [expected(30)[5:], expected(30)[30:], expected(30)[31:]]
    assert await texts_of(task, events[10].entry_id) == expected(30)[11:], "also after the end"


async def test_a_slow_reader_loses_nothing_and_delays_no_other(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for readers is bounded; a reader that is further behind reads from the broker."""
    monkeypatch.setattr(task_module, "WINDOW_EVENTS", 7)
    task = await client.submit("counts", 500, stream=True)
    slow = task.stream()
    found = [(await anext(slow)).text]
    assert await texts_of(task, answers=True) == expected(500)
    (tail,) = client._tails._tails.values()
    assert len(tail._events) <= 7
    found += [event.text or event.type async for event in slow]
    assert found == expected(500)


async def test_readers_that_never_read_on_hold_little(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are small here: a page is one large piece, or some small ones."""
    monkeypatch.setattr(task_module, "WINDOW_EVENTS", 3)
    monkeypatch.setattr(task_module, "PAGE_BYTES", 2_000)
    transport = client.buses[0].transport
    call, reading, most, asked = transport.call, 0, 0, list[int]()

    async def counting(*command: Any) -> Any:
        nonlocal reading, most
        if command[0] != "XRANGE":
            return await call(*command)
        reading += 1
        most = max(most, reading)
        asked.append(command[-1])
        try:
            return await call(*command)
        finally:
            reading -= 1

    task = await client.submit("swells", 40, stream=True)
    whole = await texts_of(task)
    monkeypatch.setattr(transport, "call", counting)
    fast, behind = task.stream(), [task.stream() for _ in range(20)]
    async for event in fast:
        if len(event.text) > 1_000:
            break  # the window has passed what the others begin with
    pages, page = list[list[int]](), task_module.Tail._page

    async def noting(tail: task_module.Tail, *given: Any) -> list[StreamEvent]:
        found = await page(tail, *given)
        pages.append([len(event.text) for event in found])
        return found

    monkeypatch.setattr(task_module.Tail, "_page", noting)
    firsts = await asyncio.gather(*(anext(stream) for stream in behind))
    assert {event.text for event in firsts} == {whole[0]}
    for stream in behind:
        rest = [event.text or event.type async for event in stream]
        assert rest == whole[1:]
    assert 1 < most <= task_module.PAGES_AT_ONCE
    assert asked[0] == 1
    assert max(asked) >= 4, "more of small pieces"
    assert max(asked[-5:]) == 1, "one by one of large ones"
    assert all(sum(sizes[:-1]) <= 2_000 for sizes in pages), "readers keep no more"
    await fast.aclose()


async def test_a_reader_whose_entries_are_gone_continues_with_the_rest(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "WINDOW_EVENTS", 5)
    monkeypatch.setattr(task_module, "PAGE_ENTRIES", 4)
    task = await client.submit("counts", 40, stream=True)
    slow = task.stream()
    found = [(await anext(slow)).text for _ in range(4)]
    fast = task.stream()
    async for event in fast:
        if event.request_id:
            question = event
            break
    await client.buses[0].transport.call("XTRIM", client.buses[0].keys.out(task.task_id), "MAXLEN", 3)
    await question.answer(True)
    async with asyncio.timeout(60):
        found += [event.text or event.type async for event in slow]
    assert found[-3:] == expected(40)[-3:]
    assert found == [text for text in expected(40) if text in found], "in order, and nothing twice"
    await fast.aclose()


@pytest.mark.parametrize("first", [True, False])
async def test_a_reader_starts_over_if_the_broker_lost_its_last_writes(client: Client, first: bool) -> None:
    task = await client.submit("counts", 3, stream=True)
    other = task.stream()
    await anext(other)
    if first:
        await other.aclose()
    reading = asyncio.create_task(texts_of(task, "99999999999999-0", answers=True))
    assert await reading == expected(3)
    await other.aclose()


async def test_an_unreadable_stream_fails_for_every_reader(client: Client) -> None:
    task = await client.submit("counts", 1)
    with pytest.raises(InvalidInput, match="is not the `entry_id` of an event"):
        await anext(task.stream("yesterday"))
    await task.cancel()
    await task.delete()
    for reading in [asyncio.create_task(texts_of(task)) for _ in range(3)]:
        with pytest.raises(InvalidInput, match="there is no task"):
            await reading


async def test_the_output_of_a_task_that_streams_is_what_it_emitted(client: Client) -> None:
    task = await client.submit("counts", 2_000, stream=True)
    output, events = TaskOutput(), list[StreamEvent]()
    async for event in task.stream():
        events.append(event)
        output.add(event)
        if event.request_id:
            await event.answer(True)
    assert output.text == "".join(f"{number} " for number in range(2_000)) + "last"
    assert not any(output.add(event) for event in events)
