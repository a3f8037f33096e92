"""What commands print, and values as people type them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta

import pytest
import typer

from runtime_core.cli import output
from runtime_core.cli.output import (
    Columns,
    Row,
    answers_to,
    changes_of,
    counter,
    error_line,
    instance_of,
    json_of,
    moment,
    past_moment,
    preview,
    print_facts,
    print_rows,
    print_task,
    print_value,
    progress,
    shown,
    status_line,
)
from runtime_core.errors import InvalidInput

ROWS: list[Row] = [{"name": "a\x1b[2J", "count": 1.5, "late": None}, {"name": "longer", "count": 1200.0, "late": 3}]
Printed = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_are_a_table_or_json(capsys: Printed) -> None:
    columns: Columns = {"NAME": "name", "COUNT": "count", "LATE": lambda row: row["late"]}
    print_rows(ROWS, columns)
    assert capsys.readouterr().out.splitlines() == ["NAME    COUNT  LATE", "a�[2J   1.5    -", "longer  1200   3"]
    print_rows(ROWS, columns, as_json=True)
    assert json.loads(capsys.readouterr().out) == ROWS
    print_rows([], columns, empty="none")
    print_rows([], columns, as_json=True, empty="none")
    assert capsys.readouterr().out == "none\n[]\n"


def test_facts_without_a_value_are_left_out(capsys: Printed) -> None:
    print_facts([("task", "t\n"), ("agent", None), ("", "more")])
    assert capsys.readouterr().out == "task     t \n         more\n"


def test_an_answer_is_text_or_indented_json(capsys: Printed) -> None:
    print_value("two\nlines\x07")
    print_value({"a": [1]})
    assert capsys.readouterr().out == 'two\nlines\x07\n{\n  "a": [\n    1\n  ]\n}\n', "a file gets it as it is"


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("a\x1b[2J") == "a\x1b[2J"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert shown("a\x1b[2J\n\tb") == "a�[2J\n\tb"


def test_a_value_is_shortened_on_one_line() -> None:
    assert preview("two\nlines") == "two lines"
    assert preview({"a": "x" * 100}, 10) == '{"a":"xxx…'


def test_a_past_moment_is_a_span_or_a_time() -> None:
    now = datetime.now(UTC)
    for text, span in (("90s", timedelta(seconds=90)), ("12h", timedelta(hours=12)), ("2w", timedelta(weeks=2))):
        found = past_moment(text, "--since")
        assert found is not None
        assert timedelta(0) <= found - (now - span) < timedelta(seconds=60)
    assert past_moment("", "--since") is None
    assert past_moment("2026-11-01", "--since") == datetime(2026, 11, 1, tzinfo=UTC)
    assert past_moment("2026-11-01T08:00+02:00", "--since") == datetime(2026, 11, 1, 6, tzinfo=UTC)
    for text in ("7x", "yesterday", "-7d", "7 d"):
        with pytest.raises(typer.BadParameter, match="--since") as refused:
            past_moment(text, "--since")
        assert repr(text) in str(refused.value)


def test_no_moment_is_a_dash() -> None:
    assert moment(None) == moment(0) == "-"
    assert moment(1_793_491_200_000)[:4] == "2026"


def test_typed_json_is_checked() -> None:
    assert json_of('{"a": 1}', "--input") == b'{"a": 1}'
    for text in ("text", "[" * 100_000):
        with pytest.raises(InvalidInput, match=r"^--input: is not JSON"):
            json_of(text, "--input")


def test_an_error_is_one_short_line() -> None:
    assert error_line({"type": "OSError", "message": "no\nmore"}) == "OSError: no more"
    assert error_line({"message": "no"}) == "no"
    assert (error_line(None), error_line("lost")) == ("", "lost")
    assert len(error_line({"type": "E", "message": "x" * 500})) == 200


def waiting(*waits: Row, status: str = "running") -> Row:
    return {"task_id": "t", "agent": "writer", "status": status, "waits_for": list(waits)}


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (waiting(), "running"),
        (
            waiting({"kind": "human", "since": 4_000}, {"kind": "human", "since": 1_000}),
            "waiting for a human for 4.00 s",
        ),
        (waiting({"kind": "timer"}), "sleeping"),
        (waiting({"kind": "human"}, {"kind": "timer"}), "running"),
        (waiting({"kind": "tool"}), "running"),
        (waiting({"kind": "timer"}, status="cancelled"), "cancelled"),
        (waiting({"kind": "human", "place": "park"}), "running (parked)"),
    ],
)
def test_a_task_that_waits_says_for_whom(view: Row, line: str) -> None:
    assert status_line(view, 5_000) == line


def test_the_changes_of_a_task_name_its_first_waits() -> None:
    waits = [{"kind": "tool", "name": "", "step": str(number), "run": "r"} for number in range(9)]
    view = {**waiting(*waits), "error": {"type": "E", "message": "no"}}
    assert changes_of(view) == ["running", "E: no", "tool 0", "tool 1", "tool 2", "tool 3", "tool 4"]
    asleep = {"status": "waiting", "waits_for": [{"kind": "timer", "run": "r", "step": "2"}]}
    assert changes_of(asleep) == ["waiting", "sleep"]
    parked = waiting({"kind": "agent", "name": "", "step": "", "run": "r/1", "place": "park"})
    assert changes_of(parked) == ["running", "parked agent r/1", "see weft task show t"]


def test_a_question_is_answered_by_a_value_or_a_verdict() -> None:
    question = {"task_id": "t", "request_id": "q"}
    assert answers_to(question) == ["weft task signal t q VALUE"]
    assert answers_to({**question, "expects": "verdict"})[:2] == [
        "weft task signal t q true",
        "weft task signal t q false",
    ]


def test_an_instance_has_its_key() -> None:
    assert [instance_of(row) for row in ({"agent": "a", "key": "k"}, {"agent": "a"})] == ["a/k", "a"]


def test_a_task_is_printed_as_facts(capsys: Printed) -> None:
    view = waiting({"kind": "tool", "name": "search", "errors": [{"type": "E", "message": "no"}]})
    view |= {
        "created": 1_000,
        "usage": {"cost": 1.5, "tokens": 3, "own": 1, "models": {"m": {"tokens": 3}}},
        "forked_from": {"task": "other", "step": "2"},
        "max_steps": 5,
        "limits": {"max_tokens": 10},
        "input": "in\nput",
        "questions": [{"prompt": "ok?", "task_id": "t", "request_id": "q", "deadline": 9_000, "default": True}],
    }
    print_task(view, 3_000)
    facts = [(line[:9].strip(), line[9:]) for line in capsys.readouterr().out.splitlines()]
    assert ("fork of", "other, from step 2") in facts
    assert ("limit", "5 steps, 10 tokens") in facts
    assert ("usage", "3 tokens, 1.5 cost, 1 own") in facts
    assert ("", "m: 3 tokens") in facts
    assert ("input", "in put") in facts
    assert ("question", "ok?") in facts
    assert ("", "answer with: weft task signal t q VALUE") in facts
    assert next(value for name, value in facts if name == "waits").endswith("; the last error: E: no")
    assert not [name for name, _ in facts if name in ("ended", "version", "error")]


def test_counts_are_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "COUNTER_SECONDS", 0.0)
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", terminal)
        assert list(progress(["a", "b"], "checked")) == ["a", "b"]
        with counter("steps exported") as show:
            show(7)
        written = terminal.getvalue()
        assert ("\rchecked 1 of 2" in written) is ("\r7 steps exported" in written) is terminal.isatty()
        assert written.endswith("\r\x1b[K") is terminal.isatty()
