"""The unanswered writes of turns and calls are bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.deliveries import Delivery, Journaled
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.settle import MAX_REPORTS_BYTES, Calls
from runtime_core.errors import BusUnavailable, LimitExceeded
from runtime_core.runs.commit import UNWAITED, TurnPort
from runtime_core.runs.output import BATCH_PIECES, PROCESS_BYTES, ROUND_PIECES, RUN_BYTES, Outflow, Piece
from runtime_core.telemetry.metrics import Metrics

HALF = b'"' + b"x" * 500_000 + b'"'


class SlowBus:
    """Accepts writes on request."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.written: list[bytes] = []
        self.error: Exception | None = None

    transport = SimpleNamespace(reconnects=0)
    alive_until = math.inf

    async def begin_turn(self, delivery: object, *, anyway: bool = False) -> Journaled:
        return Journaled([], called=False, emitted=False)

    async def write(self, *pieces: bytes) -> bool:
        self.written += pieces
        await self.taken.wait()
        if self.error is not None:
            raise self.error
        return True

    async def emit(
        self,
        delivery: object,
        branch: str,
        attempt: int,
        first: int,
        checksum: int,
        step: str,
        pieces: Sequence[bytes],
    ) -> bool:
        return await self.write(*pieces[1::2])

    async def record(self, delivery: object, step: str, value: bytes, kind: str, name: str) -> bytes:
        await self.write(b"")
        return value

    async def stream(self, delivery: object, step: str, attempt: int, pieces: Sequence[bytes]) -> bool:
        return await self.write(*pieces[1::2])

    async def progress(self, delivery: object, data: bytes) -> bool:
        return await self.write(data)


def port_on(bus: SlowBus, process: Outflow | None = None) -> TurnPort:
    delivery = cast(Delivery, SimpleNamespace(attempt=1))
    return TurnPort(cast(EventBus, bus), delivery, App("slow"), process=process)


def emit(port: TurnPort, data: bytes, number: int = 1, branch: str = "") -> None:
    port.emit(Piece(branch, 1, number, 0, str(number), data, chunk=False), {})


def waits_at(port: TurnPort) -> bool:
    """Whether an emit would wait now."""
    room = cast("Coroutine[None, None, None] | None", port.room())
    if room is None:
        return False
    room.close()
    return True


async def test_a_run_waits_while_much_of_its_output_is_unsent() -> None:
    bus = SlowBus()
    port = port_on(bus)
    count = 0
    while not waits_at(port) and count < 100:
        emit(port, HALF, count + 1)
        count += 1
    assert RUN_BYTES // len(HALF) <= count <= RUN_BYTES // len(HALF) + 1
    waits = asyncio.ensure_future(cast("asyncio.Future[None]", port.room()))
    await asyncio.sleep(0)
    assert not waits.done()
    bus.taken.set()
    await waits
    assert not waits_at(port)
    await port.flush()


