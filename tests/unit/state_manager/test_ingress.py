"""A command of the ingress stream: what it keeps in memory."""

from __future__ import annotations

import gc
import weakref

from runtime_core.state_manager.ingress import Command


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
