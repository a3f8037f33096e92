"""`weft task`."""

from __future__ import annotations

import io
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.cli.desk import Desk, Ended, Weft, letters_of, shown_with, until


def test_tasks_are_listed_newest_first_and_filtered(weft: Weft) -> None:
    weft("submit", "echo", "x", "--task-id", "list-1", "--session", "s-9", "--key", "k")
    weft("submit", "rejecting", "x", "--task-id", "list-2")
    weft("submit", "sleeper", "300", "--task-id", "list-3", "--no-wait")
    rows = weft("task", "list", "--json").json
    assert [row["task_id"] for row in rows[:3]] == ["list-3", "list-2", "list-1"]
    assert rows[2] | {"agent": "echo", "status": "completed", "key": "k", "session_id": "s-9"} == rows[2]
    assert [row["task_id"] for row in weft("task", "list", "--limit", "2", "--json").json] == ["list-3", "list-2"]
    failed = weft("task", "list", "--status", "failed", "--agent", "rejecting", "--json").json
    assert failed[0]["task_id"] == "list-2"
    assert {(row["status"], row["agent"]) for row in failed} == {("failed", "rejecting")}
    text = weft("task", "list").out.splitlines()
    assert text[0].split() == ["TASK", "STATUS", "AGENT", "CREATED", "TOOK", "ERROR"]
    assert text[1].split()[:3] in (["list-3", "waiting", "sleeper"], ["list-3", "accepted", "sleeper"])
    weft("task", "cancel", "list-3")


def test_a_list_counts_the_steps_of_an_ended_task(weft: Weft) -> None:
    weft("submit", "caller", "right", "--task-id", "counted-1")
    (row,) = [each for each in weft("task", "list", "--json").json if each["task_id"] == "counted-1"]
    assert row["steps"] == weft("task", "show", "counted-1", "--json").json["steps"] == 2


def test_wrong_json_is_not_treated_as_text(weft: Weft) -> None:
    ended = weft("submit", "echo", '{"a": tru}')
    assert ended.status == 1
    assert ended.err.startswith("weft submit: input: is not JSON at column 7 (Expecting value): correct it")


def test_tasks_are_filtered_by_session_key_and_time(weft: Weft) -> None:
    for number, key in ((1, "a"), (2, "b")):
        weft("submit", "echo", "x", "--task-id", f"of-{number}", "--session", "s-filter", "--key", key)

    def listed(*filters: str) -> list[str]:
        return [row["task_id"] for row in weft("task", "list", "--session", "s-filter", *filters, "--json").json]

    assert listed() == ["of-2", "of-1"]
    assert listed("--key", "a") == ["of-1"]
    assert listed("--since", "1h") == ["of-2", "of-1"]
    assert listed("--until", "1h") == []
    assert listed("--since", "2999-01-01") == []
    wrong = weft("task", "list", "--since", "yesterday")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert "--since 'yesterday' is neither a span, as in 7d or 12h, nor a time" in wrong.err


def test_open_tasks_are_filtered_by_the_version_that_began_them(weft: Weft) -> None:
    weft("submit", "sleeper", "300", "--task-id", "of-version", "--no-wait")
    weft("submit", "echo", "x", "--task-id", "ended-at-once")
    weft("submit", "caller", "wrong", "--task-id", "failed-of-version")  # it keeps its version: it may be reopened
    shown_with(weft, "of-version", lambda view: view.get("version") == "7")
    listed = {row["task_id"] for row in weft("task", "list", "--version", "7", "--json").json}
    assert "of-version" in listed
    assert not {"ended-at-once", "failed-of-version"} & listed
    assert weft("task", "list", "--version", "6", "--json").json == []
    assert "version  7" in weft("task", "show", "of-version").out
    weft("task", "cancel", "of-version")


def test_many_tasks_are_cancelled_at_once(weft: Weft) -> None:
    for number in (1, 2, 3):
        weft("submit", "sleeper", "300", "--task-id", f"many-{number}", "--session", "s-many", "--no-wait")
    assert weft("task", "cancel", "many-1", "many-1").out == "cancelled task many-1\ncancelled task many-1\n"
    assert weft("task", "cancel", "--all", "--session", "s-many").out == "cancelled 2 tasks\n"
    assert weft("task", "cancel", "--all", "--session", "s-many", "--json").json == []
    rows = weft("task", "list", "--session", "s-many", "--json").json
    assert {row["status"] for row in rows} == {"cancelled"}
    for arguments in ((), ("many-1", "--all"), ("many-1", "--agent", "sleeper")):
        wrong = weft("task", "cancel", *arguments)
        assert (wrong.status, wrong.err.count("\n")) == (2, 1)
        assert "give either ids, or --all with any filters" in wrong.err


