"""The verbs for services, and cursors ahead of a record that has lost its last writes."""

from __future__ import annotations

import pytest

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.partition import Partition
from runtime_core.errors import Fenced, ServerError
from tests.unit.bus.scripted import Answer, ScriptedTransport


def bus_of(answer: Answer) -> tuple[EventBus, ScriptedTransport]:
    transport = ScriptedTransport(answer)
    return EventBus(transport, Keys("weft", 0), "me"), transport


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [("0-0", "0-0"), ("9-9", "9-9"), ("10-0", "10-0"), ("10", "10"), ("10-1", "0-0"), ("11-0", "0-0")],
)
async def test_a_cursor_ahead_of_the_record_starts_over(cursor: str, expected: str) -> None:
    """Entry ids are numbers: as text, `9-9` would be ahead of `10-0`."""
    bus, _ = bus_of(lambda *args: [b"length", 3, b"last-generated-id", b"10-0"])
    assert await bus.within_record(cursor) == expected


async def test_a_lost_record_is_created_again() -> None:
    gone = True

    def answer(*args: Argument) -> Reply:
        nonlocal gone
        if args[:2] == ("XGROUP", "CREATE"):
            gone = False
        elif gone:
            raise ServerError("ERR no such key" if args[0] == "XINFO" else "NOGROUP no such group")
        return None

    bus, transport = bus_of(answer)
    assert await bus.within_record("5-0") == "0-0"
    gone = True
    await bus.publish_cursor("state-manager", "5-0")
    assert transport.commands[-1] == ("XGROUP", "SETID", "weft:{0}:record", "state-manager", "5-0")
    assert not gone


async def test_another_error_of_the_record_is_raised() -> None:
    def answer(*args: Argument) -> Reply:
        raise ServerError("LOADING")

    bus, _ = bus_of(answer)
    for call in (bus.within_record("5-0"), bus.publish_cursor("state-manager", "5-0")):
        with pytest.raises(ServerError, match="LOADING"):
            await call


async def test_a_record_without_new_entries_is_empty() -> None:
    bus, transport = bus_of(lambda *args: None)
    assert await bus.read_record("5-0", 10) == []
    transport.answer = lambda *args: [[b"weft:{0}:record", [[b"6-0", [b"a", b"b"]], [b"7-0", None]]]]
    assert await bus.read_record("5-0", 10) == [(b"6-0", [b"a", b"b"])]


async def test_the_clock_of_a_partition_may_be_moved() -> None:
    def answer(*args: Argument) -> Reply:
        return [b"7", b"250999"] if args[0] == "TIME" else offset

    offset: bytes | None = None
    bus, _ = bus_of(answer)
    assert (await bus.time_ms(), await bus.clock_ms()) == (7250, 7250)
    offset = b"-250"
    assert (await bus.time_ms(), await bus.clock_ms()) == (7250, 7000)


async def test_timers_and_waiting_work_are_numbers() -> None:
    bus, transport = bus_of(lambda *args: [b"timer|a", b"1700000000000", b"timer|b", b"1.7e12"])
    assert await bus.timers() == [("timer|a", 1_700_000_000_000), ("timer|b", 1_700_000_000_000)]
    transport.answer = lambda *args: [3, -1, 12]
    assert (await bus.promote(), bus.queued) == ((3, -1), 12)
    transport.answer = lambda *args: 5
    assert (await bus.refill(128, ["tool"]), bus.queued) == (5, 5)


async def test_gateways_that_never_were_have_no_silence() -> None:
    bus, transport = bus_of(lambda *args: [0, -1, 5000, b"start one"])
    found = await bus.gateways("ray")
    assert (found.live, found.silent_seconds, found.now, found.problem) == (0, None, 5.0, "start one")
    transport.answer = lambda *args: [1, 0, 5000, b""]
    assert (await bus.gateways("ray")).silent_seconds == 0.0


async def test_a_process_that_does_not_lead_changes_nothing() -> None:
    bus, transport = bus_of(lambda *args: b"FENCED")
    with pytest.raises(Fenced, match="another state-manager leads"):
        await bus.schedule("nightly", "", b"{}", None)
    with pytest.raises(Fenced, match="me was declared dead"):
        await bus.expire_call(Delivery(0, "ray", b"1-1"), 0, b"{}", b"[]")
    transport.answer = lambda *args: b"SERVED"
    assert not await bus.expire_call(Delivery(0, "ray", b"1-1"), 0, b"{}", b"[]")
    transport.answer = lambda *args: b"OK"
    assert await bus.expire_call(Delivery(0, "ray", b"1-1"), 0, b"{}", b"[]")


def test_no_group_of_verbs_hides_a_verb_of_another() -> None:
    groups: dict[str, list[str]] = {}
    for base in EventBus.__bases__:
        assert issubclass(base, Partition)
        for group in base.__mro__[: base.__mro__.index(Partition)]:
            for name in vars(group):
                if not name.startswith("__") and group.__name__ not in groups.setdefault(name, []):
                    groups[name].append(group.__name__)
    shared = {name for name in groups if name in vars(Partition)}
    assert {name: owners for name, owners in groups.items() if len(owners) > 1 or name in shared} == {}
    assert len(groups) > 60
