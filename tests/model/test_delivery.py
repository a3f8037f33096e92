"""The life of a delivery under every combination of a few faults, exhaustively. See docs/model.md."""

from __future__ import annotations

import pytest

from tests.model.delivery.guards import Guards
from tests.model.delivery.model import Delivery
from tests.model.delivery.scenarios import DROPPED, scenarios
from tests.model.search import search

DEPTH = 1
"""Faults in one history. `make model DEPTH=3` goes deeper."""


@pytest.mark.parametrize("name", scenarios(DEPTH))
def test_the_promises_hold(name: str) -> None:
    result = search(Delivery(scenarios(DEPTH)[name]))
    print(result)
    assert not result.broken, result


def test_the_promises_hold_under_two_faults() -> None:
    result = search(Delivery(scenarios(2)["a local step and two tools, 2 messages"]))
    print(result)
    assert not result.broken, result


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_guard_breaks_as_expected(name: str) -> None:
    dropped = DROPPED[name]
    result = search(Delivery(dropped.scenario._replace(guards=dropped.guards)))
    print(result)
    assert dropped.broken in result.broken, result
    assert bool(dropped.broken) == bool(result.broken), result


def test_every_guard_is_dropped_once_and_breaks_something() -> None:
    breaking = {
        guard
        for dropped in DROPPED.values()
        if dropped.broken
        for guard, kept in dropped.guards._asdict().items()
        if not kept
    }
    assert breaking == set(Guards._fields)


@pytest.mark.parametrize("name", [name for name, dropped in DROPPED.items() if dropped.broken])
def test_the_same_scenario_holds_with_all_guards(name: str) -> None:
    result = search(Delivery(DROPPED[name].scenario))
    print(result)
    assert not result.broken, result
