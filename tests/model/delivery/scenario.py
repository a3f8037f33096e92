"""A scenario of the delivery model: the senders and messages, and the possible faults with their number."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.delivery.guards import Guards
from tests.model.delivery.state import AGENT, FAN, Broker, Consumer, Fan, Instance, State

FAULTS = (
    "crash",
    "pause",
    "leave",
    "lost read",
    "lost commit",
    "failure",
    "lost group",
    "second submit",
    "second promoter",
)
"""Every fault but the loss of the broker's tail, which multiplies the states."""


class Scenario(NamedTuple):
    senders: tuple[tuple[str, ...], ...] = (("m1", "m2"),)
    faults: int = 1
    kinds: tuple[str, ...] = FAULTS
    fan: bool = True
    """Whether m1 does a local step and asks two tools."""
    forwards: bool = False
    """Whether agent X sends a message to agent Y for each that it handles."""
    poison: tuple[str, ...] = ()
    """Runs or calls that kill their process each time."""
    failing: tuple[str, ...] = ()
    """Runs or calls that fail until they are redriven."""
    redrives: int = 0
    check_flight: bool = True
    """Whether two events in flight are an error at once. Without it, the search finds what they lead to."""
    guards: Guards = Guards()

    @property
    def runs(self) -> tuple[str, ...]:
        sent = tuple(run for sender in self.senders for run in sender)
        return (*sent, *("y" + run[1:] for run in sent)) if self.forwards else sent

    def initial(self) -> State:
        broker = Broker(
            streams=((), ()),
            curs=("",) * len(self.runs),
            instances=(Instance(),) * (2 if self.forwards else 1),
            fan=Fan(),
            timers=(),
            letters=(),
            done=(),
            failed=(),
            reopened=(),
            sent=(0,) * len(self.senders),
        )
        return State(broker, (Consumer(), Consumer()), self.faults, self.redrives)

    def is_fan(self, stream: int, run: str) -> bool:
        return self.fan and stream == AGENT and run == FAN

    def fails(self, state: State, run: str) -> bool:
        return run in self.failing and run not in state.broker.reopened
