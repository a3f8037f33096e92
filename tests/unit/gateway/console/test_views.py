"""The console's view of a task: its time line, its waits and failures."""

from __future__ import annotations

import json
import time
from typing import Any

import jinja2
import msgspec
import pytest

from runtime_core.gateway.console import boards, views
from runtime_core.gateway.console.pages import root_failure, time_split
from runtime_core.gateway.console.site import FOLDER, notice_of
from runtime_core.state_manager.backlog import Quarantine


def node(run: str, step: str, kind: str, started: float, ended: float, **more: Any) -> dict[str, Any]:  # Any: JSON
    return {
        "run": run, "step": step, "kind": kind, "name": kind, "key": "", "status": "completed", "attempts": 1,
        "started": started, "ended": ended, "input": None, "output": None, "error": None, "errors": [], "usage": {},
        "attributes": {}, "cause": "", "owner": "", "recorded": True, "children": [], **more,
    }  # fmt: skip


NOW = 1_700_000_000_000.0
VIEW = {"task_id": "t", "status": "completed", "agent": "a", "created": NOW, "ended": NOW + 100}


def test_a_bar_shows_the_queue_the_call_and_the_last_commit() -> None:
    call = node("r", "1", "tool", NOW + 30, NOW + 50, cause=f"{NOW + 20:.0f}-0")
    line = views.timeline(VIEW, {"runs": [node("r", "", "agent", NOW + 4, NOW + 90, children=[call])]})
    run, tool = line.rows
    assert [(bar.kind, bar.start - NOW, bar.end - NOW) for bar in tool.bars] == [("queue", 20, 30), ("tool", 30, 50)]
    assert [(bar.kind, bar.start - NOW, bar.end - NOW) for bar in run.bars] == [
        ("queue", 0, 4), ("agent", 4, 90), ("queue", 20, 30), ("tool", 30, 50), ("commit", 90, 100),
    ]  # fmt: skip
    assert tool.in_queue == 10
    assert time_split(run, line.rows) == [
        ("in the queue", 10, "queue"), ("tools", 20, "tool"), ("your code, and the rest", 56, "code"),
    ]  # fmt: skip


def test_a_bar_shows_the_commit_of_each_call_and_run() -> None:
    """The broker's time of the record's entry follows the code's own end."""
    call = node("r", "1", "tool", NOW + 30, NOW + 50, committed=NOW + 53)
    local = node("r", "2", "step", NOW + 60, NOW + 61, committed=NOW + 80)
    child = node("r/3", "", "agent", NOW + 62, NOW + 70, committed=NOW + 74)
    run = node("r", "", "agent", NOW, NOW + 90, committed=NOW + 92, children=[call, local, child])
    line = views.timeline(VIEW, {"runs": [run]})
    commits = [[(bar.start - NOW, bar.end - NOW) for bar in row.bars if bar.kind == "commit"] for row in line.rows]
    assert commits[1:] == [[(50, 53)], [], [(70, 74)]]
    assert commits[0][-1] == (90, 92)
    assert ("commits", 7, "commit") in time_split(line.rows[0], line.rows)
    behind = node("r", "1", "tool", NOW + 30, NOW + 50, committed=NOW + 49)  # the broker's clock is behind
    assert [bar.kind for bar in views.timeline(VIEW, {"runs": [behind]}).rows[0].bars] == ["tool"]


def test_between_attempts_ends_where_the_last_one_was_queued() -> None:
    failed = {"type": "E", "message": "m", "traceback": "", "at": NOW + 10}
    call = node("r", "1", "tool", NOW + 60, NOW + 70, cause=f"{NOW + 50:.0f}-3", errors=[failed])
    line = views.timeline(VIEW, {"runs": [node("r", "", "agent", NOW, NOW + 90, children=[call])]})
    assert [(bar.kind, bar.start - NOW, bar.end - NOW) for bar in line.rows[1].bars] == [
        ("retry", 10, 50), ("queue", 50, 60), ("tool", 60, 70), ("failed", 10, 10),
    ]  # fmt: skip


