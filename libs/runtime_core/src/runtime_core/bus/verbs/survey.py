"""The verb of whoever measures a partition: how many tasks are open, and what waits in mailboxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from runtime_core.bus.verbs.partition import Partition

LOOK_AGAIN = 50
"""Tasks, and mailboxes, whose counts one look puts right."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look has found; `next_task` and `next_mailbox` are where the next one puts counts right."""

    started: int
    """Tasks that were ever started."""
    open: int
    mail: int
    """Events in mailboxes; at least these where more than 1,000 mailboxes are deeper than 50."""
    deepest: int
    next_task: int = 0
    next_mailbox: int = 0


class SurveyVerbs(Partition):
    """A look at all tasks and mailboxes that costs the same however many there are."""

    async def survey(self, last: Survey | None) -> Survey:
        """`last` is what the look before has given."""
        begin = (0, 0) if last is None else (last.next_task, last.next_mailbox)
        return Survey(*cast(list[int], await self.call("survey", LOOK_AGAIN, *begin)))