async def test_runs_of_a_process_share_a_bound() -> None:
    bus, process = SlowBus(), Outflow(PROCESS_BYTES)
    ports = [port_on(bus, process) for _ in range(2 * PROCESS_BYTES // len(HALF))]
    for port in ports:
        if waits_at(port):
            break
        emit(port, HALF)
    assert PROCESS_BYTES < process.bytes <= PROCESS_BYTES + 2 * len(HALF)
    bus.taken.set()
    await asyncio.gather(*(port.flush() for port in ports))
    assert process.bytes == 0


async def test_unwaited_output_over_the_bound_is_refused_or_dropped() -> None:
    bus = SlowBus()
    port = port_on(bus)
    for _ in range(UNWAITED * RUN_BYTES // len(HALF) + 1):
        port.stream("1", 1, HALF)
    with pytest.raises(LimitExceeded, match="faster than the broker accepts it"):
        port.stream("1", 1, HALF)
    port.progress("1", b"0.5")
    bus.taken.set()
    await port.flush()
    assert b"0.5" not in bus.written


@pytest.mark.parametrize("error", [LimitExceeded("over"), BusUnavailable("closed")])
async def test_the_commit_learns_how_writes_failed(error: Exception) -> None:
    bus = SlowBus()
    bus.error = error
    bus.taken.set()
    port = port_on(bus)
    emit(port, b"1")
    for _ in range(5):
        await asyncio.sleep(0)  # the write ends before anybody asks
    with pytest.raises(type(error)):
        await port.flush()


async def test_the_next_emit_learns_that_the_output_is_full() -> None:
    bus = SlowBus()
    bus.error = LimitExceeded("over")
    bus.taken.set()
    port = port_on(bus)
    emit(port, b"1")
    with pytest.raises(LimitExceeded):
        await port.flush()
    waits = port.room()
    assert waits is not None
    with pytest.raises(LimitExceeded):
        await waits


async def test_only_the_latest_of_rapid_reports_is_sent() -> None:
    bus = SlowBus()
    calls = Calls(cast(EventBus, bus), Metrics(CollectorRegistry(), "tool-handler"), "tool")
    delivery = cast(Delivery, SimpleNamespace(stream="tool", entry=b"1-1"))
    large = b'"' + b"x" * 100_000 + b'"'
    for _ in range(100):
        calls.report(delivery, large)
    calls.report(delivery, b'"last"')
    await asyncio.sleep(0)
    assert sum(map(len, bus.written)) <= MAX_REPORTS_BYTES + len(large)
    bus.taken.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert bus.written[-1] == b'"last"'
    assert not calls._reports


async def test_pieces_share_one_write_while_another_is_unanswered() -> None:
    bus, writes = SlowBus(), list[int]()
    port = port_on(bus)

    async def emit_slowly(*args: object) -> bool:
        writes.append(len(cast("Sequence[bytes]", args[-1])) // 2)
        await asyncio.sleep(0)
        return True

    bus.emit = emit_slowly  # type: ignore[method-assign,assignment]  # counts the pieces of each write
    emit(port, b"1")
    for _ in range(3):
        await asyncio.sleep(0)
    for number in range(2, 2 + 2 * BATCH_PIECES):
        emit(port, b"1", number)
    await port.flush()
    assert writes == [1, BATCH_PIECES, BATCH_PIECES]


async def test_branches_that_emit_in_turns_do_not_wait_for_each_other() -> None:
    bus, process = SlowBus(), Outflow(PROCESS_BYTES)
    port = port_on(bus, process)
    for number in (1, 2):
        for branch in ("1.0.", "1.1.", "1.2."):
            emit(port, f'"{branch}{number}"'.encode(), number, branch)
    for _ in range(5):
        await asyncio.sleep(0)
    assert bus.written == [b'"1.0.1"', b'"1.1.1"', b'"1.2.1"'], "the second piece of a branch follows its first one"
    bus.taken.set()
    await port.flush()
    assert len(bus.written) == 6
    assert process.bytes == 0


async def test_an_agent_that_emits_endlessly_lets_others_run() -> None:
    bus = SlowBus()
    bus.taken.set()
    port = port_on(bus)
    for number in range(1, ROUND_PIECES):
        emit(port, b"1", number)
        assert port.room() is None
    emit(port, b"1", ROUND_PIECES)
    assert port.room() is not None
    assert port.room() is None
    await port.flush()


async def test_after_a_failed_write_no_later_piece_is_sent() -> None:
    """The broker takes what it gets: a later piece would leave a gap that a replay does not fill."""
    bus = SlowBus()
    bus.error = BusUnavailable("closed")
    bus.taken.set()
    process = Outflow(PROCESS_BYTES)
    port = port_on(bus, process)
    emit(port, b"1")
    for _ in range(5):
        await asyncio.sleep(0)
    bus.error = None
    emit(port, b"2", 2)
    waits = port.room()
    assert waits is not None
    with pytest.raises(BusUnavailable):
        await waits
    with pytest.raises(BusUnavailable):
        await port.flush()
    assert bus.written == [b"1"]
    assert process.bytes == 0


async def test_a_piece_added_at_the_end_of_the_last_write_is_sent() -> None:
    """The task that sends has looked for pieces for the last time, and its end is not noticed yet."""
    bus, written = SlowBus(), list[bytes]()
    port = port_on(bus)

    async def emit_beside(*args: object) -> bool:
        written.extend(cast("Sequence[bytes]", args[-1])[1::2])
        if len(written) == 1:
            asyncio.get_running_loop().call_soon(emit, port, b"2", 2)
        return True

    bus.emit = emit_beside  # type: ignore[method-assign,assignment]  # emits the second piece
    emit(port, b"1")
    for _ in range(5):
        await asyncio.sleep(0)
    await port.flush()
    assert written == [b"1", b"2"]
