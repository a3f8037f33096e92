"""The stream on which a process gets answers, while its broker is down."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.bus import replies as replies_module
from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.replies import Replies
from tests.servers.process import Server

SECONDS = 60.0


async def test_answers_arrive_after_a_long_absence_of_the_broker(
    own_valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is down for longer than a write to it waits."""
    monkeypatch.setattr(replies_module, "KEEP_SECONDS", 0.05)
    gave_up = asyncio.Event()
    keep_stream = Replies._keep_stream

    async def keep(replies: Replies) -> None:
        try:
            await keep_stream(replies)
        except TimeoutError:
            gave_up.set()
            raise

    monkeypatch.setattr(Replies, "_keep_stream", keep)
    transports = [RespTransport(parse_address(own_valkey.url)) for _ in range(2)]
    for transport in transports:
        await transport.connect(SECONDS)
    bus = EventBus(transports[0], Keys(namespace, 0))
    replies = Replies(bus, "client", transports[1])
    replies.start()
    expected = replies.expect("t")
    try:
        async with asyncio.timeout(SECONDS):
            own_valkey.kill()
            await gave_up.wait()
            own_valkey.start()
            await bus.transport.call("HSET", bus.keys.task("t"), "out", "{}")
            assert (await expected).value == b"{}"
    finally:
        await replies.close()
        for transport in transports:
            await transport.close()