def test_failed_attempts_are_work_and_the_pauses_between_them_are_not() -> None:
    errors = [
        {"type": "E", "message": "m", "traceback": "", "started": NOW + 5, "at": NOW + 25},
        {"type": "E", "message": "m", "traceback": "", "started": NOW + 28, "at": NOW + 48},
    ]
    call = node("r", "1", "tool", NOW + 52, NOW + 60, cause=f"{NOW + 50:.0f}-3", errors=errors)
    line = views.timeline(VIEW, {"runs": [node("r", "", "agent", NOW, NOW + 90, children=[call])]})
    assert [(bar.kind, bar.start - NOW, bar.end - NOW) for bar in line.rows[1].bars] == [
        ("tool", 5, 25), ("retry", 25, 28), ("tool", 28, 48), ("retry", 48, 50), ("queue", 50, 52), ("tool", 52, 60),
        ("failed", 25, 25), ("failed", 48, 48),
    ]  # fmt: skip
    assert line.rows[1].started - NOW == 5
    wait = {"run": "r", "step": "1", "kind": "tool", "name": "f", "attempt": 3, "errors": errors}
    held = {**wait, "handler": "tool-handler@h", "since": NOW + 51}
    for open_call, last in ((held, ("tool", 51)), ({**wait, "due": NOW + 99}, ("retry", 48))):
        row = views.timeline({**OPEN, "waits_for": [open_call]}, None).rows[-1]
        assert row.started - NOW == 5
        work = [
            (bar.kind, bar.start - NOW) for bar in row.bars if bar.kind in ("tool", "retry") and bar.end > bar.start
        ]
        assert work[:4] == [("tool", 5), ("retry", 25), ("tool", 28), ("retry", 48)]
        assert work[-1] == last


@pytest.mark.parametrize("cause", ["", "x", "e-1", f"{NOW + 40:.0f}-0"])
def test_a_cause_without_a_time_in_the_queue_draws_no_bar(cause: str) -> None:
    """Rows of older releases have none, and the clocks of two machines may differ."""
    call = node("r", "1", "tool", NOW + 30, NOW + 50, cause=cause)
    line = views.timeline(VIEW, {"runs": [node("r", "", "agent", NOW, NOW + 100, children=[call])]})
    assert [bar.kind for bar in line.rows[1].bars] == ["tool"]
    assert line.rows[1].in_queue == 0


OPEN = {"task_id": "t", "status": "waiting", "agent": "a", "created": NOW}


@pytest.mark.parametrize(
    ("wait", "kind"),
    [
        ({"step": "1", "kind": "tool", "name": "f", "handler": ""}, "queue"),
        ({"step": "1", "kind": "tool", "name": "f", "handler": "", "attempt": 2}, "queue"),
        ({"step": "1", "kind": "tool", "name": "f", "handler": "tool-handler@h"}, "tool"),
        ({"step": "1", "kind": "tool", "name": "f", "attempt": 2, "due": NOW}, "retry"),
        ({"step": "1", "kind": "tool", "name": "f", "limit": "tool:f||"}, "queue"),
        ({"step": "1", "kind": "receive", "name": "news"}, "wait"),
        ({"step": "", "kind": "agent", "name": "a/k", "place": "mail"}, "queue"),
        ({"step": "", "kind": "agent", "name": "a/k", "place": "pend"}, "agent"),
    ],
)
def test_a_bar_of_open_work_shows_whether_a_handler_has_it(wait: dict[str, Any], kind: str) -> None:
    line = views.timeline({**OPEN, "waits_for": [{"run": "r", "since": NOW, **wait}]}, None)
    assert line.rows[-1].bars[-1].kind == kind


def test_a_page_shows_the_steps_that_matter_of_a_long_task() -> None:
    """The rows that are left out still count in how the time splits."""
    error = {"type": "E", "message": "m"}
    steps = [node("r", str(number), "tool", NOW + number, NOW + number + 1) for number in range(1, 31)]
    steps[-1] |= {"status": "failed", "error": error}
    run = node("r", "", "agent", NOW, NOW + 40, children=steps, status="failed", error=error)
    view = {**VIEW, "status": "failed"}
    line = views.timeline(view, {"runs": [run]}, most=5)
    assert [row.path for row in line.rows] == ["r", "r/1", "r/2", "r/3", "r/30"]
    assert line.hidden == 26
    assert line.row("r/17") is not None
    failure = root_failure(line)
    assert failure is not None
    assert failure.row.path == "r/30"
    assert time_split(line.rows[0], line.every)[0] == ("tools", 30, "tool")
    assert [(bar.start - NOW, bar.end - NOW) for bar in line.rows[0].bars if bar.kind == "tool"] == [(1, 31)]


def test_a_run_shows_few_parts_of_many_steps() -> None:
    steps = [node("r", str(number), "tool", NOW + 10 * number, NOW + 10 * number + 1) for number in range(2000)]
    line = views.timeline(
        {**VIEW, "ended": NOW + 20_000}, {"runs": [node("r", "", "agent", NOW, NOW + 1, children=steps)]}
    )
    parts = [bar for bar in line.rows[0].bars if bar.kind == "tool"]
    assert len(parts) <= views.SEGMENTS_MAX
    assert (parts[0].start, parts[-1].end) == (NOW, NOW + 19_991)


