"""The cost of one task, counted and compared with the bounds in `benchmarks/cost_ledger.toml`."""

from __future__ import annotations

import platform

import pytest

from benchmarks.cost_ledger import Bounds, Costs, measure


@pytest.mark.slow
async def test_the_cost_of_a_task_is_within_its_bounds() -> None:
    """`make ledger ARGS=agent_handler` lists the functions that a process calls."""
    found = Bounds.read().differences(await measure())
    assert not found, "\n".join(found)


VERSION = ".".join(platform.python_version_tuple()[:2])
BOUNDS = Bounds(VERSION, {"client": 100}, {"commands": 10, "bytes_in": 1000})


def _differences(calls: float, commands: float, size: float, *, python: str = VERSION) -> list[str]:
    bounds = Bounds(python, BOUNDS.calls, BOUNDS.broker)
    return bounds.differences(Costs({"client": calls}, {"commands": commands, "bytes_in": size}, {}, {}))


def test_counts_at_their_bounds_are_accepted() -> None:
    assert _differences(100, 10, 1000) == []
    assert _differences(85, 10, 800) == []


def test_a_count_above_its_bound_fails() -> None:
    assert _differences(112, 10, 1000) == ["calls.client is 112 per task, over its bound of 100: make the task cheaper"]
    assert _differences(100, 11, 1000) == [
        "broker.commands is 11 per task, over its bound of 10: make the task cheaper"
    ]
    assert _differences(100, 10, 1300) == [
        "broker.bytes_in is 1300 per task, over its bound of 1000: make the task cheaper"
    ]


def test_a_count_well_below_its_bound_lowers_it() -> None:
    assert _differences(70, 10, 1000) == ["calls.client is 70 per task, below its bound of 100: lower the bound"]
    assert _differences(100, 9, 1000) == ["broker.commands is 9 per task, below its bound of 10: lower the bound"]


def test_a_count_without_a_bound_fails() -> None:
    costs = Costs({"client": 100}, {"commands": 10, "bytes_in": 1000, "KEYS": 1}, {}, {})
    assert BOUNDS.differences(costs) == ["broker.KEYS is 1 per task, over its bound of 0: make the task cheaper"]


def test_calls_are_bounded_on_one_version_of_python_only() -> None:
    assert _differences(200, 10, 1000, python="2.7") == []
