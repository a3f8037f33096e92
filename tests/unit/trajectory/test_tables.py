"""Steps as rows and back, bad entries, and what a batch adds to the sums of usage."""

from __future__ import annotations

import msgspec
import pytest

from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.spans import RESPONSE_MODEL
from runtime_core.trajectory.tables import (
    FORMAT,
    STEPS,
    TASK_MAX,
    RecordEntry,
    check_format,
    day_of,
    end_of,
    entry_order,
    rows_of,
    step_of,
    tenant_of,
    usage_changes,
    usage_report,
)
from runtime_core.wire.contents import Contents
from runtime_core.wire.step import ENCODER, Step, StepFailure, TaskEnd

ENDED_MS = 1_793_491_200_000.0
DAY = "2026-11-01"


def step(path: str = "", **changes: object) -> Step:
    plain = Step(run="r", step=path, kind="tool", name="search", status="completed", started=1.5, ended=2.25)
    return msgspec.structs.replace(plain, **changes)


def end(task: str = "t", **changes: object) -> TaskEnd:
    return msgspec.structs.replace(TaskEnd(task, "completed", "a", 1, ENDED_MS - 10, ENDED_MS), **changes)


def entry(*steps: Step, task: str = "t", entry_id: str = "7-0", ends: TaskEnd | None = None) -> RecordEntry:
    return RecordEntry(entry_id, task, ENCODER.encode(steps) if steps else b"", ends)


def test_only_tables_of_this_release_are_used() -> None:
    check_format(FORMAT)
    for other in (FORMAT - 1, FORMAT + 1):
        with pytest.raises(ConfigurationError, match=f"has format {other}, but this release reads {FORMAT}"):
            check_format(other)


def test_entries_are_ordered_by_their_numbers() -> None:
    assert sorted(["10-0", "9-9", "9-10", "9"], key=entry_order) == ["9", "9-9", "9-10", "10-0"]
    with pytest.raises(InvalidInput, match=r"^entry_id: 'new' is not a stream entry id"):
        entry_order("new")


def test_a_step_is_the_same_after_its_row() -> None:
    whole = step(
        "2.0.1",
        attempt=3,
        key="k",
        status="failed",
        input=msgspec.Raw(b'{ "a" : 1e999 }'),
        error=StepFailure("ValueError", "no", "trace", 4.5),
        errors=[StepFailure("OSError", "first", at=1.0)],
        usage={"tokens": 12.0},
        attributes={"x": 1},
        cause="e-1",
        owner="o",
    )
    rows = rows_of("weft", 0, [entry(whole, step())])
    assert len(rows.steps[0]) == len(STEPS.columns)
    assert [step_of(row, Contents()) for row in rows.steps] == [
        msgspec.structs.replace(whole, committed=7.0),
        step(committed=7.0),
    ]
    assert rows.unreadable == rows.uses == rows.forks == []


def test_an_end_is_the_same_after_its_row() -> None:
    ended = end(error=StepFailure("E", "no"), session="s")
    assert [end_of(row) for row in rows_of("weft", 0, [entry(ends=ended)]).tasks] == [ended]


def test_nul_is_replaced_wherever_a_text_may_have_it() -> None:
    """PostgreSQL refuses it in a text."""
    named = step(name="a\0b", input=msgspec.Raw(b'"\\u0000"'))
    rows = rows_of("weft", 0, [entry(named, task="t\0", ends=end("t\0", session="s\0"))])
    texts = [value for row in (*rows.steps, *rows.tasks) for value in row if isinstance(value, str)]
    assert rows.unreadable == []
    assert not any("\0" in each for each in texts)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (RecordEntry("7-0", "t", b"[{", end()), "truncated"),
        (RecordEntry("7-0", "t", b'[{"run": 1}]', end()), "Expected `str`"),
        (entry(step(), step(attempt=-1), ends=end()), "attempt: -1 is not between 0 and"),
        (entry(step(attempt=2**31), ends=end()), "attempt: 2147483648 is not between 0 and"),
    ],
)
def test_an_unreadable_entry_is_stored_intact_with_its_end(bad: RecordEntry, reason: str) -> None:
    rows = rows_of("weft", 3, [bad, entry(step(), entry_id="8-0", task="good")])
    [(namespace, partition, entry_id, task, why, steps)] = rows.unreadable
    assert (namespace, partition, entry_id, task, steps) == ("weft", 3, "7-0", "t", bad.steps)
    assert reason in str(why)
    assert [row[1] for row in rows.steps] == ["good"], "nothing of the bad entry"
    assert [row[1] for row in rows.tasks] == ["t"]


