"""The watch over long handlers asks the broker little, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime_core.integrations.actors import watch
from runtime_core.integrations.actors.watch import CHECKS_MAX, Watch


class LongHandler:
    """A handler that has run for long."""

    began_at = float("-inf")
    key = "one"
    actor = SimpleNamespace(name="slow", interleave=False)


class EmptyMailboxes:
    """A host whose agents have no waiting messages. Counts the questions."""

    def __init__(self) -> None:
        self.asked = 0
        self.transport = self
        self.keys = SimpleNamespace(base="weft:{0}:")

    async def place(self, name: str, key: str) -> tuple[Any, None]:
        return self, None

    async def call(self, *command: object) -> None:
        self.asked += 1


async def test_one_check_reads_a_bounded_number_of_mailboxes_and_the_next_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "WAIT_SECONDS", 1000.0)
    handlers = [LongHandler() for _ in range(CHECKS_MAX + 5)]
    host = EmptyMailboxes()
    actors = SimpleNamespace(running=lambda: handlers)
    requests = SimpleNamespace(older_than=lambda seconds: [])
    looking = Watch(cast("Any", host), cast("Any", actors), cast("Any", requests))
    for asked in (CHECKS_MAX, CHECKS_MAX + 5, CHECKS_MAX + 5):
        await looking.check()
        assert host.asked == asked
