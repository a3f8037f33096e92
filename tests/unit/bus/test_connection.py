"""Taking over a connection that redis-py has opened."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio.connection import Connection

from runtime_core.bus.connection import _Connection
from tests.servers.process import HOST


async def test_a_closed_connection_is_noticed_at_the_handover() -> None:
    """Nobody would notice it: only redis-py's reader is told once that the stream has ended."""
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        writer.close()
        await writer.wait_closed()
        gone.set()

    async with await asyncio.start_server(answer, HOST) as server:
        made = Connection(host=HOST, port=server.sockets[0].getsockname()[1], protocol=2, driver_info=None)
        await made.connect()
        await made.send_command("PING")
        assert await made.read_response() == b"PONG"
        await gone.wait()
        reader = made._reader
        assert reader is not None
        async with asyncio.timeout(60):
            while not reader.at_eof():
                await asyncio.sleep(0)
        with pytest.raises(ConnectionResetError):
            _Connection(made).abort()