@pytest.mark.parametrize(
    ("length", "labels"),
    [
        (8.0, ["0", "2 ms", "4 ms", "6 ms", "8 ms"]),
        (3_690.0, ["0", "1 s", "2 s", "3 s"]),
        (75_000.0, ["0", "30 s", "60 s"]),
        (294_000.0, ["0", "2 min", "4 min"]),
        (400 * 86_400_000.0, ["0", "100 d", "200 d", "300 d", "400 d"]),
    ],
)
def test_the_axis_has_round_times(length: float, labels: list[str]) -> None:
    line = views.Timeline([], [], NOW, NOW + length)
    assert [label for _, label in line.ticks] == labels
    assert all(0 <= place <= 100 for place, _ in line.ticks)


def test_the_newest_failure_comes_first() -> None:
    rows = [{"task_id": str(number), "status": "failed", "created": -number, "ended": number} for number in range(3)]
    rows.insert(0, {"task_id": "good", "status": "completed", "created": 9, "ended": 9})
    assert [row["task_id"] for row in boards._failed_last(rows)] == ["2", "1", "0"]


def test_equal_waits_share_one_line() -> None:
    calls = [
        {"run": "r", "step": str(number), "kind": "tool", "name": "f", "handler": "", "since": NOW} for number in (1, 2)
    ]
    view = {**OPEN, "waits_for": [*calls, {"run": "r", "step": "3", "kind": "human", "name": ""}]}
    [(wait, text, count)] = views.waits(view, NOW + 5_000)
    assert (wait["step"], text, count) == ("1", "tool f, for 5 s in the queue: no handler has taken it yet", 2)
    assert views.reason(view, NOW + 5_000).endswith("taken it yet, and 1 more")
    assert views.reason({**view, "questions": [{"prompt": "Which?"}]}, NOW) == "asks a person: Which?"
    assert views.reason(OPEN, NOW) == "waiting"


def test_work_without_a_handler_is_in_the_queue() -> None:
    """The page says so in a box of its own, so it is not among the other waits."""
    call = node("r", "1", "tool", NOW + 10, NOW + 40)
    run = {**node("r", "", "agent", 0, 0, children=[call]), "recorded": False, "status": ""}
    wait = {"run": "r/2", "step": "", "kind": "agent", "name": "b", "handler": ""}
    lacks = [{"kind": "agent", "name": "b"}]
    waits = [{"run": "r", "step": "2", "kind": "agent", "name": "b", "handler": ""}, wait]
    view = {**OPEN, "waits_for": waits, "without_handler": lacks}
    assert views.waits(view, NOW) == []
    line = views.timeline(view, {"runs": [run]})
    assert [bar.kind for bar in line.rows[-1].bars] == ["queue"]
    parts = time_split(line.rows[0], line.rows)
    assert [(word, kind) for word, _, kind in parts][:2] == [("in the queue", "queue"), ("tools", "tool")]
    assert "agent" not in [kind for _, _, kind in parts]
    own = views.timeline({**view, "waits_for": [{**wait, "run": "r"}]}, {"runs": [run]}).rows[0]
    assert [(bar.kind, bar.start - NOW) for bar in own.bars if bar.kind != "tool"] == [("agent", 0), ("queue", 40)]


def test_an_interrupted_call_does_not_count_as_own_code() -> None:
    """Nothing records the call that ran at the cancel, nor the runs above it."""
    call = node("r/1", "1", "tool", NOW + 10, NOW + 40)
    child = {**node("r/1", "", "", 0, 0, children=[call]), "recorded": False, "status": ""}
    run = {**node("r", "", "", 0, 0, children=[child]), "recorded": False, "status": ""}
    line = views.timeline({**VIEW, "status": "cancelled"}, {"runs": [run]})
    assert [(row.status, row.ended - NOW) for row in line.rows[:2]] == [("cancelled", 100), ("cancelled", 100)]
    for row in line.rows[:2]:
        assert [(bar.start - NOW, bar.end - NOW) for bar in row.bars if bar.kind == "lost"] == [(40, 100)]
    assert time_split(line.rows[1], line.rows) == [
        ("tools", 30, "tool"), ("not recorded: it was cancelled", 60, "lost"),
    ]  # fmt: skip
    alone = views.timeline({**VIEW, "status": "cancelled"}, None)
    assert time_split(alone.rows[0], alone.rows) == [("not recorded: it was cancelled", 100, "lost")]


