"""Where a task is among several partitions, and the end of submits that are always in the way of others."""

from __future__ import annotations

import json
from itertools import count

import pytest

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.keys import Keys
from runtime_core.bus.tasks import (
    SUBMIT_ATTEMPTS,
    OpenRequest,
    TaskVerbs,
    _fork_arguments,
    find_place,
    forget_place,
    home_of,
    submit_once,
)
from runtime_core.errors import Rejected
from runtime_core.wire.commands import ForkJournal, Submission
from runtime_core.wire.ids import partition_of
from tests.unit.bus.scripted import ScriptedTransport

TASK = next(f"task-{number}" for number in count() if partition_of(f"task-{number}", 3, "task_id") == 1)
"""A task that belongs to partition 1."""


class Side(ScriptedTransport):
    """One partition, and what it knows of tasks."""

    def __init__(self, number: int) -> None:
        super().__init__(self._answer)
        self.bus = TaskVerbs(self, Keys("weft", number))
        self.tasks: set[str] = set()
        self.places: dict[str, int] = {}

    def _answer(self, *args: Argument) -> Reply:
        keys = self.bus.keys
        match args:
            case ("HGET", key, "status"):
                return b"running" if str(key) in map(keys.task, self.tasks) else None
            case ("HGET", key, task):
                assert key == keys.places
                return str(self.places[str(task)]).encode() if str(task) in self.places else None
            case ("HDEL", key, task):
                assert key == keys.places
                del self.places[str(task)]
        return None


@pytest.fixture
def sides() -> list[Side]:
    return [Side(number) for number in range(3)]


async def place(sides: list[Side]) -> int:
    return (await find_place([side.bus for side in sides], TASK)).keys.partition


async def test_a_task_is_where_its_id_belongs_without_a_note(sides: list[Side]) -> None:
    assert home_of([side.bus for side in sides], TASK) is sides[1].bus
    sides[1].tasks.add(TASK)
    assert await place(sides) == 1
    assert sides[0].commands == sides[2].commands == [], "no other partition is asked"


async def test_a_note_says_where_a_task_is(sides: list[Side]) -> None:
    sides[1].places[TASK] = 2
    assert await place(sides) == 2
    await forget_place([side.bus for side in sides], TASK)
    assert sides[1].places == {}


async def test_a_task_of_a_message_is_looked_for_everywhere(sides: list[Side]) -> None:
    sides[0].tasks.add(TASK)
    assert await place(sides) == 0
    sides[0].tasks.clear()
    assert await place(sides) == 1, "no partition has it"


async def test_one_partition_is_not_asked() -> None:
    side = Side(0)
    assert await find_place([side.bus], TASK) is side.bus
    await forget_place([side.bus], TASK)
    assert side.commands == []


async def test_a_submit_that_never_gets_its_ids_is_asked_to_come_again(sides: list[Side]) -> None:
    """Its own claims are refused each time, as by a flood of equal submits."""
    asked: list[str] = []
    replies: dict[str, Reply] = {
        "claim": [b"ok", b"token"],
        "submit": [b"again", b"task_id", b"1", b"token"],
        "unclaim": 1,
    }

    def answer(*args: Argument) -> Reply:
        name = str(args[1], "ascii") if isinstance(args[1], bytes) else str(args[1])
        asked.append(name.partition("_")[2].partition("_")[2])
        return replies[asked[-1]]

    for side in sides:
        side.answer = answer
    with pytest.raises(Rejected) as refused:
        await submit_once([side.bus for side in sides], 0, 0, Submission(TASK, "s", "e", "d", "writer", b"1"))
    assert (refused.value.field, refused.value.retry_after_seconds) == ("overloaded", 1.0)
    assert asked == ["claim", "submit", "unclaim"] * SUBMIT_ATTEMPTS


def test_the_caller_of_an_ended_task_is_read_from_its_request() -> None:
    assert OpenRequest("@1:t|caller", 1, "t").caller == "caller"
    assert OpenRequest("t|r|2", 1, "t").caller == ""


def test_a_fork_begins_with_the_row_of_its_origin() -> None:
    origin, rows, started, *journal = _fork_arguments(ForkJournal("t", "2", {"1": b"a", "3": b"b"}, b'"new"', 5))
    assert json.loads(origin) == {"task": "t", "step": "2"}  # type: ignore[arg-type]  # bytes
    [row] = json.loads(rows)  # type: ignore[arg-type]  # bytes
    assert (row["kind"], row["input"]) == ("fork", {"task": "t", "step": "2", "result": "new"})
    assert (started, journal) == (5, ["1", b"a", "3", b"b"])
    _, rows, started, *journal = _fork_arguments(ForkJournal("t", ""))
    assert json.loads(rows)[0]["input"] == {"task": "t", "step": ""}  # type: ignore[arg-type]  # bytes
    assert (started, journal) == ("", [])
