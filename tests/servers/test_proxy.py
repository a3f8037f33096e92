"""The proxy breaks connections in the ways that its docstrings promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.servers.process import Server
from tests.servers.proxy import Proxy


class Line:
    """A connection that sends inline commands and reads one line per reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str) -> Line:
        return cls(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))

    def send(self, command: str) -> None:
        self.writer.write(f"{command}\r\n".encode())

    async def reply(self, seconds: float = 5.0) -> bytes:
        """The next line; empty when the connection is gone."""
        try:
            return (await asyncio.wait_for(self.reader.readline(), seconds)).strip()
        except ConnectionError:
            return b""

    async def ask(self, command: str) -> bytes:
        self.send(command)
        return await self.reply()

    def close(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def proxy(valkey: Server) -> AsyncIterator[Proxy]:
    async with Proxy(valkey.url) as proxy:
        yield proxy


@pytest.fixture
async def direct(valkey: Server) -> AsyncIterator[Line]:
    line = await Line.open(valkey.url)
    yield line
    line.close()


@pytest.fixture
async def line(proxy: Proxy) -> AsyncIterator[Line]:
    line = await Line.open(proxy.url)
    assert await line.ask("PING") == b"+PONG"
    yield line
    line.close()


async def test_a_cut_connection_fails_and_a_new_one_works(proxy: Proxy, line: Line) -> None:
    proxy.cut()
    assert await line.reply() == b""
    again = await Line.open(proxy.url)
    assert await again.ask("PING") == b"+PONG"
    assert proxy.accepted == 2
    again.close()


async def test_down_refuses_and_up_serves_the_same_port(proxy: Proxy, line: Line) -> None:
    url = proxy.url
    await proxy.down()
    assert await line.reply() == b""
    with pytest.raises(ConnectionRefusedError):
        await Line.open(url)
    await proxy.up()
    assert proxy.url == url
    again = await Line.open(url)
    assert await again.ask("PING") == b"+PONG"
    again.close()


async def test_a_lost_reply_means_that_the_server_did_it(
    proxy: Proxy, line: Line, direct: Line, namespace: str
) -> None:
    lost = proxy.lose_reply(b"INCR")
    assert await line.ask(f"INCR {namespace}") == b""
    await lost.wait()
    assert await direct.ask(f"INCR {namespace}") == b":2"


async def test_a_lost_request_means_that_the_server_did_nothing(
    proxy: Proxy, line: Line, direct: Line, namespace: str
) -> None:
    lost = proxy.lose_request(b"INCR")
    assert await line.ask(f"INCR {namespace}") == b""
    await lost.wait()
    assert await direct.ask(f"INCR {namespace}") == b":1"


async def test_a_marker_is_seen_across_two_pieces(proxy: Proxy, line: Line, namespace: str) -> None:
    lost = proxy.lose_request(b"INCR marked")
    line.writer.write(b"PING\r\nINCR mar")
    assert await line.reply() == b"+PONG"
    line.writer.write(b"ked\r\n")
    assert await line.reply() == b""
    await lost.wait()


async def test_a_loss_happens_once(proxy: Proxy, line: Line, namespace: str) -> None:
    proxy.lose_request(b"INCR")
    assert await line.ask(f"INCR {namespace}") == b""
    again = await Line.open(proxy.url)
    assert await again.ask(f"INCR {namespace}") == b":1"
    again.close()


async def test_swallowed_replies_are_lost_and_the_requests_are_not(
    proxy: Proxy, line: Line, direct: Line, namespace: str
) -> None:
    proxy.swallow_replies = True
    line.send(f"SET {namespace} 41")
    deadline = asyncio.get_running_loop().time() + 60
    while await direct.ask(f"STRLEN {namespace}") != b":2":
        assert asyncio.get_running_loop().time() < deadline
    with pytest.raises(TimeoutError):
        await line.reply(0.1)
    proxy.heal()
    assert await line.ask(f"INCR {namespace}") == b":42"


async def test_a_frozen_connection_is_silent_and_continues_when_healed(proxy: Proxy, line: Line) -> None:
    proxy.freeze()
    line.send("PING")
    with pytest.raises(TimeoutError):
        await line.reply(0.1)
    assert proxy.open_connections == 1
    proxy.heal()
    assert await line.reply() == b"+PONG"


async def test_a_delay_applies_in_both_directions(proxy: Proxy, line: Line) -> None:
    proxy.delay_seconds = 0.05
    began = asyncio.get_running_loop().time()
    assert await line.ask("PING") == b"+PONG"
    assert asyncio.get_running_loop().time() - began >= 0.1


async def test_pieces_are_delayed_together_and_stay_in_order(proxy: Proxy, line: Line) -> None:
    """Like a long line, and unlike a narrow one: the second request need not wait for the first reply."""
    proxy.delay_seconds = 0.2
    began = asyncio.get_running_loop().time()
    for number in range(5):
        line.send(f"ECHO {number}")
        with pytest.raises(TimeoutError):
            await line.reply(0.02)
    assert [await line.reply() for number in range(5) for _ in "lt"][1::2] == [b"0", b"1", b"2", b"3", b"4"]
    assert asyncio.get_running_loop().time() - began < 1.2


async def test_a_server_that_is_down_breaks_the_clients_connection(own_valkey: Server) -> None:
    async with Proxy(own_valkey.url) as proxy:
        line = await Line.open(proxy.url)
        assert await line.ask("PING") == b"+PONG"
        own_valkey.kill()
        assert await line.reply() == b""
        line.close()
        again = await Line.open(proxy.url)
        assert await again.reply() == b""
        again.close()