def test_the_time_until_a_redrive_is_shown_separately() -> None:
    error = {"type": "E", "message": "m", "traceback": "", "at": NOW + 10}
    call = node(
        "r", "1", "tool", NOW + 71, NOW + 80, cause=f"{NOW + 70:.0f}-0", errors=[error], failed_at=[NOW + 10],
    )  # fmt: skip
    run = node("r", "", "agent", NOW, NOW + 100, children=[call], errors=[error], failed_at=[NOW + 12])
    line = views.timeline(VIEW, {"runs": [run]})
    assert [(bar.start - NOW, bar.end - NOW) for bar in line.rows[1].bars if bar.kind == "dead"] == [(10, 70)]
    parts = time_split(line.rows[0], line.rows)
    assert ("failed, until redriven", 60, "dead") in parts
    assert [word for word, _, _ in parts] == [
        "in the queue", "tools", "failed, until redriven", "your code, and the rest",
    ]  # fmt: skip
    assert line.rows[0].bars[-1].kind == "dead"
    model = node("r", "1", "model", NOW + 71, NOW + 80, errors=[error], failed_at=[NOW + 10])
    assert "dead" not in views.timeline(VIEW, {"runs": [model]}).kinds, "a repeated turn requests it again"


def test_a_long_error_is_short_until_it_is_opened() -> None:
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True)
    templates.filters |= views.FILTERS
    text = templates.get_template("macros.html").module.failure_text  # type: ignore[attr-defined]  # a macro
    first, _, whole = str(text({"type": "E", "message": "<long> " * 1_500})).partition("<details")
    assert len(first) < 1_000 < 10_000 < len(whole)
    assert "10,500 characters" in whole
    assert "<long>" not in first + whole
    assert "details" not in text({"type": "E", "message": "short"})


def test_a_handler_that_runs_a_delivery_alone_is_shown_with_its_task() -> None:
    """In red if it is the only one: all other work of its stream waits."""
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True)
    templates.filters |= views.FILTERS
    lone = Quarantine(
        "tool", "tool-handler@a", "a call of '<b>' of task t9, delivered 4 times,", "t9", 34_000, behind=2
    )
    module: Any = templates.get_template("macros.html").module  # Any: the template's macros
    shown = module.alone([lone], "/console")
    assert (
        "tool-handler@a has run a call of &#39;&lt;b&gt;&#39; of task t9, delivered 4 times, for 34.00 s alone" in shown
    )
    assert "; 2 more follow; it is the only handler, so all other work waits. " in shown
    assert '<p class="notice wrong">' in shown
    assert '<a href="/console/tasks/t9">' in shown


# -- thousands of steps --------------------------------------------------------------------------------------------


def unrecorded(run: str, *children: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    return node(run, "", "agent", 0, 0, recorded=False, status="", children=list(children))


def test_open_steps_are_listed_below_their_runs() -> None:
    """Those of an inner run before those of an outer one, which has the inner run among its steps."""
    one = node("r", "1", "tool", NOW - 90, NOW - 80)
    inner = unrecorded("r/2", node("r/2", "1", "tool", NOW - 70, NOW - 60))
    waits = [
        {"run": "r", "step": "3", "kind": "tool"},
        {"run": "r", "step": "4", "kind": "agent"},
        {"run": "r/2", "step": "2", "kind": "tool"},
        {"run": "r/4", "step": "1", "kind": "sleep"},
    ]
    line = views.timeline({**OPEN, "waits_for": waits}, {"runs": [unrecorded("r", one, inner)]})
    assert [row.path for row in line.every] == ["r", "r/1", "r/2", "r/2/1", "r/2/2", "r/3", "r/4", "r/4/1"]
    assert [row.depth for row in line.every] == [0, 1, 1, 2, 2, 1, 1, 2]
    starts = {row.path: row.started for row in line.every}
    assert (starts["r/2"], starts["r/2/2"], starts["r/3"]) == (NOW - 70, NOW - 60, NOW - 80)


@pytest.mark.parametrize("status", ["waiting", "cancelled"])
def test_the_time_line_of_thousands_of_steps_takes_linear_time(status: str) -> None:
    """A run waits for as many calls, or has as many child runs that a cancel left without a record."""
    children = [unrecorded(f"r/{n}", node(f"r/{n}", "1", "tool", NOW - 90, NOW - 80)) for n in range(3_000)]
    waits = [{"run": f"r/{n}", "step": "2", "kind": "tool"} for n in range(3_000)]
    waits += [{"run": "r", "step": str(n), "kind": "tool"} for n in range(3_000, 6_000)]
    ends: dict[str, Any] = {"waits_for": waits} if status == "waiting" else {"waits_for": [], "ended": NOW}
    began = time.thread_time()
    views.timeline({**OPEN, "status": status, **ends}, {"runs": [unrecorded("r", *children)]})
    # 0.1 s on a quiet machine; to look at all rows for each of them took over ten seconds.
    assert time.thread_time() - began < 2


# -- what a person edits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"notice": "cancelled-many", "done": "1", "left": "0"}, "1 task was cancelled."),
        ({"notice": "cancelled-many", "done": "2", "left": "1"}, "2 tasks were cancelled; 1 had ended before."),
        ({"notice": "redriven-of-many", "done": "0", "left": "3"},
         "No dead letters were redriven; 3 selected tasks have none."),
        ({"notice": "dropped-many", "done": "x", "left": "9" * 5000}, "No dead letters were dropped; 9999 are gone."),
        ({"notice": "denied"}, "Denied."),
        ({"notice": "<b>"}, ""),
    ],
)  # fmt: skip
def test_a_notice_counts_the_changes(query: dict[str, str], words: str) -> None:
    assert notice_of(query) == words


