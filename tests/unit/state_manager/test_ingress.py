"""The ingress stream of a publisher as it is read, and what one of its commands keeps in memory."""

from __future__ import annotations

import gc
import weakref

from runtime_core.state_manager.ingress import MAX_ENTRY_BYTES, MAX_ID_AHEAD_MS, Command, IngressEntry, IngressStream
from tests.unit.bus.scripted import ScriptedTransport


class Fields(list[bytes]):
    """A list that weak references can follow."""


def test_a_refused_command_is_freed_at_once() -> None:
    """Services collect cycles rarely, and a command may hold megabytes."""
    fields = Fields([b"type", b"weft.task.submit", b"id", b"x", b"data", b"[" * 1000])
    kept = weakref.ref(fields)
    command = Command(b"1-0", fields)
    command.parse("weft", "")
    assert command.error is not None
    gc.disable()
    try:
        command.close()
        del command, fields
        assert kept() is None
    finally:
        gc.enable()


async def test_an_ingress_stream_is_read_after_an_entry() -> None:
    transport = ScriptedTransport(lambda *args: [[b"6-0", 0, [b"a", b"b"]], [b"7-0", 9_000_000, [b"a", b"head"]]])
    stream = IngressStream(transport, "weft", "shop")
    assert await stream.read(b"5-0", 10, 1000) == [
        IngressEntry(b"6-0", [b"a", b"b"]),
        IngressEntry(b"7-0", [b"a", b"head"], 9_000_000),
    ]
    [(_, _, _, key, start, *more)] = transport.commands
    assert (key, start) == (b"weft:tasks:shop", b"(5-0")
    assert more == [10, 1000, MAX_ENTRY_BYTES, MAX_ID_AHEAD_MS]
    await stream.read(b"", 10, 1000)
    assert transport.commands[-1][4] == b"-"
    await stream.remove(b"6-0")
    assert transport.commands[-1] == ("XDEL", "weft:tasks:shop", b"6-0")
