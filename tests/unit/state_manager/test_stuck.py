"""Which runs, calls and slots are stuck, by what was read of a partition, and which runs wait in a circle."""

from __future__ import annotations

import pytest

from runtime_core.state_manager import stuck
from runtime_core.state_manager.stuck import Stuck, _children, _circles, _is_open, _stuck_run, _twice
from runtime_core.wire.ids import ROOT_RUN

FIELDS = {b"h": b"agent\nwriter\nkey"}
Runs = dict[tuple[str, str], dict[bytes, bytes]]


def missing(kind: str, step: str = "1") -> dict[bytes, bytes]:
    """A step without a result: eight digits of its request, and its kind."""
    return {f"m:{step}".encode(): b"0badf00d" + kind.encode()}


def found(
    fields: dict[bytes, bytes],
    *,
    runs: Runs | None = None,
    entries: set[tuple[str, str]] | None = None,
    driven: set[tuple[str, str]] | None = None,
    timers: set[str] | None = None,
) -> list[tuple[str, str, str]]:
    """Return what is stuck of the first run of a task, as (what, run, detail)."""
    whole = FIELDS | fields
    all_runs: Runs = {("t", ROOT_RUN): whole, **(runs or {})}
    found = _stuck_run(0, "t", ROOT_RUN, whole, all_runs, entries or set(), driven or set(), timers or set())
    assert {(each.partition, each.task) for each in found} <= {(0, "t")}
    return [(each.what, each.run, each.detail) for each in found]


def test_a_run_whose_entry_is_gone_is_stuck() -> None:
    assert found({b"cur": b"5-1"}) == [("run", "r", "5-1")]
    assert found({b"cur": b"5-1"}, entries={("agent", "5-1")}) == []
    assert found({b"cur": b"5-1"}, entries={("tool", "5-1")}) == [("run", "r", "5-1")]


@pytest.mark.parametrize("cur", ["retry", "slot"])
def test_a_run_whose_timer_or_slot_is_gone_is_stuck(cur: str) -> None:
    assert found({b"cur": cur.encode()}) == [("run", "r", cur)]
    assert found({b"cur": cur.encode()}, driven={("t", "r")}) == []


def test_a_run_that_waits_for_nothing_is_stuck() -> None:
    assert found({b"cur": b"held"}) == [("run", "r", "held")]
    assert found({b"cur": b"held"} | missing("h")) == []
    assert found({b"cur": b"mail"}) == []


@pytest.mark.parametrize("kind", ["h", "m", "k"])
def test_people_messages_and_keys_may_answer_at_any_time(kind: str) -> None:
    assert found({b"cur": b"held"} | missing(kind)) == []


@pytest.mark.parametrize("kind", ["t", "e"])
def test_a_call_that_nothing_drives_is_stuck(kind: str) -> None:
    waits = {b"cur": b"held"} | missing(kind)
    assert found(waits) == [("call", "r/1", "")]
    assert found(waits, driven={("t", "r/1")}) == []


def test_a_child_run_that_does_not_exist_is_stuck() -> None:
    waits = {b"cur": b"held"} | missing("a")
    assert found(waits) == [("call", "r/1", "")]
    assert found(waits, runs={("t", "r/1"): FIELDS}) == []
    assert found(waits | {b"k:r/1": b"@1:other"}) == [], "it runs in another partition"
    assert found(waits | {b"k:r/1": b"1"}) == [("call", "r/1", "")]


def test_a_sleep_without_its_timer_is_stuck() -> None:
    waits = {b"cur": b"held"} | missing("i")
    assert found(waits) == [("call", "r/1", "")]
    assert found(waits, timers={"s|t|r|1"}) == []


def test_a_slot_is_held_by_open_work_only() -> None:
    runs: Runs = {("t", "r"): missing("t"), ("t", "r/2"): missing("t", "3.0.1")}
    held = {path: _is_open(runs, "t", path) for path in ("r", "r/1", "r/9", "r/2/3.0.1", "r/2/1", "r/9/1")}
    assert held == {"r": True, "r/1": True, "r/9": False, "r/2/3.0.1": True, "r/2/1": False, "r/9/1": False}
    assert not _is_open(runs, "other", "r")


def test_what_is_stuck_is_named() -> None:
    texts = [str(Stuck(0, what, "t", "r/1", "d")) for what in ("run", "call", "instance", "slot", "mailbox")]
    assert texts == [
        "run r/1 of task t: its entry or timer (d) is missing",
        "step r/1 of task t: the call that would answer it is missing",
        "instance d is held by task t, which does not exist any more",
        "r/1 of task t has ended, but holds a slot of the limit d",
        "the mailbox of d holds events, but nothing will handle them",
    ]


async def test_work_that_has_moved_between_two_scans_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "PAUSE_SECONDS", 0.0)
    scans = [["a", "b", "c"], ["c", "d", "a"]]

    async def look() -> list[str]:
        return scans.pop(0)

    assert await _twice(look) == ["a", "c"]
    assert scans == []
    scans += [[], ["a"]]
    assert await _twice(look) == []
    assert scans == [["a"]], "one scan that finds nothing is enough"


def place(name: str) -> tuple[int, str, str]:
    return 0, name, ROOT_RUN


def circles(waits: dict[str, str]) -> list[str]:
    graph = {place(one): [place(other) for other in others] for one, others in waits.items()}
    return ["".join(task for _, task, _ in circle) for circle in _circles(graph)]


def test_circles_of_waits_are_found() -> None:
    assert circles({"a": "b", "b": "c", "c": ""}) == []
    assert circles({"a": "b", "b": "c", "c": "b"}) == ["bc"], "without what only leads to it"
    assert circles({"a": "a"}) == ["a"]
    assert circles({"a": "bc", "b": "d", "c": "d", "d": ""}) == [], "two ways to one run are no circle"
    assert sorted(circles({"a": "b", "b": "a", "c": "d", "d": "c"})) == ["ab", "cd"]


def test_a_long_chain_of_waits_is_no_recursion() -> None:
    chain = {place(str(number)): [place(str(number + 1))] for number in range(20_000)}
    assert _circles(chain) == []


def test_a_run_waits_for_its_children_in_any_partition() -> None:
    fields = missing("a", "1") | missing("a", "2") | missing("t", "3") | {b"k:r/2": b"@1:far"}
    runs = {place("t"): fields}
    assert _children(place("t"), fields, runs) == [(0, "t", "r/1"), (1, "far", ROOT_RUN)]