def test_text_direction_characters_are_shown() -> None:
    """U+202E hides the end of a name, as in `\u202egnp.exe`. A form sends the same value back."""
    assert views.preview("a\u202egnp.exe") == "a⟨U+202E⟩gnp.exe"
    assert views.pretty({"name": "\u2066x"}) == '{\n  "name": "⟨U+2066⟩x"\n}'
    sent = views.as_json({"name": "\u202egnp.exe"})
    assert "\u202e" not in sent
    assert json.loads(sent) == {"name": "\u202egnp.exe"}


def test_a_redriven_step_and_its_runs_are_open() -> None:
    failed = {"status": "failed", "error": {"type": "E", "message": "no"}}
    call = node("r/1", "2", "tool", NOW + 20, NOW + 40, **failed)
    other = node("r/1", "1", "tool", NOW + 10, NOW + 20, **failed)
    inner = node("r/1", "", "agent", NOW + 5, NOW + 45, children=[other, call], **failed)
    tree = {"runs": [node("r", "", "agent", NOW, NOW + 50, children=[inner], **failed)]}
    wait = {"run": "r/1", "step": "2", "kind": "tool", "name": "f", "due": NOW + 99, "attempt": 2}
    rows = {row.path: row.status for row in views.timeline({**OPEN, "waits_for": [wait]}, tree).rows}
    assert rows == {"r": "waiting", "r/1": "waiting", "r/1/1": "failed", "r/1/2": "waiting"}
    # Until its turn has begun, the broker knows the run alone. A task that has failed again is failed.
    assert views.timeline({**OPEN, "waits_for": []}, tree).rows[0].status == "waiting"
    assert views.timeline({**VIEW, "status": "failed"}, tree).rows[0].status == "failed"
    assert views.timeline({}, tree).rows[0].status == "failed", "of two that are compared"


def test_a_fork_shows_its_given_result_and_its_own_time() -> None:
    """The steps before the fork happened earlier, in its origin: they are listed, without bars."""
    before = node("r/1/1", "", "tool", NOW - 240_000, NOW - 239_000)
    after = node("r/1/3", "", "tool", NOW + 2, NOW + 3)
    given = msgspec.Raw(b'{"task": "t0", "step": "1/2", "result": {"paid": true}}')
    fork = node("r", "0.0", "fork", NOW, NOW, input=given)
    inner = node("r/1", "", "agent", NOW + 1, NOW + 3, children=[before, after])
    run = node("r", "", "agent", NOW, NOW + 4, children=[fork, inner])
    tree = {"created": NOW, "fork": {"task": "t0", "step": "1/2", "inherited": 1}, "runs": [run]}
    line = views.timeline({**VIEW, "created": NOW, "ended": NOW + 4}, tree)
    assert [row.path for row in line.rows] == ["r", "r/0.0", "r/1", "r/1/1", "r/1/2", "r/1/3"]
    replaced = line.rows[4]
    assert (replaced.name, replaced.node["output"], replaced.depth) == (views.GIVEN, {"paid": True}, 2)
    assert (line.start, line.end) == (NOW, NOW + 4)
    assert line.rows[3].bars == []
    assert sum(length for _, length, _ in time_split(line.rows[0], line.every)) <= 4.1
