"""At `maxmemory` new work is rejected, and open work can still end, which frees memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runtime_core.errors import ServerError
from runtime_core.state_manager.keeper import LetterSweeper
from tests.conftest import OwnServer
from tests.contracts.broker import (
    DIGEST,
    LEASE_MS,
    Broker,
    answer,
    ask,
    bury,
    complete,
    emit_pieces,
    fail,
    nap,
    question,
    suspend,
)
from tests.contracts.conftest import close_broker, open_broker, server_clients
from tests.servers.matrix import MATRIX, repeat_on


@pytest.fixture(params=repeat_on(*MATRIX))
async def broker(request: pytest.FixtureRequest, own_server: OwnServer, namespace: str) -> AsyncIterator[Broker]:
    """A server for this test alone: its memory limit is a setting of the whole server."""
    kind: str = request.param
    server = own_server(kind, append=None)
    broker = await open_broker(kind, namespace, server_clients(server.url))
    yield broker
    await close_broker(broker)


async def fill(broker: Broker) -> None:
    """Set a limit below the memory in use."""
    await broker.call("CONFIG", "SET", "maxmemory", "1mb")
    with pytest.raises(ServerError, match="OOM"):
        await broker.call("SET", f"{broker.keys.namespace}:more", "x")


async def test_new_work_is_refused_and_open_work_continues(broker: Broker) -> None:
    bus, other = await broker.owner(), await broker.owner()
    for task in ("waits", "ends", "fails", "again", "dies", "asks", "adopted", "cancelled", "sleeps"):
        await broker.submit(bus, task, key=task)
    turns = {}
    for _ in range(9):
        turn = await broker.take(bus)
        turns[turn.task] = turn
    await suspend(bus, turns["asks"], question("1"))
    await suspend(bus, turns["sleeps"], nap("1", 100))
    await broker.silence(bus)
    adopted = {turn.task: turn for turn in (await other.adopt("agent", 10, False)).deliveries}
    await fill(broker)

    for refused in (broker.submit(other, "new"), other.publish("m", "news", "", b"1"), other.redrive("1-1", False)):
        with pytest.raises(ServerError, match="OOM"):
            await refused
    assert await broker.status("new") == ""
    await other.beat(LEASE_MS, False, "")
    assert await other.lead("admit")
    assert await suspend(other, adopted["waits"], ask("1"))
    assert await answer(other, await broker.take(other, "tool"))
    assert await other.retry(adopted["again"], 100, b"{}")
    assert await complete(other, adopted["ends"], state=b"1")
    assert await fail(other, adopted["fails"])
    assert await bury(other, adopted["dies"])
    assert await other.cancel("cancelled", "no more") == ["cancelled"]
    assert not await complete(other, adopted["cancelled"])
    value = DIGEST.encode() + b"K1700000000000null"
    assert await other.record(adopted["adopted"], "1", value) == value
    assert await emit_pieces(other, adopted["adopted"], b'"text"', first=2)
    assert await complete(other, adopted["adopted"])
    await other.promote()
    assert await complete(other, await broker.take(other))
    assert await other.signal("asks", "r:1", b"1", "shop\ne1") == ["ok"], "an answer lets its task end"
    assert await complete(other, await broker.take(other))
    last = (await broker.entries("record"))[-1]["id"]
    for name in ("state-manager", "trajectory-recorder"):
        await other.publish_cursor(name, last)
    assert (await other.trim_record())[0] > 0
    letter = (await broker.entries("dead"))[0]["id"]
    refused_command = await other.keep_letter(["reason", "rejected", "stream", "tasks", "event:data", b"x" * 100_000])
    assert [entry["id"] for entry in await broker.entries("dead")] == [letter, refused_command]
    assert (await other.trim_letters(10_000, 10**12)).large == 1
    await other.recount_letters()
    assert await other.drop_letter(letter)
    assert await other.erase("dies") == "OK"
    await other.leave([])

    await broker.call("CONFIG", "SET", "maxmemory", "0")
    assert (await broker.submit(bus, "new")).started


async def test_dead_letters_take_a_small_part_of_a_small_server(broker: Broker) -> None:
    bus = await broker.owner()
    mib = 1024**2
    for memory, partitions, bound in (
        ("0", 1, 64 * mib),
        ("100mb", 1, 10 * mib),
        ("100mb", 2, 5 * mib),
        ("1mb", 1, 4 * mib),
    ):
        await broker.call("CONFIG", "SET", "maxmemory", memory)
        await LetterSweeper(bus, partitions=partitions).trim()
        assert await broker.call("HGET", broker.keys.meta, "dead_max") == str(bound).encode()