def test_a_waiting_task_names_the_task_that_it_waits_for(weft: Weft) -> None:
    weft("submit", "approver", "draft", "--task-id", "rest-1", "--no-wait")
    [wait] = shown_with(weft, "rest-1", lambda view: view.get("questions"))["waits_for"]
    assert wait["since"] > 0
    assert "status   waiting for a human for " in weft("task", "show", "rest-1").out
    weft("task", "cancel", "rest-1")


def test_watch_prints_each_change_and_ends_with_the_task(weft: Weft) -> None:
    weft("submit", "echo", "x", "--task-id", "watch-1")
    weft("submit", "rejecting", "x", "--task-id", "watch-2")
    completed, failed = weft("task", "watch", "watch-1"), weft("task", "watch", "watch-2")
    assert (completed.status, failed.status) == (0, 1)
    assert completed.out.endswith("  completed\n")
    assert "  failed; " in failed.out
    assert weft("task", "watch", "watch-3").err == (
        "weft task watch: there is no task 'watch-3'; see `weft task list`\n"
    )


def test_tasks_that_only_the_store_has_are_listed_and_shown(weft: Weft, desk: Desk) -> None:
    weft("submit", "echo", "kept", "--task-id", "old-1")
    shown_with(weft, "old-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    with closing(desk.redis()) as server:
        server.delete("weft:{0}:task:old-1")
    assert "old-1" in [row["task_id"] for row in weft("task", "list", "--json").json]
    view = weft("task", "show", "old-1", "--json").json
    assert (view["status"], view["input"], view["output"]) == ("completed", "kept", "kept")


def test_show_prints_times_input_output_and_runs(weft: Weft) -> None:
    weft("submit", "caller", "right", "--task-id", "show-1")
    view = shown_with(weft, "show-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    assert view["output"] == "done right"
    assert view["ended"] >= view["created"]
    run = view["trajectory"]["runs"][0]
    assert [(run["kind"], run["name"]), *((below["kind"], below["name"]) for below in run["children"])] == [
        ("agent", "caller"),
        ("tool", "broken"),
    ]
    text = weft("task", "show", "show-1").out
    assert "status   completed\n" in text
    assert "◆ agent caller" in text
    assert "▸ tool broken" in text
    assert "not complete" not in text


def test_open_questions_are_listed_with_the_commands_that_answer_them(weft: Weft) -> None:
    assert weft("task", "questions").out == "no open questions\n"
    assert weft("task", "questions", "--json").json == []
    for agent, task in (("approver", "open-1"), ("asker", "open-2")):
        assert weft("submit", agent, "draft", "--task-id", task, "--no-wait").status == 0
        shown_with(weft, task, lambda view: view.get("questions"))
    listed = weft("task", "questions").out
    assert 'open-1 (approver): Send it?\n  {"text":"draft"}\n  until ' in listed
    assert ", then the answer is false\n" in listed
    first, second = weft("task", "questions", "--json").json
    one, two = first["request_id"], second["request_id"]
    assert f"  weft task signal open-1 {one} true\n  weft task signal open-1 {one} false\n" in listed
    assert 'open-2 (asker): Publish it?\n  {"text":"draft"}\n  the answer has the schema ' in listed
    assert f'{{"type":"boolean"}}\n  weft task signal open-2 {two} VALUE\n' in listed
    assert (first["task_id"], first["agent"], first["expects"]) == ("open-1", "approver", "verdict")
    assert (one[:4], two[:6]) == ("r:1-", "r/1:1-")
    assert [one["task_id"] for one in weft("task", "questions", "--limit", "1", "--json").json] == ["open-1"]
    assert f"answer with: weft task signal open-1 {one} false\n" in weft("task", "show", "open-1").out

    wrong = weft("task", "signal", "open-1", one, "perhaps")
    assert wrong.status == 1
    assert wrong.err.startswith("weft task signal: value: is not a verdict: send true, false or ")
    misfit = weft("task", "signal", "open-2", two, "perhaps").err
    assert misfit.startswith('weft task signal: value: "perhaps" is not of type "boolean"')
    edit = '{"verdict": "edit", "value": "final"}'
    assert weft("task", "signal", "open-1", one, edit).status == 0
    guessed = weft("task", "signal", "open-2", "r/1:1", "true")
    assert "no open question 'r/1:1'" in guessed.err
    assert weft("task", "signal", "open-2", two, "true").status == 0
    done = shown_with(weft, "open-1", lambda view: view["status"] == "completed")
    assert done["output"] == ["edit", "final"]
    shown_with(weft, "open-2", lambda view: view["status"] == "completed")
    assert weft("task", "questions").out == "no open questions\n"


def test_hooks_may_be_named_by_their_point(weft: Weft) -> None:
    ended = weft("submit", "caller", "x", "--hook", "before_tool_call=refuse")
    assert (ended.status, ended.out) == (1, "")
    assert "Denied: hook 'refuse' at before_tool_call: not from here" in ended.err
    unknown = weft("submit", "caller", "x", "--hook", "before_tool_call=nobody")
    assert unknown.status == 1
    assert "hooks.before_tool_call: app 'desk' has no hook 'nobody'" in unknown.err
    assert weft("submit", "caller", "x", "--hook", "nobody").status == 2


def test_a_question_in_a_nested_run_is_shown_and_answered(weft: Weft) -> None:
    weft("submit", "asker", "draft", "--task-id", "ask-1", "--no-wait")
    view = shown_with(weft, "ask-1", lambda view: view.get("questions"))
    asked = view["questions"][0]["request_id"]
    assert {(wait["kind"], wait.get("name")) for wait in view["waits_for"]} == {("agent", "publisher"), ("human", None)}
    text = weft("task", "show", "ask-1").out
    assert 'question Publish it?  {"text":"draft"}\n' in text
    assert f"answer with: weft task signal ask-1 {asked} VALUE\n" in text
    assert "trajectory: nothing is recorded yet" in text
    wrong = weft("task", "signal", "ask-1", "r:9", "true")
    assert wrong.status == 1
    assert "no open question 'r:9'" in wrong.err
    assert weft("task", "signal", "ask-1", asked, "true", "--json").json == {
        "task_id": "ask-1",
        "request_id": asked,
        "value": True,
    }
    view = shown_with(weft, "ask-1", lambda view: view["status"] == "completed")
    assert view["output"] is True
    assert weft("task", "signal", "ask-1", asked, "false").err.startswith("weft task signal: ")


def test_a_running_retry_is_shown_with_its_error(weft: Weft) -> None:
    weft("submit", "patient", "x", "--task-id", "retry-1", "--no-wait")
    view = shown_with(weft, "retry-1", lambda view: any("attempt" in wait for wait in view.get("waits_for", ())))
    wait = view["waits_for"][0]
    assert (wait["kind"], wait["name"], wait["attempt"]) == ("tool", "moody", 2)
    assert wait["errors"][0]["message"] == "not now"
    text = weft("task", "show", "retry-1").out
    assert "waits    tool moody, attempt 2, in " in text
    assert "the last error: RuntimeError: not now" in text
    weft("task", "cancel", "retry-1")


def test_cancel_ends_a_task_once(weft: Weft) -> None:
    weft("submit", "sleeper", "300", "--task-id", "stop-1", "--no-wait")
    assert weft("task", "cancel", "stop-1", "--reason", "changed my mind").out == "cancelled task stop-1\n"
    assert weft("task", "cancel", "stop-1", "--json").json == {"task_id": "stop-1", "status": "cancelled"}
    view = weft("task", "show", "stop-1", "--json").json
    assert view["error"] == {"type": "Cancelled", "message": "changed my mind"}
    weft("submit", "echo", "x", "--task-id", "stop-2")
    ended = weft("task", "cancel", "stop-2")
    assert ended == Ended(1, "", "weft task cancel: task 'stop-2' has already ended (completed)\n")


@pytest.mark.parametrize("verb", ["show", "cancel", "delete"])
def test_an_unknown_task_is_reported_in_one_line(verb: str, weft: Weft) -> None:
    ended = weft("task", verb, "unheard-of")
    assert ended == Ended(1, "", f"weft task {verb}: there is no task 'unheard-of'; see `weft task list`\n")
    # In particular, to cancel it must not keep the id from a first submit.
    assert weft("submit", "echo", "x", "--task-id", f"unheard-of-{verb}").status == 0


def test_delete_erases_a_task_everywhere(weft: Weft, desk: Desk) -> None:
    weft("submit", "caller", "wrong", "--task-id", "gone-1")
    assert letters_of(weft, "gone-1")
    assert weft("task", "delete", "gone-1").status == 0
    assert weft("task", "show", "gone-1").status == 1
    assert weft("trajectory", "show", "gone-1").status == 1
    assert letters_of(weft, "gone-1") == []
    with closing(desk.redis()) as server:
        assert list(server.scan_iter("*gone-1*")) == []


def test_delete_erases_the_large_results_of_a_task(weft: Weft, desk: Desk) -> None:
    asked = weft("submit", "large", "300000", "--task-id", "gone-2")
    assert asked.status == 0, asked
    # The services of `weft up` keep them in its data folder; a step reads them as they were.
    blobs = desk.folder / "data" / "blobs" / "weft" / "gone-2"
    assert [path.stat().st_size for path in blobs.iterdir()] == [300_002]
    assert asked.out == "300000\n"
    assert weft("task", "delete", "gone-2", "--json").json["blobs"] == 1
    assert not blobs.exists()


def test_delete_refuses_a_task_that_runs(weft: Weft) -> None:
    weft("submit", "sleeper", "300", "--task-id", "busy-1", "--no-wait")
    ended = weft("task", "delete", "busy-1", "--yes")
    assert ended.status == 1
    assert "cancel it first with weft task cancel busy-1" in ended.err
    weft("task", "cancel", "busy-1")


class Terminal(io.StringIO):
    """Standard input that somebody types into."""

    def isatty(self) -> bool:
        return True


def test_delete_asks_at_a_terminal(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    weft("submit", "echo", "x", "--task-id", "ask-del-1")
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    ended = weft("task", "delete", "ask-del-1")
    assert ended.status == 1
    assert "not confirmed: nothing was changed" in ended.err
    assert weft("task", "show", "ask-del-1").status == 0
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert weft("task", "delete", "ask-del-1").status == 0
    assert weft("task", "show", "ask-del-1").status == 1


def test_a_reopened_task_is_not_shown_as_ended(weft: Weft) -> None:
    weft("submit", "caller", "wrong", "--task-id", "again-1")
    (letter,) = letters_of(weft, "again-1")
    shown_with(weft, "again-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    assert "again-1" in [row["task_id"] for row in weft("task", "list", "--status", "failed", "--json").json]
    weft("dead", "redrive", letter, "--reopen", "--data", '{"text": "right"}')
    shown_with(weft, "again-1", lambda view: view["status"] == "completed")
    assert "again-1" not in [row["task_id"] for row in weft("task", "list", "--status", "failed", "--json").json]


def test_a_task_shows_usage_by_model_and_the_error_of_each_call_in_one_line(weft: Weft, desk: Desk) -> None:
    weft("submit", "thinks", json.dumps({"api_key": "hush"}), "--task-id", "thinks-1")
    shown_with(weft, "thinks-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    usage = ("8 tokens, 6 input_tokens, 2 output_tokens, 0.5 cost", "large-1: 8 tokens, 6 input_tokens")
    line = "large-1  3 → 1 tokens, 0.25 cost  stop  Where is Ulm? → On the Danube.\n"

    def look() -> None:
        text = weft("task", "show", "thinks-1").out
        assert f"usage    {usage[0]}\n" in text
        assert f"\n         {usage[1]}" in text
        (error,) = [shown for shown in text.splitlines() if shown.startswith("error ")]
        assert "Reject: openai refused the model 'large':" in error
        assert "401 for Bearer ***" in error
        assert error.endswith("set OPENAI_API_KEY now")
        assert "hush" not in text
        assert text.count(line) == 2

    look()
    assert weft("trajectory", "show", "thinks-1").out.count(line) == 2
    rows = [json.loads(row) for row in weft("trajectory", "export", "--task", "thinks-1").out.splitlines()]
    assert [row["attributes"] for row in rows] == [{}, *[{"gen_ai.response.model": "large-1"}] * 2]
    with closing(desk.redis()) as server:
        server.delete("weft:{0}:task:thinks-1")
    look()


def test_usage_and_limits_of_a_task_are_shown(weft: Weft) -> None:
    done = weft("submit", "spends", "7", "--task-id", "spent", "--max-tokens", "7")
    assert done.status == 0, done.err
    assert "usage    7 tokens, 0.5 cost" in weft("task", "show", "spent").out
    over = weft("submit", "spends", "8", "--max-tokens", "7")
    assert over.status == 1
    assert "LimitExceeded: the task has used 8 tokens, over its max_tokens=7" in over.err
    assert weft("submit", "spends", "1", "--max-cost", "0.5").status == 0


def test_a_step_that_waits_for_an_engine_is_seen_until_its_end(weft: Weft, desk: Desk) -> None:
    weft("submit", "ranks", "a", "--task-id", "ranks-1", "--engine-wait", "100000", "--no-wait")
    shown_with(weft, "ranks-1", lambda view: view.get("waits_for"))
    found = {row["stream"]: row for row in weft("lag", "--json").json["streams"]}["ray:big"]
    assert (found["backlog"], found["group"]) == (1, None)
    nobody = "no ray-gateway serves the pool big: start one with WEFT_POOLS=big, or use the engine local"
    ended = weft("doctor")
    assert ended.status == 1
    assert (
        "✗ engines: ray: no gateways, no steps; ray:big: no gateways, 1 step; spark: no gateways, no steps\n"
        in ended.out
    )
    assert f"    → {nobody}\n" in ended.out
    assert "✓ stuck: every open run has an event or timer that continues it" in ended.out
    assert weft("task", "cancel", "ranks-1").status == 0
    until(lambda: "✓ engines: " in weft("doctor").out)

    with closing(desk.redis()) as server:
        server.zadd("weft:{0}:timers", {"e|spark|1-0": 9e14})
        assert "spark: no gateways, no steps and 1 to be retried\n" in weft("doctor").out
        server.zrem("weft:{0}:timers", "e|spark|1-0")

    refused = weft("submit", "ranks", "a", "--engine-wait", "0")
    assert refused.status == 1
    assert f"failed: EngineUnavailable: {nobody}; see weft task show " in refused.err
    late = weft("submit", "ranks", "a", "--engine-wait", "0.1")
    assert f"failed: EngineUnavailable: {nobody}; see weft task show " in late.err


def test_a_message_is_sent_to_a_running_task(weft: Weft) -> None:
    weft("submit", "sleeper", "300", "--task-id", "told-1", "--no-wait")
    sent = weft("task", "send", "told-1", "budget", '{"euros": 20}', "--id", "b-1")
    assert (sent.status, sent.out) == (0, 'sent budget to task told-1: {"euros":20}\n')
    again = weft("task", "send", "told-1", "budget", '{"euros": 20}', "--id", "b-1", "--json")
    assert again.json == {"task_id": "told-1", "name": "budget", "value": {"euros": 20}}
    reused = weft("task", "send", "told-1", "budget", "30", "--id", "b-1")
    assert reused.status == 1
    assert reused.err.startswith("weft task send: id: a message 'budget' with this id and a different value was sent")
    named = weft("task", "send", "told-1", "a budget", "20")
    assert named.err.startswith("weft task send: name: 'a budget' is not a name: use 1 to 100 letters")
    weft("task", "cancel", "told-1")
    ended = weft("task", "send", "told-1", "budget", "20")
    assert ended.status == 1
    assert "task 'told-1' has ended (cancelled), so it receives no message 'budget'" in ended.err
    assert "there is no task 'told-2'" in weft("task", "send", "told-2", "budget", "20").err


def test_show_without_a_store_says_where_the_steps_are(
    weft: Weft, desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert weft("submit", "echo", "1", "--task-id", "elsewhere-1").status == 0
    monkeypatch.setenv("WEFT_REDIS_URL", desk.url)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    shown = weft("task", "show", "elsewhere-1")
    assert shown.status == 0
    assert f"there is no store at sqlite:///{tmp_path}/" in shown.out
    assert "exec trajectory-recorder-0" in shown.out
    assert "check that the trajectory-recorder is running" not in shown.out
