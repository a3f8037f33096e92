"""`weft dead`."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import closing
from hashlib import sha256
from typing import Any

import pytest

from tests.integration.cli.desk import Desk, Weft, letters_of, shown_with, until


def test_dead_letters_are_listed_counted_and_shown_whole(weft: Weft) -> None:
    for number in (1, 2):
        weft("submit", "caller", "wrong", "--task-id", f"dead-{number}")
    listed = weft("dead", "list", "--name", "broken", "--json").json
    assert [letter["task_id"] for letter in listed[:2]] == ["dead-2", "dead-1"]
    assert listed[0]["error"] == {"type": "ValueError", "message": "cannot do wrong"}
    assert listed[0]["stream"] == "tool"
    groups = weft("dead", "list", "--group-by", "error", "--json").json
    [group] = [each for each in groups if each["error"] == "ValueError: cannot do wrong"]
    assert group["newest"] == listed[0]["letter_id"]
    assert group["count"] >= 2
    assert "broken" in [each["name"] for each in weft("dead", "list", "--group-by", "name", "--json").json]
    assert "REASON" in weft("dead", "list", "--group-by", "reason").out
    streams = {group["stream"]: group for group in weft("dead", "list", "--group-by", "stream", "--json").json}
    assert streams["tool"]["bytes"] >= sum(letter["bytes"] for letter in listed[:2]) > 1000
    assert re.search(r"COUNT +SIZE +NEWEST +STREAM", weft("dead", "list", "--group-by", "stream").out)
    letters = next(item for item in weft("doctor", "--json").json["checks"] if item["check"] == "dead letters")
    assert re.match(r"\d+ \([\d.]+ KiB of 64\.0 MiB: .*\btool [\d.]+ KiB", letters["message"])

    letter = weft("dead", "show", listed[0]["letter_id"], "--json").json
    assert (letter["kind"], letter["data"], letter["run_id"]) == ("call", {"text": "wrong"}, "r/1")
    assert "ValueError: cannot do wrong" in letter["errors"][0]["traceback"]
    text = weft("dead", "show", listed[0]["letter_id"]).out
    assert 'raise ValueError(f"cannot do {text}")' in text
    assert f"weft dead redrive {listed[0]['letter_id']}" in text
    assert f"dead     {listed[0]['letter_id']}" in weft("task", "show", "dead-2").out


def test_equal_errors_are_shown_once_and_an_ended_task_is_reopened(weft: Weft) -> None:
    weft("submit", "tries", "this", "--task-id", "tries-1")
    (letter,) = letters_of(weft, "tries-1")
    text = weft("dead", "show", letter).out
    assert text.startswith("errors 1 to 3 of 3, ")
    assert text.count('raise RuntimeError(f"never {text}")') == 1
    assert f"redrive it: weft dead redrive {letter} --reopen    drop it: weft dead drop {letter}\n" in text
    shown_with(weft, "tries-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    shown = weft("task", "show", "tries-1").out
    assert "\nthe last traceback, of tool stubborn:\n" in shown
    assert 'raise RuntimeError(f"never {text}")' in shown
    assert "runtime_core/" not in shown, "`weft dead show` has Weft's own frames"


def test_a_truncated_letter_is_not_redriven(weft: Weft, desk: Desk) -> None:
    data = b'{"agent": "echo", "input": "' + b"x" * (2 * 1024 * 1024) + b'"}'
    with closing(desk.redis()) as server:
        server.xadd("weft:tasks", {"type": "weft.task.submit", "id": "oversized", "data": data})

    def oversized() -> list[dict[str, Any]]:  # Any: JSON
        listed = weft("dead", "list", "--reason", "rejected", "--json").json
        return [one for one in listed if one["bytes"] > 4096]

    until(oversized)
    (letter,) = oversized()
    text = weft("dead", "show", letter["letter_id"]).out
    assert f"only the start of event:data is stored ({len(data)} bytes, SHA256 {sha256(data).hexdigest()})" in text
    assert "cannot be redriven" in text
    refused = weft("dead", "redrive", letter["letter_id"])
    assert refused.status == 1
    assert "was cut because it was too large, so it cannot be redriven" in refused.err
    assert weft("dead", "drop", letter["letter_id"]).status == 0


def test_a_dead_letter_is_fixed_and_redriven(weft: Weft) -> None:
    weft("submit", "caller", "wrong", "--task-id", "mend-1")
    (letter,) = letters_of(weft, "mend-1")
    refused = weft("dead", "redrive", letter)
    assert refused.status == 1
    assert "--reopen" in refused.err
    bad = weft("dead", "redrive", letter, "--reopen", "--data", "{text: right}")
    assert bad.status == 1
    assert "--data: is not JSON" in bad.err
    unfit = weft("dead", "redrive", letter, "--reopen", "--data", "{}")
    assert unfit.status == 1
    assert "data.text: is missing" in unfit.err
    assert weft("dead", "show", letter, "--json").json["data"] == {"text": "wrong"}
    done = weft("dead", "redrive", letter, "--reopen", "--data", '{"text": "right"}', "--json").json
    assert done == {"redriven": [{"letter_id": letter, "task_id": "mend-1"}], "failed": []}
    view = shown_with(weft, "mend-1", lambda view: view["status"] == "completed")
    assert view["output"] == "done right"
    assert letters_of(weft, "mend-1") == []
    again = weft("dead", "redrive", letter)
    assert again.status == 1
    assert f"there is no dead letter {letter}" in again.err


def test_redrive_all_redrives_each_letter_once(weft: Weft) -> None:
    for number in (1, 2):
        weft("submit", "caller", "wrong", "--task-id", f"all-{number}")
    before = letters_of(weft, "all-1")
    done = weft("dead", "redrive", "--all", "--task", "all-1", "--reopen", "--json").json
    assert [one["letter_id"] for one in done["redriven"]] == before
    until(lambda: letters_of(weft, "all-1") not in ([], before))
    assert len(letters_of(weft, "all-1")) == 1
    assert len(letters_of(weft, "all-2")) == 1


def test_dead_letters_are_dropped(weft: Weft) -> None:
    weft("submit", "caller", "wrong", "--task-id", "drop-1")
    (letter,) = letters_of(weft, "drop-1")
    assert weft("dead", "drop", letter).out == "dropped 1 dead letter\n"
    assert weft("dead", "drop", letter).out == ""
    gone = weft("dead", "drop", letter, "--json")
    assert gone.status == 1
    assert gone.json == {
        "dropped": [],
        "failed": [{"letter_id": letter, "message": gone.err.split(": ", 1)[1].strip()}],
    }
    weft("submit", "caller", "wrong", "--task-id", "drop-2")
    assert weft("dead", "drop", "--all", "--task", "drop-2", "--json").json["dropped"]
    assert weft("dead", "list", "--task", "drop-2").out == "no dead letters\n"


def test_dropping_all_letters_asks_at_a_terminal(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    weft("submit", "caller", "wrong", "--task-id", "drop-3")
    for typed, status, left in (("n", 1, 1), ("y", 0, 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{typed}\n"))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        ended = weft("dead", "drop", "--all", "--task", "drop-3")
        assert (ended.status, len(letters_of(weft, "drop-3"))) == (status, left)
        assert "Delete 1 dead letter permanently?" in ended.err
    assert "not confirmed: nothing was changed" not in ended.err
    weft("submit", "caller", "wrong", "--task-id", "drop-4")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert weft("dead", "drop", "--all", "--task", "drop-4", "--yes").out == "dropped 1 dead letter\n"


@pytest.mark.parametrize("letter", ["12", "1-x", "7/1-1", "a/1-1", "--", ""])
def test_an_invalid_letter_id_is_reported(letter: str, weft: Weft) -> None:
    ended = weft("dead", "show", "--", letter)
    assert ended.status == 1
    assert "is not the id of a dead letter, as in 1731240000000-0" in ended.err


def test_a_rejected_event_is_fixed_and_resubmitted(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.xadd("weft:tasks", {"type": "weft.task.submit", "id": "bad-1", "data": '{"agent":"nobody","input":"x"}'})
        structured = {
            "specversion": "1.0", "type": "weft.task.submit", "id": "bad-2", "source": "test",
            "data": {"agent": "nobody", "task_id": "bad-2", "input": "x"},
        }  # fmt: skip
        server.xadd("weft:tasks", {"data": json.dumps(structured)})
    found: list[dict[str, Any]] = []  # Any: JSON

    def both() -> bool:
        found[:] = weft("dead", "list", "--reason", "rejected", "--json").json
        return len(found) >= 2

    until(both)
    for number, letter in enumerate(reversed(found[:2]), 1):
        details = weft("dead", "show", letter["letter_id"], "--json").json
        assert (details["kind"], details["stream"]) == ("rejected", "tasks")
        unfit = json.dumps({"agent": "caller", "task_id": f"bad-{number}", "input": 5})
        refused = weft("dead", "redrive", letter["letter_id"], "--data", unfit)
        assert (refused.status, 'data.input: 5 is not of type "string"' in refused.err) == (1, True)
        data = json.dumps({"agent": "echo", "task_id": f"bad-{number}", "input": "mended"})
        assert weft("dead", "redrive", letter["letter_id"], "--data", data).status == 0
        view = shown_with(weft, f"bad-{number}", lambda view: view["status"] == "completed")
        assert view["output"] == "mended"
    assert weft("dead", "list", "--reason", "rejected").out == "no dead letters\n"


def test_letters_of_several_partitions_carry_the_partition(
    weft: Weft, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", "two")
    with closing(desk.redis()) as server:
        server.hset("two:settings", mapping={"partitions": 2, "format": 1})
        for partition, entry in ((0, "5-1"), (1, "4-0"), (1, "7-0")):
            server.xadd(f"two:{{{partition}}}:dead", {"reason": "poison", "stream": "tool", "time": 1}, id=entry)
    assert [one["letter_id"] for one in weft("dead", "list", "--json").json] == ["1/7-0", "0/5-1", "1/4-0"]
    assert [one["letter_id"] for one in weft("dead", "list", "--limit", "1", "--json").json] == ["1/7-0"]
    assert weft("dead", "show", "1/4-0", "--json").json["reason"] == "poison"
    assert weft("dead", "show", "0/4-0").status == 1
    assert "as in 0/1731240000000-0" in weft("dead", "show", "4-0").err
    assert weft("dead", "drop", "--all", "--json").json["dropped"] == ["0/5-1", "1/4-0", "1/7-0"]