def test_a_task_id_too_long_for_an_index_is_cut() -> None:
    rows = rows_of("weft", 0, [entry(step(), task="ü" * TASK_MAX, ends=end())])
    assert (rows.steps, rows.tasks) == ([], [])
    assert rows.unreadable[0][3] == "ü" * TASK_MAX
    assert rows_of("weft", 0, [entry(step(), task="u" * TASK_MAX)]).unreadable == []


def test_tenants_and_days_of_a_task() -> None:
    assert (tenant_of("acme.t.1"), tenant_of("t")) == ("acme", "")
    assert (day_of(ENDED_MS), day_of(-1.0), day_of(1e300)) == (DAY, "1969-12-31", "0001-01-01")


def test_the_model_of_a_report() -> None:
    response = f'{{"{RESPONSE_MODEL}":"m-1"}}'
    assert usage_report("model", "asked", '{"n":1}', response) == ("m-1", {"n": 1.0})
    assert usage_report("model", "asked", '{"n":1}', None)[0] == "asked"
    assert usage_report("usage", "usage", '{"n":1}', response)[0] == ""
    assert usage_report("usage", "m-2", '{"n":1}', None)[0] == "m-2"
    assert usage_report("tool", "search", '{"n":1}', response)[0] == ""


END = ("t", "a", ENDED_MS)
PLACE = "r\t1"


def spent(amount: float, path: str = "1") -> Step:
    return step(path, kind="model", name="m", usage={"n": amount})


def changes(entries: list[RecordEntry], ended: bool = False, stored: float | None = None) -> dict[object, object]:
    """Return the changed amounts by kind; `stored` is the amount that the store has for step 1."""
    rows = rows_of("weft", 0, entries)
    place = rows_of("weft", 0, [entry(spent(1))]).steps[0][2]
    old = [] if stored is None else [("t", str(place), 1, "model", "m", f'{{"n":{stored}}}', None)]
    found = usage_changes("weft", rows, [END] if ended else [], old)
    assert found == sorted(found, key=lambda row: row[:7]), "two writers must not deadlock"
    assert {row[:4] for row in found} <= {("weft", DAY, "", "a")}
    return {(row[5], row[4], row[6]): row[7] for row in found}


FIRST = {("tasks", "", ""): 1.0, ("model_tasks", "m", ""): 1.0, ("amount", "m", "n"): 5.0}


def test_usage_counts_when_its_task_ends() -> None:
    assert changes([entry(spent(5))]) == {}
    assert changes([entry(spent(5), ends=end())]) == FIRST
    assert changes([entry(ends=end())], stored=5) == FIRST
    assert changes([entry(step("2"), ends=end())]) == {}, "a task without usage has no sums"


def test_usage_that_is_written_again_adds_nothing() -> None:
    assert changes([entry(spent(5), ends=end())], ended=True, stored=5) == {}


def test_a_row_that_replaces_another_counts_by_the_difference() -> None:
    assert changes([entry(spent(7))], ended=True, stored=5) == {("amount", "m", "n"): 2.0}
    back = changes([entry(step("1", kind="model", name="m"))], ended=True, stored=5)
    assert back == {key: -amount for key, amount in FIRST.items()}
    late = changes([entry(spent(1, "2"))], ended=True, stored=5)
    assert late == {("amount", "m", "n"): 1.0}


def test_long_names_and_huge_amounts_stop_nothing() -> None:
    huge = step("1", kind="model", name="m\0" * 500, usage={"n" * 500: 1e300, "less": -1e300})
    found = changes([entry(huge, ends=end())])
    amounts = {key: amount for key, amount in found.items() if amount not in (1.0,)}
    assert sorted(amounts.values()) == [-1e290, 1e290]  # type: ignore[type-var]  # numbers
    assert max(len(str(part)) for key in found for part in key) == 120  # type: ignore[attr-defined]  # tuples
