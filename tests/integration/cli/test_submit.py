"""`weft submit`."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from runtime_core.cli.submit import PrintedOutput
from runtime_core.wire.codec import typed
from runtime_core.wire.events import StreamEvent
from tests.integration.cli.desk import Desk, Ended, Weft, command, environment


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Redis Streams", "Redis Streams"),
        ('{"a": [1, 2.5]}', {"a": [1, 2.5]}),
        ("[1]", [1]),
        ("-7", -7),
        ('"7"', "7"),
        ("7 dwarfs", "7 dwarfs"),
        ("{not json", "{not json"),
        ("true", "true"),
        ("", ""),
    ],
)
def test_obvious_json_is_parsed_as_json(text: str, value: object) -> None:
    assert typed(text) == value


def test_answers_to_questions_may_also_be_words_of_json() -> None:
    assert [typed(text, words=True) for text in ("true", "false", "null", "yes")] == [True, False, None, "yes"]


def test_submit_prints_the_answer(weft: Weft) -> None:
    assert weft("submit", "echo", "Redis Streams") == Ended(0, "Redis Streams\n", "")
    assert weft("submit", "echo", '{"a": 1}') == Ended(0, '{\n  "a": 1\n}\n', "")


def test_submit_reads_standard_input(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert weft("submit", "echo", "-").out == "from a pipe\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("[1, 2]\n"))
    assert weft("submit", "echo", "-", "--json").json["output"] == [1, 2]


def test_submit_streams_deltas_and_prints_their_text_once(weft: Weft) -> None:
    assert weft("submit", "shout", "hi there", "--stream") == Ended(0, 'HI THERE {"words":2}\n', "")
    ended = weft("submit", "shout", "hi", "--stream", "--json")
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [event["type"] for event in events] == ["weft.output.delta", "weft.output.delta", "weft.task.completed"]
    assert [event["data"].get("text", event["data"].get("value")) for event in events[:2]] == ["HI ", {"words": 1}]
    assert all(event["entry_id"] for event in events)


def test_submit_with_json_prints_one_document(weft: Weft) -> None:
    final = weft("submit", "echo", "x", "--task-id", "json-1", "--json").json
    assert final["task_id"] == "json-1"
    assert final["status"] == "completed"
    assert final["output"] == "x"
    assert {"usage", "steps"} <= final.keys()


def test_submit_without_waiting_prints_the_id(weft: Weft) -> None:
    assert weft("submit", "echo", "x", "--no-wait", "--task-id", "n-1") == Ended(0, "n-1\n", "")
    assert weft("submit", "echo", "x", "--no-wait", "--task-id", "n-1", "--json").json == {"task_id": "n-1"}


def test_a_failed_task_exits_with_status_1_and_one_line(weft: Weft) -> None:
    ended = weft("submit", "rejecting", "thanks", "--task-id", "f-1")
    assert ended == Ended(1, "", "weft submit: task f-1 failed: Reject: no thanks; see weft task show f-1\n")
    ended = weft("submit", "rejecting", "thanks", "--json")
    assert ended.status == 1
    assert ended.json["error"] == {"type": "Reject", "message": "no thanks"}


def test_a_rejected_submit_names_the_field(weft: Weft) -> None:
    ended = weft("submit", "nobody", "x")
    assert ended.status == 1
    assert ended.err.startswith("weft submit: no agent is named nobody; choose from ")
    ended = weft("submit", "strict", "many")
    assert ended.status == 1
    assert ': input: "many" is not of type "integer"' in ended.err


def test_a_task_id_submitted_again_is_the_same_task(weft: Weft) -> None:
    for _ in range(2):
        assert weft("submit", "echo", "once", "--task-id", "same-1").out == "once\n"
    other = weft("submit", "echo", "twice", "--task-id", "same-1")
    assert other.status == 1
    assert "different content" in other.err


def test_limits_end_a_task(weft: Weft) -> None:
    ended = weft("submit", "sleeper", "60", "--timeout", "0.2")
    assert ended.status == 1
    assert "TimeLimit" in ended.err
    ended = weft("submit", "twice", "right", "--max-steps", "1")
    assert ended.status == 1
    assert "max_steps=1" in ended.err


def test_ctrl_c_leaves_the_task_running(weft: Weft, desk: Desk) -> None:
    with subprocess.Popen(
        command("submit", "publisher", "draft", "--task-id", "ctrl-1"),
        env=environment(desk.folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == '? Publish it?  {"text":"draft"}\n'
            answer_with = process.stderr.readline()
            assert answer_with.startswith("  answer with: weft task signal ctrl-1 r:1-")
            request = answer_with.split()[6]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == "the task is still running; see weft task show ctrl-1\n"
        finally:
            process.kill()
    assert weft("task", "signal", "ctrl-1", request, "true").status == 0
    assert weft("submit", "publisher", "draft", "--task-id", "ctrl-1").out == "true\n"


def test_a_broken_pipe_is_quiet(weft: Weft, desk: Desk) -> None:
    weft("submit", "echo", "x")
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            command("task", "list"), env=environment(desk.folder), stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def delta(seq: int, text: str, attempt: int = 1, **more: object) -> StreamEvent:
    data = {"task_id": "t", "run_id": "r", "attempt": attempt, "seq": seq, "text": text, **more}
    return StreamEvent(entry_id=f"{seq}-0", type="weft.output.delta", data=data)


def test_the_output_of_a_lost_attempt_is_replaced_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = PrintedOutput()
    for event in (delta(1, "first line\nhalf a "), delta(2, "first line\nall", 2), delta(3, " of it", 2)):
        output.add(event)
    output.end_line()
    out, err = capsys.readouterr()
    assert out == "first line\nhalf a \r\x1b[1A\x1b[Jfirst line\nall of it\n"
    assert err == ""
    assert output.has_shown("first line\nall of it")
    assert not output.has_shown("another answer")


def test_the_output_says_that_an_attempt_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    output = PrintedOutput()
    for event in (delta(1, "half a "), delta(2, "all", 2), delta(2, "all", 2), delta(1, "half a ", 1)):
        output.add(event)
    output.end_line()
    assert capsys.readouterr() == ("half a \nall\n", "an attempt was lost: attempt 2 replaces its output\n")
