"""The delivery model, for `search`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.delivery.actions import actions
from tests.model.delivery.faults import faults
from tests.model.delivery.invariants import broken
from tests.model.delivery.scenario import Scenario
from tests.model.delivery.state import State
from tests.model.search import Move


class Delivery:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def initial(self) -> State:
        return self.scenario.initial()

    def moves(self, state: State) -> Iterator[Move]:
        yield from actions(self.scenario, state)
        yield from faults(self.scenario, state)

    def broken(self, state: State, quiet: bool) -> str:
        return broken(self.scenario, state, quiet)
