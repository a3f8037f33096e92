"""Steps that actions and faults share."""

from __future__ import annotations

from tests.model.delivery.functions import Functions
from tests.model.delivery.scenario import Scenario
from tests.model.delivery.state import Consumer, State

NAMES = ("A", "B")
"""The consumers. A killed or stopped one is replaced at once, under the same letter."""


def functions(scenario: Scenario, state: State) -> Functions:
    return Functions(state.broker, scenario.runs, scenario.guards, fan=scenario.fan)


def with_consumer(state: State, number: int, consumer: Consumer) -> State:
    first, second = state.consumers
    return state._replace(consumers=(consumer, second) if number == 0 else (first, consumer))


def moved(state: State, call: Functions, number: int, consumer: Consumer) -> State:
    """The state after a consumer's call, and what the consumer then does."""
    return with_consumer(state, number, consumer)._replace(broker=call.freeze())
