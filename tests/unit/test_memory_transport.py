"""Clients of the in-process broker: order of calls, blocking reads without polling, time, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.memory.server import MemoryServer, MemoryTransport
from runtime_core.errors import BusUnavailable, ServerError


class Counted(MemoryServer):
    """Counts the commands that ran, so that a reader that polls is seen."""

    def __init__(self) -> None:
        self.commands_run = 0
        super().__init__(time_ms=self._tick)

    def _tick(self) -> int:
        self.commands_run += 1
        return 1_700_000_000_000 + self.commands_run


@pytest.fixture
def server() -> Counted:
    return Counted()


@pytest.fixture
async def client(server: Counted) -> AsyncIterator[MemoryTransport]:
    transport = MemoryTransport(server)
    yield transport
    await transport.close()


async def started(read: Awaitable[Reply]) -> asyncio.Future[Reply]:
    """A read that has come to its first wait."""
    task = asyncio.ensure_future(read)
    await asyncio.sleep(0)
    return task


def group_read(client: MemoryTransport, consumer: str, *options: Argument) -> Awaitable[Reply]:
    return client.blocking("XREADGROUP", "GROUP", "g", consumer, *options, "BLOCK", 0, "STREAMS", "s", ">")


def ids(reply: Reply) -> list[bytes]:
    """The entry ids of a reply about one stream."""
    assert isinstance(reply, list)
    (stream,) = reply
    assert isinstance(stream, list)
    entries = stream[1]
    assert isinstance(entries, list)
    found = [entry[0] for entry in entries if isinstance(entry, list)]
    return [entry_id for entry_id in found if isinstance(entry_id, bytes)]


def test_it_is_a_transport(server: Counted) -> None:
    transport: Transport = MemoryTransport(server)
    assert transport.reconnects == 0


async def test_calls_run_in_the_order_in_which_they_are_made(client: MemoryTransport) -> None:
    calls = [client.call("RPUSH", "l", n) for n in range(5)]
    assert await client.call("LRANGE", "l", 0, -1) == [b"0", b"1", b"2", b"3", b"4"]
    assert [await call for call in calls] == [1, 2, 3, 4, 5]


async def test_an_error_reply_is_raised_where_the_call_is_awaited(client: MemoryTransport) -> None:
    await client.call("SET", "k", "v")
    failed = client.call("HGET", "k", "f")
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await failed
    with pytest.raises(ServerError, match="NOGROUP"):
        await group_read(client, "c")


async def test_a_blocked_read_wakes_with_the_entry_and_does_not_poll(server: Counted, client: MemoryTransport) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    reading = await started(group_read(client, "c"))
    before = server.commands_run
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    assert server.commands_run == before
    await client.call("XADD", "s", "1-1", "a", "b")
    assert await asyncio.wait_for(reading, 60) == [[b"s", [[b"1-1", [b"a", b"b"]]]]]
    assert server.commands_run == before + 1
    assert await client.call("XPENDING", "s", "g") == [1, b"1-1", b"1-1", [[b"c", b"1"]]]


async def test_a_read_that_finds_data_does_not_wait(client: MemoryTransport) -> None:
    await client.call("XADD", "s", "1-1", "a", "b")
    assert ids(await client.blocking("XREAD", "BLOCK", 0, "STREAMS", "s", 0)) == [b"1-1"]
    assert await client.blocking("XREAD", "STREAMS", "s", "1-1") is None
    assert await client.blocking("GET", "missing") is None


async def test_the_last_id_is_the_one_at_the_time_of_the_call(client: MemoryTransport) -> None:
    await client.call("XADD", "s", "1-1", "a", "b")
    reading = await started(client.blocking("XREAD", "BLOCK", 0, "STREAMS", "other", "s", "$", "$"))
    await client.call("XADD", "s", "2-1", "a", "b")
    assert ids(await reading) == [b"2-1"]


async def test_a_read_gives_up_after_its_time(client: MemoryTransport) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    read = client.blocking("XREADGROUP", "GROUP", "g", "c", "BLOCK", 1, "STREAMS", "s", ">")
    assert await asyncio.wait_for(read, 60) is None
    await client.call("XADD", "s", "1-1", "a", "b")
    assert await client.call("XPENDING", "s", "g") == [0, None, None, None]


async def test_readers_of_a_group_are_served_in_the_order_of_their_calls(client: MemoryTransport) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    readings = [await started(group_read(client, f"c{n}", "COUNT", 1)) for n in range(3)]
    for n in range(1, 4):
        await client.call("XADD", "s", f"{n}-1", "a", "b")
    assert [ids(await reading) for reading in readings] == [[b"1-1"], [b"2-1"], [b"3-1"]]


async def test_one_entry_wakes_every_plain_reader(client: MemoryTransport) -> None:
    readings = [await started(client.blocking("XREAD", "BLOCK", 0, "STREAMS", "s", "$")) for _ in range(2)]
    await client.call("XADD", "s", "1-1", "a", "b")
    assert [ids(await reading) for reading in readings] == [[b"1-1"], [b"1-1"]]


async def test_nothing_is_delivered_to_a_cancelled_reader(client: MemoryTransport) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    gone = await started(group_read(client, "gone"))
    stays = await started(group_read(client, "stays"))
    gone.cancel()
    await client.call("XADD", "s", "1-1", "a", "b")
    assert ids(await stays) == [b"1-1"]
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await client.call("XPENDING", "s", "g") == [1, b"1-1", b"1-1", [[b"stays", b"1"]]]


async def test_a_script_wakes_readers_when_it_is_over(client: MemoryTransport) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    reading = await started(group_read(client, "c"))
    script = """
        redis.call('XADD', KEYS[1], '1-1', 'a', 'b')
        redis.call('XADD', KEYS[1], '2-1', 'a', 'b')
        redis.call('XDEL', KEYS[1], '1-1')
        return redis.call('NOSUCH')
    """
    with pytest.raises(ServerError, match="Unknown Redis command"):
        await client.call("EVAL", script, 1, "s")
    assert ids(await reading) == [b"2-1"]


@pytest.mark.parametrize("end", [("DEL", "s"), ("XGROUP", "DESTROY", "s", "g"), ("FLUSHALL",)])
async def test_a_reader_learns_that_its_group_is_gone(client: MemoryTransport, end: tuple[str, ...]) -> None:
    await client.call("XGROUP", "CREATE", "s", "g", 0, "MKSTREAM")
    reading = await started(group_read(client, "c"))
    await client.call(*end)
    with pytest.raises(ServerError, match="NOGROUP"):
        await asyncio.wait_for(reading, 60)


async def test_closing_ends_what_waits(server: Counted) -> None:
    client = MemoryTransport(server)
    reading = await started(client.blocking("XREAD", "BLOCK", 0, "STREAMS", "s", "$"))
    await client.close()
    with pytest.raises(BusUnavailable, match="closed"):
        await reading
    with pytest.raises(BusUnavailable, match="closed"):
        await client.call("PING")
    with pytest.raises(BusUnavailable, match="closed"):
        await client.blocking("PING")
    assert server.execute("XADD", "s", "1-1", "a", "b") == b"1-1"


def test_time_is_the_given_clock() -> None:
    now = 5_000
    server = MemoryServer(time_ms=lambda: now)
    assert server.execute("TIME") == [b"5", b"0"]
    assert server.execute("XADD", "s", "*", "a", "b") == b"5000-0"
    assert server.execute("XADD", "s", "*", "a", "b") == b"5000-1"
    server.execute("SET", "k", "v", "PX", 100)
    server.execute("XGROUP", "CREATE", "s", "g", 0)
    server.execute("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")
    now = 5_099
    assert server.execute("PTTL", "k") == 1
    now = 5_100
    assert server.execute("GET", "k") is None
    assert server.execute("XPENDING", "s", "g", "-", "+", 1) == [[b"5000-0", b"c", 100, 1]]
    assert server.execute("XCLAIM", "s", "g", "d", 101, "5000-0", "JUSTID") == []
    assert server.execute("XCLAIM", "s", "g", "d", 100, "5000-0", "JUSTID") == [b"5000-0"]


def test_ids_grow_when_the_clock_steps_back_and_after_deletes() -> None:
    now = 5_000
    server = MemoryServer(time_ms=lambda: now)
    server.execute("XADD", "s", "*", "a", "b")
    server.execute("XDEL", "s", "5000-0")
    now = 3_000
    assert server.execute("XADD", "s", "*", "a", "b") == b"5000-1"


def test_one_script_sees_one_time() -> None:
    ticks = iter(range(1, 100))
    server = MemoryServer(time_ms=lambda: next(ticks) * 1000)
    script = "local a = redis.call('TIME')[1] local b = redis.call('TIME')[1] return {a, b}"
    first = server.execute("EVAL", script, 0)
    assert isinstance(first, list)
    assert first[0] == first[1]


def test_a_flush_keeps_the_functions_unless_told() -> None:
    server = MemoryServer()
    server.execute("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function('f', function() return 7 end)")
    server.execute("SET", "k", "v")
    server.flush()
    assert server.execute("EXISTS", "k") == 0
    assert server.execute("FCALL", "f", 0) == 7
    server.flush(drop_functions=True)
    with pytest.raises(ServerError, match="Function not found"):
        server.execute("FCALL", "f", 0)


def test_deleting_in_front_and_in_the_middle_keeps_the_order() -> None:
    server = MemoryServer()
    kept = []
    for n in range(1, 4001):
        server.execute("XADD", "s", f"{n}-0", "a", "b")
        if n % 1000:
            server.execute("XDEL", "s", f"{n}-0")
        else:
            kept.append(b"%d-0" % n)
    for n in range(5000, 9000):
        server.execute("XADD", "s", f"{n}-0", "a", "b")
    for n in range(5000, 8999):
        server.execute("XDEL", "s", f"{n}-0")
    kept.append(b"8999-0")
    entries = server.execute("XRANGE", "s", "-", "+")
    assert isinstance(entries, list)
    assert [entry[0] for entry in entries if isinstance(entry, list)] == kept
    server.execute("XDEL", "s", *kept[:-1])
    assert server.execute("XINFO", "STREAM", "s")[13] == b"8999-0"  # type: ignore[index]  # a list


@pytest.mark.parametrize(
    "code",
    [
        "return python.eval('1')",
        "return os.time()",
        "return io.open('/etc/passwd')",
        "return require('os')",
        "return dofile('/etc/passwd')",
        "return loadstring('return os')()",
        "return debug.getregistry()",
        "return getfenv(1)",
        "return setmetatable(_G, {})",
        "return redis.call.__class__",
        "redis.call = nil",
        "rawset(_G, 'leak', 1)",
        "rawset(string, 'leak', 1)",
    ],
)
def test_scripts_reach_nothing_outside(code: str) -> None:
    with pytest.raises(ServerError):
        MemoryServer().execute("EVAL", code, 0)


def test_numbers_and_text_are_words_too() -> None:
    server = MemoryServer()
    server.execute("RPUSH", "l", 1, 1.5, "é", b"\xff", 1e20, -3, 2**53)
    assert server.execute("LRANGE", "l", 0, -1) == [
        b"1",
        b"1.5",
        "é".encode(),
        b"\xff",
        b"1e+20",
        b"-3",
        b"9007199254740992",
    ]


def test_a_fault_of_the_broker_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime_core.bus.memory.hashes import HashCommands

    def broken(*_: object) -> Reply:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(HashCommands, "hlen", broken)
    server = MemoryServer()
    with pytest.raises(ZeroDivisionError):
        server.execute("EVAL", "return redis.pcall('HLEN', 'h')", 0)
    assert server.execute("EVAL", "return 1", 0) == 1
