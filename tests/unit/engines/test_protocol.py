"""Messages between a gateway and its driver: whole, in order, and an end of the connection at anything else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from runtime_core.engines import protocol
from runtime_core.engines.protocol import Cancel, Ended, Error, Forget, Frames, Pickled, RunCall, ToDriver, Value, Work

Ends = tuple[Frames[ToDriver, ToDriver], Frames[ToDriver, ToDriver], asyncio.StreamWriter]


@asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    """Yield both ends of a connection, and the writer of the first one."""
    pair = socket.socketpair()
    (one_reader, one), (other_reader, other) = [await asyncio.open_unix_connection(sock=each) for each in pair]
    decoder = msgspec.msgpack.Decoder(ToDriver)
    try:
        yield Frames(one_reader, one, decoder), Frames(other_reader, other, decoder), one
    finally:
        for writer in (one, other):
            writer.close()


async def test_messages_arrive_whole_and_in_order() -> None:
    sent: list[ToDriver] = [RunCall(1, Work(Pickled(bytes(100_000)), "f")), Cancel(1), Forget("k")]
    async with connected() as (one, other, _), asyncio.timeout(60):
        for message in sent:
            one.send(message)
        receiving = asyncio.gather(*[asyncio.ensure_future(other.receive())])
        await one.sent()
        assert [*await receiving, await other.receive(), await other.receive()] == sent


async def test_the_end_of_a_connection_is_no_message() -> None:
    async with connected() as (one, other, writer), asyncio.timeout(60):
        writer.write(b"\x00\x00\x00\x09half")
        one.close()
        assert await other.receive() is None
        one.send(Cancel(1))  # it is lost


async def test_an_unreadable_message_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (_, other, writer), asyncio.timeout(60):
        writer.write(b"\x00\x00\x00\x01\xc1")
        assert await other.receive() is None
    assert "unreadable message" in caplog.text


async def test_a_message_that_is_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 100)
    async with connected() as (one, other, _), asyncio.timeout(60):
        with pytest.raises(ValueError, match="is too long: 100 are allowed"):
            one.send(Forget("k" * 101))
        one.send(Cancel(1))
        assert await other.receive() == Cancel(1)


def test_an_outcome_is_told_apart_from_an_error() -> None:
    for outcome in (Value(b"1"), Error("lost", "EngineLost", "gone", retryable=False, retry_after_seconds=1.5)):
        data = msgspec.msgpack.encode(Ended(7, outcome))
        assert msgspec.msgpack.decode(data, type=protocol.FromDriver) == Ended(7, outcome)
