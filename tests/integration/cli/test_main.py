"""The command `weft`, against everything that `weft up` starts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis

from docs import generate_command
from runtime_core.bus.embedded import find_endpoint
from runtime_core.cli.main import main
from runtime_core.codec import typed

ROOT = Path(__file__).resolve().parents[3]

APP = """
import asyncio
from pathlib import Path

from weft import AgentContext, App, Deny, HookEvent, Reject, RetryPolicy
from weft.aworld import TrajectoryItem, TrajectoryStrategy
from weft.engines import Reference
from weft.llm import ModelCall

app = App("desk", version="7")
ONCE = RetryPolicy(attempts=1)
LATER = RetryPolicy(attempts=3, base_seconds=300.0)


@app.tool(retry=ONCE)
async def broken(text: str) -> str:
    if text != "right":
        raise ValueError(f"cannot do {text}")
    return "done right"


@app.tool(retry=LATER)
async def moody(text: str) -> str:
    raise RuntimeError("not now")


@app.reward
def length(item: TrajectoryItem, end: object) -> float:
    return float(len(str(item.action.content)))


class Nothing(TrajectoryStrategy):
    def keep(self, item: TrajectoryItem) -> bool:
        return False


@app.agent("echo")
async def echo(ctx: AgentContext, value: object) -> object:
    return value


@app.engine_function
def repeated(count: int) -> str:
    return "x" * count


@app.tool
def measured(text: Reference) -> int:
    return len(text.load())


@app.agent("large")
async def large(ctx: AgentContext, count: int) -> int:
    return await ctx.tool(measured, text=await ctx.engine().call(repeated, count=count))


@app.agent("spends")
async def spends(ctx: AgentContext, tokens: int) -> None:
    await ctx.spend(tokens=tokens, cost=0.5)


@app.agent("thinks")
async def thinks(ctx: AgentContext, given: object) -> None:
    for model in ("large", "small"):
        await ctx.model(model, {"messages": [{"role": "user", "content": "Where is Ulm?"}]}, answered)
    remedy = "set OPENAI_API_KEY " * 20 + "now"
    raise Reject("openai refused the model 'large':\\n  401 for Bearer abc123def456\\n" + remedy)


def answered(request: object, call: ModelCall) -> object:
    call.spend(model="large-1", tokens=4, input_tokens=3, output_tokens=1, cost=0.25)
    call.row(attributes={"gen_ai.response.model": "large-1"})
    part = {"part_kind": "text", "content": "On the Danube."}
    return {"message": {"kind": "response", "parts": [part]}, "finish_reason": "stop", "model": "large-1"}


@app.agent("strict")
async def strict(ctx: AgentContext, value: int) -> int:
    return value


@app.agent("shout")
async def shout(ctx: AgentContext, text: str) -> str:
    for word in text.split():
        await ctx.emit(word.upper() + " ")
    await ctx.emit({"words": len(text.split())})
    return text.upper()


@app.agent("rejecting")
async def rejecting(ctx: AgentContext, text: str) -> str:
    raise Reject(f"no {text}")


@app.agent("publisher")
async def publisher(ctx: AgentContext, text: str) -> object:
    return await ctx.human("Publish it?", data={"text": text})


@app.hook("before_tool_call")
def refuse(event: HookEvent) -> Deny:
    return Deny("not from here")


@app.agent("approver")
async def approver(ctx: AgentContext, text: str) -> object:
    approval = await ctx.approve("Send it?", data={"text": text}, timeout=3600, default=False)
    return [approval.verdict, approval.value]


@app.agent("asker")
async def asker(ctx: AgentContext, text: str) -> object:
    return await ctx.agent("publisher", text)


@app.agent("sleeper")
async def sleeper(ctx: AgentContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "slept"


@app.agent("caller")
async def caller(ctx: AgentContext, text: str) -> object:
    return await ctx.tool(broken, text=text)


@app.agent("twice")
async def twice(ctx: AgentContext, text: str) -> object:
    return await ctx.gather(ctx.tool(broken, text=text), ctx.tool(broken, text=text))


@app.agent("patient")
async def patient(ctx: AgentContext, text: str) -> object:
    return await ctx.tool(moody, text=text)


@app.engine_function(pool="big")
def rank(text: str) -> str:
    return text


@app.agent("ranks")
async def ranks(ctx: AgentContext, text: str) -> object:
    return await ctx.engine("ray").call(rank, text=text)


@app.agent("blocked")
async def blocked(ctx: AgentContext, flag: str) -> str:
    Path(flag + ".begun").touch()
    while not Path(flag).exists():
        await asyncio.sleep(0.02)
    return "unblocked"
"""


@dataclass(frozen=True)
class Desk:
    """A `weft up` that runs, and its folder."""

    folder: Path
    url: str
    log: Path

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # Any: JSON
        return json.loads(self.out)


Weft = Callable[..., Ended]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "runtime_core.cli.main", *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return {**kept, "WEFT_DATA_DIR": str(folder / "data"), "WEFT_LEASE_SECONDS": "1", **more}


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_at, "the condition did not come true in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    (folder / "desk.py").write_text(APP)
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("up", "--app", "desk:app"), cwd=folder, env=environment(folder), stdout=output, stderr=output
        )
    try:
        until(lambda: process.poll() is not None or log.read_text().count("✓ ready") == 4)
        assert process.poll() is None, log.read_text()
        url = find_endpoint(folder / "data")
        assert url is not None
        yield Desk(folder, url, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def weft(desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs a command in this process, in the folder of the desk."""
    monkeypatch.chdir(desk.folder)
    for name in list(os.environ):
        if name.startswith("WEFT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_DATA_DIR", str(desk.folder / "data"))

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        return Ended(status, out, err)

    return run


def shown_with(weft: Weft, task: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:  # Any: JSON
    """Return `weft task show --json` once it shows what is expected."""
    seen: dict[str, Any] = {}

    def holds() -> bool:
        ended = weft("task", "show", task, "--json")
        if ended.status == 0:
            seen.clear()
            seen.update(ended.json)
        return bool(seen) and bool(condition(seen))

    until(holds)
    return seen


def letters_of(weft: Weft, task: str) -> list[str]:
    return [letter["letter_id"] for letter in weft("dead", "list", "--task", task, "--json").json]


# -- the command itself --------------------------------------------------------------------------------------------


def test_the_page_of_the_command_is_current() -> None:
    assert generate_command.PAGE.read_text("utf-8") == generate_command.page(), "run `python -m docs.generate_command`"


def test_every_command_has_an_example_in_its_help() -> None:
    for section in generate_command.page().split("\n## ")[1:]:
        path, _, text = section.partition("\n")
        if "COMMAND [ARGS]" not in text:
            assert "Example" in text, f"{path} has no example"


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; from runtime_core.cli.main import main; status = main(['--help']);"
        "slow = {'sqlalchemy', 'asyncio', 'rich', 'pydantic', 'runtime_core.client.client'} & set(sys.modules);"
        "assert not slow, slow; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("up", "submit", "task", "trajectory", "schedule", "tenant", "dead", "lag", "doctor"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit"], "weft submit: Missing argument 'AGENT'; see `weft submit --help`"),
        (["submit", "a", "--max-steps", "0"], "weft submit: "),
        (["submit", "a", "--stream", "--no-wait"], "weft submit: "),
        (["nothing"], "weft: No such command 'nothing'"),
        (["tsk"], "weft: No such command 'tsk'. Did you mean 'task'?"),
        (["task", "list", "--status", "odd"], "weft task list: "),
        (["schedule", "set", "s", "echo"], "weft schedule set: Invalid value: give exactly one of --every"),
        (["dead", "redrive"], "weft dead redrive: Invalid value: give either ids or --all"),
        (["dead", "drop", "1-1", "--all"], "weft dead drop: "),
        (["dead", "redrive", "--all", "--data", "{}"], "weft dead redrive: "),
        (
            ["trajectory", "export", "--format", "parquet"],
            "weft trajectory export: Invalid value: Parquet cannot be written to",
        ),
        (["trajectory", "export", "--since", "yesterday"], "weft trajectory export: "),
        (["trajectory", "export", "--format", "sar-parquet"], "weft trajectory export: Invalid value: Parquet cannot"),
        (["trajectory", "export", "--min-reward", "1"], "weft trajectory export: Invalid value: --strategy, --reward"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert out == ""


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task"]) == 2
    assert "Usage: weft task" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["submit", "echo"], ["task", "list"], ["task", "show", "x"], ["dead", "list"], ["lag"]]
)
def test_without_a_broker_one_line_says_how_to_get_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "no broker: start one with `weft up`, or set WEFT_REDIS_URL" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_REDIS_URL", "unix:///nowhere/server.sock")
    assert main(["lag"]) == 1
    err = capsys.readouterr().err
    assert "unix:///nowhere/server.sock" in err
    assert err.count("\n") == 1


def test_up_without_an_app_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_APP", raising=False)
    assert main(["up"]) == 1
    err = capsys.readouterr().err
    assert "weft up --app desk:app" in err
    assert err.count("\n") == 1
    assert not (tmp_path / ".weft").exists()


def test_a_namespace_that_nobody_made_is_not_made_by_looking(
    weft: Weft, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", "mistyped")
    ended = weft("task", "list")
    assert ended.status == 1
    assert "'mistyped' does not exist" in ended.err
    with closing(desk.redis()) as server:
        assert list(server.scan_iter("mistyped*")) == []


def test_up_tells_what_runs_in_lines(desk: Desk) -> None:
    text = desk.log.read_text()
    assert text.startswith("Weft is starting\n")
    for service in ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder"):
        assert any(service in line and "✓ ready" in line for line in text.splitlines())


# -- submit --------------------------------------------------------------------------------------------------------


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


def test_submit_streams_deltas_and_then_the_answer(weft: Weft) -> None:
    assert weft("submit", "shout", "hi there", "--stream") == Ended(0, 'HI THERE {"words":2}\nHI THERE\n', "")
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


def test_a_failed_task_gives_status_1_and_one_line(weft: Weft) -> None:
    ended = weft("submit", "rejecting", "thanks", "--task-id", "f-1")
    assert ended == Ended(1, "", "weft submit: task f-1 failed: Reject: no thanks; see weft task show f-1\n")
    ended = weft("submit", "rejecting", "thanks", "--json")
    assert ended.status == 1
    assert ended.json["error"] == {"type": "Reject", "message": "no thanks"}


def test_a_rejected_submit_names_the_field(weft: Weft) -> None:
    ended = weft("submit", "nobody", "x")
    assert ended.status == 1
    assert ended.err.startswith("weft submit: data.agent: no agent is named nobody; known are ")
    ended = weft("submit", "strict", "many")
    assert ended.status == 1
    assert "data.input: 'many' is not of type integer" in ended.err


def test_a_task_id_submitted_again_is_the_same_task(weft: Weft) -> None:
    for _ in range(2):
        assert weft("submit", "echo", "once", "--task-id", "same-1").out == "once\n"
    other = weft("submit", "echo", "twice", "--task-id", "same-1")
    assert other.status == 1
    assert "other content" in other.err


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


# -- task ----------------------------------------------------------------------------------------------------------


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


def test_tasks_that_only_the_store_has_are_listed_and_shown(weft: Weft, desk: Desk) -> None:
    weft("submit", "echo", "kept", "--task-id", "old-1")
    shown_with(weft, "old-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    with closing(desk.redis()) as server:
        server.delete("weft:{0}:task:old-1")
    assert "old-1" in [row["task_id"] for row in weft("task", "list", "--json").json]
    view = weft("task", "show", "old-1", "--json").json
    assert (view["status"], view["input"], view["output"]) == ("completed", "kept", "kept")


def test_show_tells_times_input_output_and_runs(weft: Weft) -> None:
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
    assert f'open-2 (asker): Publish it?\n  {{"text":"draft"}}\n  weft task signal open-2 {two} VALUE\n' in listed
    assert (first["task_id"], first["agent"], first["expects"]) == ("open-1", "approver", "verdict")
    assert (one[:4], two[:6]) == ("r:1-", "r/1:1-")
    assert [one["task_id"] for one in weft("task", "questions", "--limit", "1", "--json").json] == ["open-1"]
    assert f"answer with: weft task signal open-1 {one} false\n" in weft("task", "show", "open-1").out

    wrong = weft("task", "signal", "open-1", one, "perhaps")
    assert wrong.status == 1
    assert wrong.err.startswith("weft task signal: value: is no verdict: send true, false or ")
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
    assert "data.hooks.before_tool_call: app 'desk' has no hook 'nobody'" in unknown.err
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
    assert weft("task", "signal", "ask-1", asked, '{"yes": 1}', "--json").json == {
        "task_id": "ask-1",
        "request_id": asked,
        "value": {"yes": 1},
    }
    view = shown_with(weft, "ask-1", lambda view: view["status"] == "completed")
    assert view["output"] == {"yes": 1}
    assert weft("task", "signal", "ask-1", asked, "false").err.startswith("weft task signal: ")


def test_a_retry_under_way_is_shown_with_its_error(weft: Weft) -> None:
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
    assert ended == Ended(1, "", "weft task cancel: task_id: task 'stop-2' has already ended (completed)\n")


@pytest.mark.parametrize("verb", ["show", "cancel", "delete"])
def test_an_unknown_task_is_one_line(verb: str, weft: Weft) -> None:
    ended = weft("task", verb, "unheard-of")
    assert ended == Ended(1, "", f"weft task {verb}: task_id: there is no task 'unheard-of'; see `weft task list`\n")
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


# -- trajectory ----------------------------------------------------------------------------------------------------


def test_a_trajectory_is_shown_as_a_tree(weft: Weft) -> None:
    weft("submit", "caller", "right", "--task-id", "tree-1")
    shown_with(weft, "tree-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    lines = weft("trajectory", "show", "tree-1").out.splitlines()
    assert lines[0] == "task tree-1  caller  completed"
    assert lines[1].startswith("└─ ◆ agent caller  completed  ")
    assert lines[2].startswith("   └─ ▸ tool broken  completed  ")
    tree = weft("trajectory", "show", "tree-1", "--json").json
    assert (tree["task"], tree["complete"], tree["steps"]) == ("tree-1", True, 2)
    missing = weft("trajectory", "show", "unheard-of")
    assert missing.status == 1
    assert missing.err.startswith("weft trajectory show: task_id: no steps of task 'unheard-of' are recorded yet")


def test_trajectories_are_exported(weft: Weft, desk: Desk) -> None:
    weft("submit", "echo", "x", "--task-id", "export-1")
    shown_with(weft, "export-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    lines = weft("trajectory", "export", "--task", "export-1").out.splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["export-1"]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert weft("trajectory", "export", "--since", tomorrow).out == ""
    assert weft("trajectory", "export", "--agent", "echo", "--status", "failed").out == ""
    ended = weft("trajectory", "export", "--task", "export-1", "--output", "steps.jsonl")
    assert ended.out == "1 steps in steps.jsonl\n"
    assert (desk.folder / "steps.jsonl").read_text().splitlines() == lines
    refused = weft("trajectory", "export", "--output", "no/such/folder.jsonl")
    assert refused == Ended(1, "", "weft trajectory export: no/such/folder.jsonl: No such file or directory\n")


def test_items_for_training_are_scored_and_exported(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, text in (("sar-1", "short"), ("sar-2", "somewhat longer")):
        weft("submit", "echo", text, "--task-id", task, "--session", "sar")
        shown_with(weft, task, lambda view: view["trajectory"] and view["trajectory"]["complete"])
    exported = ["trajectory", "export", "--format", "sar", "--session", "sar"]
    items = [json.loads(line) for line in weft(*exported).out.splitlines()]
    assert [(item["meta"]["task_id"], item["reward"]["score"]) for item in items] == [("sar-1", None), ("sar-2", None)]
    assert "set WEFT_APP" in weft(*exported, "--reward").err
    monkeypatch.setenv("WEFT_APP", "desk:app")
    items = [json.loads(line) for line in weft(*exported, "--min-reward", "10").out.splitlines()]
    assert [(item["meta"]["task_id"], item["reward"]["score"]) for item in items] == [("sar-2", 15.0)]
    assert weft(*exported, "--strategy", "desk:Nothing").out == ""
    (item,) = [json.loads(line) for line in weft(*exported, "--strategy", "memory", "--task", "sar-1").out.splitlines()]
    assert item["state"]["messages"] == [{"role": "user", "content": "short"}]
    refused = weft(*exported, "--strategy", "desk:app")
    assert (refused.status, refused.out) == (1, "")
    assert "is not a TrajectoryStrategy" in refused.err


def test_trajectories_are_exported_to_parquet(weft: Weft, desk: Desk) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    weft("submit", "echo", "x", "--task-id", "export-2")
    shown_with(weft, "export-2", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    weft("trajectory", "export", "--format", "parquet", "--task", "export-2", "--output", "steps.parquet")
    assert parquet.read_table(desk.folder / "steps.parquet").column("task").to_pylist() == ["export-2"]


def test_a_missing_trajectory_store_is_named_and_not_made(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TRAJECTORY_URL", f"sqlite:///{tmp_path}/none.db")
    ended = weft("trajectory", "export")
    assert ended.status == 1
    assert "there is no trajectory store at sqlite:///" in ended.err
    assert weft("task", "list").status == 0
    assert not (tmp_path / "none.db").exists()


# -- dead letters --------------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_counted_and_shown_whole(weft: Weft) -> None:
    for number in (1, 2):
        weft("submit", "caller", "wrong", "--task-id", f"dead-{number}")
    listed = weft("dead", "list", "--name", "broken", "--json").json
    assert [letter["task_id"] for letter in listed[:2]] == ["dead-2", "dead-1"]
    assert listed[0]["error"] == {"type": "ValueError", "message": "cannot do wrong"}
    assert listed[0]["stream"] == "tool"
    groups = weft("dead", "list", "--group-by", "error", "--json").json
    assert {"error": "ValueError: cannot do wrong", "newest": listed[0]["letter_id"]}.items() <= groups[0].items()
    assert groups[0]["count"] >= 2
    assert weft("dead", "list", "--group-by", "name", "--json").json[0]["name"] == "broken"
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


def test_a_letter_that_was_cut_is_not_driven_again(weft: Weft, desk: Desk) -> None:
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


def test_a_dead_letter_is_mended_and_driven_again(weft: Weft) -> None:
    weft("submit", "caller", "wrong", "--task-id", "mend-1")
    (letter,) = letters_of(weft, "mend-1")
    refused = weft("dead", "redrive", letter)
    assert refused.status == 1
    assert "--reopen" in refused.err
    bad = weft("dead", "redrive", letter, "--reopen", "--data", "{text: right}")
    assert bad.status == 1
    assert "--data: is not JSON" in bad.err
    done = weft("dead", "redrive", letter, "--reopen", "--data", '{"text": "right"}', "--json").json
    assert done == {"redriven": [{"letter_id": letter, "task_id": "mend-1"}], "failed": []}
    view = shown_with(weft, "mend-1", lambda view: view["status"] == "completed")
    assert view["output"] == "done right"
    assert letters_of(weft, "mend-1") == []
    again = weft("dead", "redrive", letter)
    assert again.status == 1
    assert f"there is no dead letter {letter}" in again.err


def test_a_task_that_was_opened_again_is_not_shown_as_it_had_ended(weft: Weft) -> None:
    weft("submit", "caller", "wrong", "--task-id", "again-1")
    (letter,) = letters_of(weft, "again-1")
    shown_with(weft, "again-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    assert "again-1" in [row["task_id"] for row in weft("task", "list", "--status", "failed", "--json").json]
    weft("dead", "redrive", letter, "--reopen", "--data", '{"text": "right"}')
    shown_with(weft, "again-1", lambda view: view["status"] == "completed")
    assert "again-1" not in [row["task_id"] for row in weft("task", "list", "--status", "failed", "--json").json]


def test_redrive_all_takes_each_letter_once(weft: Weft) -> None:
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
    assert weft("dead", "drop", letter).out == "dropped 1\n"
    gone = weft("dead", "drop", letter, "--json")
    assert gone.status == 1
    assert gone.json == {
        "dropped": [],
        "failed": [{"letter_id": letter, "message": gone.err.split(": ", 1)[1].strip()}],
    }
    weft("submit", "caller", "wrong", "--task-id", "drop-2")
    assert weft("dead", "drop", "--all", "--task", "drop-2", "--json").json["dropped"]
    assert weft("dead", "list", "--task", "drop-2").out == "no dead letters\n"


@pytest.mark.parametrize("letter", ["12", "1-x", "7/1-1", "a/1-1", "--", ""])
def test_an_invalid_letter_id_is_reported(letter: str, weft: Weft) -> None:
    ended = weft("dead", "show", "--", letter)
    assert ended.status == 1
    assert "is not the id of a dead letter, as in 1731240000000-0" in ended.err


def test_a_rejected_event_is_mended_and_submitted_again(weft: Weft, desk: Desk) -> None:
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


# -- lag and doctor ------------------------------------------------------------------------------------------------


def test_lag_shows_streams_groups_and_totals(weft: Weft, desk: Desk) -> None:
    flag = desk.folder / "lag-flag"
    weft("submit", "blocked", str(flag), "--task-id", "lag-1", "--key", "k", "--no-wait")
    until(flag.with_name("lag-flag.begun").exists)
    weft("submit", "blocked", str(flag), "--task-id", "lag-2", "--key", "k", "--no-wait")
    found = weft("lag", "--json").json
    streams = {row["stream"]: row for row in found["streams"]}
    assert streams["tasks"]["group"] == "state-manager"
    assert (streams["agent"]["group"], streams["agent"]["pending"], streams["agent"]["backlog"]) == (
        "agent-handler",
        1,
        0,
    )
    assert streams["agent"]["oldest_pending_ms"] >= 0
    assert streams["tool"]["oldest_pending_ms"] is None
    assert {row["group"] for row in found["record"]} == {"state-manager", "trajectory-recorder"}
    assert (found["mailboxes"], found["mailbox_events"]) == (1, 1)
    assert found["timers"] >= found["timers_due"] == 0
    text = weft("lag").out
    assert "{0}:agent  agent-handler  0        1" in text
    assert "mailboxes     1 events in 1 mailboxes\n" in text
    assert "waits    for its turn in the mailbox of blocked/k\n" in weft("task", "show", "lag-2").out
    flag.touch()
    shown_with(weft, "lag-2", lambda view: view["status"] == "completed")


def test_tenants_have_settings(weft: Weft) -> None:
    assert weft("tenant", "set", "acme", "--weight", "2", "--max-open", "100", "--rate", "2.5").status == 0
    assert weft("tenant", "set", "*", "--max-open", "10").status == 0
    assert weft("submit", "echo", "x", "--tenant", "acme", "--priority", "9").out == "x\n"
    found = {row["tenant"]: row for row in weft("tenant", "list", "--json").json}
    assert found["acme"] == {
        "tenant": "acme", "weight": 2, "max_open": 100, "rate": 2.5, "open": 0, "waiting": 0,
    }  # fmt: skip
    assert (found["*"]["max_open"], found["*"]["rate"]) == (10, None)
    assert "acme    2       100       2.5   0     0" in weft("tenant", "list").out
    for name in ("acme", "*"):
        assert weft("tenant", "remove", name).status == 0
    ended = weft("tenant", "remove", "acme")
    assert (ended.status, ended.err) == (
        1,
        "weft tenant remove: tenant: 'acme' has no settings; see `weft tenant list`\n",
    )
    ended = weft("tenant", "set", "", "--max-open", "1")
    assert (ended.status, "the unnamed tenant cannot have limits" in ended.err) == (1, True)


def test_tasks_that_wait_for_turns_are_shown_and_repaired(weft: Weft, desk: Desk) -> None:
    """Submit them in a pool that nobody serves, so that they stay where they are."""
    with closing(desk.redis()) as server:
        ready = server.hget("weft:{0}:meta", "ready_max")
        assert ready == b"128"
        server.hset("weft:{0}:agents", "unserved", "agent:nobody")
        server.hset("weft:{0}:meta", "ready_max", 1)
        tasks = [f"turn-{number}" for number in range(12)]
        try:
            for task in tasks:
                weft("submit", "unserved", "--task-id", task, "--tenant", "acme", "--no-wait")
            until(lambda: server.xlen("weft:{0}:agent:nobody") == 9)
            assert weft("lag", "--json").json["waiting"] == {"acme": 3}
            assert "acme    3" in weft("lag").out
            assert "waits    for its tenant's turn to start unserved\n" in weft("task", "show", "turn-11").out
            [row] = weft("tenant", "list", "--json").json
            assert (row["tenant"], row["open"], row["waiting"]) == ("acme", 12, 3)
            assert "stuck" not in wrong_or_nothing(weft("doctor", "--json"))
            server.zrem("weft:{0}:queue:agent:nobody|acme", "turn-11")
            assert "task turn-11" in wrong(weft("doctor", "--json"))["stuck"]
            weft("doctor", "--repair")
            assert server.hget("weft:{0}:task:turn-11", "cur") != b"queue"
        finally:
            server.hset("weft:{0}:meta", "ready_max", 128)
            for task in tasks:
                weft("task", "cancel", task)
            server.hdel("weft:{0}:agents", "unserved")
            server.delete("weft:{0}:agent:nobody", "weft:{0}:queues", "weft:{0}:turns:agent:nobody")
            server.hdel("weft:{0}:meta", "queued")


def wrong_or_nothing(ended: Ended) -> dict[str, str]:
    return {check["check"]: check["message"] for check in ended.json["checks"] if not check["ok"]}


def test_the_doctor_finds_nothing_wrong(weft: Weft) -> None:
    ended = weft("doctor")
    assert ended.status == 0, ended.out
    assert ended.out.endswith("\nall checks passed\n")
    assert "✗" not in ended.out
    found = weft("doctor", "--json").json
    assert found["ok"] is True
    messages: dict[str, str] = {}
    for check in found["checks"]:
        messages.setdefault(check["check"], check["message"])
    assert messages["server"].startswith("Valkey ")
    assert "appendfsync everysec" in messages["persistence"]
    assert messages["namespace"] == "'weft' has 1 partition, format 1"
    assert "desk 7: agents approver, asker, " in messages["apps"]
    assert messages["consumers"] == "alive: 1 agent-handler, 1 state-manager, 1 tool-handler, 1 trajectory-recorder"
    assert {"maxmemory-policy", "memory", "clock", "functions", "ingress", "stuck", "deadlock"} <= messages.keys()


def wrong(ended: Ended) -> dict[str, str]:
    """Return which checks of the doctor failed, and why."""
    assert ended.status == 1
    return {check["check"]: check["message"] for check in ended.json["checks"] if not check["ok"]}


def test_the_doctor_sees_an_evicting_server(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert wrong(weft("doctor", "--json")).keys() == {"maxmemory-policy"}
            text = weft("doctor").out
        finally:
            server.config_set("maxmemory-policy", "noeviction")
    assert "✗ maxmemory-policy: allkeys-lru: the server may evict unfinished work\n" in text
    assert "    → CONFIG SET maxmemory-policy noeviction" in text


def test_the_doctor_names_what_a_server_without_a_file_loses(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.config_set("appendonly", "no")
        try:
            found = wrong(weft("doctor", "--json"))
        finally:
            server.config_set("appendonly", "yes")
    assert found == {"persistence": "appendonly is off: a restart of the server loses all data"}


def test_the_doctor_sees_an_empty_namespace(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", "empty")
    assert {"namespace", "consumers", "apps"} <= wrong(weft("doctor", "--json")).keys()


def test_the_doctor_reports_a_missing_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("✗ server: no broker: ")


def test_the_doctor_sees_another_trajectory_store(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weft("submit", "echo", "x", "--task-id", "cursor-1")
    shown_with(weft, "cursor-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    (tmp_path / "other.db").touch()
    monkeypatch.setenv("WEFT_TRAJECTORY_URL", f"sqlite:///{tmp_path}/other.db")
    found = wrong(weft("doctor", "--json"))
    assert found.keys() == {"trajectories"}
    assert "steps are missing" in found["trajectories"]


def test_the_doctor_removes_functions_of_other_releases(weft: Weft, desk: Desk) -> None:
    source = "#!lua name=weft_00000000\nredis.register_function('weft_00000000_old', function() return 1 end)"
    with closing(desk.redis()) as server:
        server.function_load(source)
        server.function_load(source.replace("weft_00000000", "other_00000000"))
        assert "weft_00000000 of other releases" in weft("doctor").out
        assert "removed weft_00000000" in weft("doctor", "--clean").out
        assert server.function_list("weft_00000000") == []
        assert server.function_list("other_00000000") != []
        server.function_delete("other_00000000")
    assert weft("submit", "echo", "still here").out == "still here\n"


def test_the_doctor_repairs_a_run_whose_entry_was_cut_out(weft: Weft, desk: Desk) -> None:
    flag = desk.folder / "cut-flag"
    weft("submit", "blocked", str(flag), "--task-id", "cut-1", "--key", "cut", "--no-wait")
    until(flag.with_name("cut-flag.begun").exists)
    with closing(desk.redis()) as server:
        entry = server.hget("weft:{0}:task:cut-1", "cur")
        assert isinstance(entry, bytes)
        assert server.xdel("weft:{0}:agent", entry) == 1
        server.xack("weft:{0}:agent", "agent-handler", entry)
    found = wrong(weft("doctor", "--json"))
    assert found == {"stuck": f"run r of task cut-1: its entry or timer ({entry.decode()}) is missing"}
    repaired = weft("doctor", "--repair")
    assert repaired.status == 0, repaired.out
    assert "repaired: run r of task cut-1" in repaired.out
    view = weft("task", "show", "cut-1", "--json").json
    assert (view["status"], view["error"]["type"]) == ("failed", "LostEntry")
    flag.touch()
    (letter,) = letters_of(weft, "cut-1")
    assert weft("dead", "redrive", letter, "--reopen").status == 0
    assert shown_with(weft, "cut-1", lambda view: view["status"] == "completed")["output"] == "unblocked"
    # The instance is free again.
    assert weft("submit", "blocked", str(flag), "--key", "cut").out == "unblocked\n"


def test_the_doctor_repairs_a_step_that_nothing_will_answer(weft: Weft, desk: Desk) -> None:
    weft("submit", "sleeper", "300", "--task-id", "cut-2", "--no-wait")
    shown_with(weft, "cut-2", lambda view: any("due" in wait for wait in view.get("waits_for", ())))
    with closing(desk.redis()) as server:
        assert server.zrem("weft:{0}:timers", "s|cut-2|r|1") == 1
    assert wrong(weft("doctor", "--json")) == {
        "stuck": "step r/1 of task cut-2: the call that would answer it is missing"
    }
    assert weft("doctor", "--repair").status == 0
    view = shown_with(weft, "cut-2", lambda view: view["status"] == "failed")
    assert "deleted from the broker" in view["error"]["message"]


def test_the_doctor_repairs_a_held_instance_and_a_forgotten_mailbox(weft: Weft, desk: Desk) -> None:
    with closing(desk.redis()) as server:
        server.hset("weft:{0}:inst:echo/held", "busy", "ghost|r")
        weft("submit", "echo", "at last", "--key", "held", "--task-id", "held-1", "--no-wait")
        assert wrong(weft("doctor", "--json")) == {
            "stuck": "instance echo/held is held by task ghost, which does not exist any more"
        }
        assert weft("doctor", "--repair").status == 0
        assert shown_with(weft, "held-1", lambda view: view["status"] == "completed")["output"] == "at last"

        server.hset("weft:{0}:inst:echo/held", "busy", "ghost|r")
        weft("submit", "echo", "again", "--key", "held", "--task-id", "held-2", "--no-wait")
        server.hdel("weft:{0}:inst:echo/held", "busy")
    assert "stuck" in wrong(weft("doctor", "--json"))
    assert weft("doctor", "--repair").status == 0
    assert shown_with(weft, "held-2", lambda view: view["status"] == "completed")["output"] == "again"


# -- schedules -----------------------------------------------------------------------------------------------------


def test_a_schedule_is_set_shown_started_and_removed(weft: Weft) -> None:
    said = weft("schedule", "set", "nightly", "echo", '{"a": 1}', "--cron", "0 3 * * *", "--timezone", "Asia/Tokyo")
    assert said.status == 0, said.err
    (listed,) = weft("schedule", "list", "--json").json
    assert (listed["schedule_id"], listed["input"], listed["timezone"]) == ("nightly", {"a": 1}, "Asia/Tokyo")
    assert "0 3 * * * Asia/Tokyo" in weft("schedule", "list").out
    task = weft("schedule", "run", "nightly").out.strip()
    assert shown_with(weft, task, lambda seen: seen["status"] == "completed")["output"] == {"a": 1}
    assert weft("schedule", "delete", "nightly").status == 0
    gone = weft("schedule", "delete", "nightly")
    assert (gone.status, gone.err.startswith("weft schedule delete: schedule_id: there is no schedule")) == (1, True)


def test_a_delayed_task_is_started_by_the_services(weft: Weft) -> None:
    assert weft("schedule", "set", "soon", "echo", '"hi"', "--delay", "0.2").status == 0
    until(lambda: weft("schedule", "list", "--json").json[0]["started"] == 1)
    task = weft("schedule", "list", "--json").json[0]["last_task_id"]
    assert shown_with(weft, task, lambda seen: seen["status"] == "completed")["output"] == "hi"
    assert weft("schedule", "delete", "soon").status == 0


def test_a_schedule_that_cannot_work_is_refused(weft: Weft) -> None:
    for arguments, field in (
        (["--cron", "* * *"], "data.cron"),
        (["--at", "soon"], "data.at"),
        (["--every", "60", "--timezone", "Mars/Base"], "data.timezone"),
    ):
        refused = weft("schedule", "set", "odd", "echo", *arguments)
        assert (refused.status, field in refused.err) == (1, True)


def test_a_task_that_asks_models_shows_usage_by_model_each_call_and_its_error_in_one_line(
    weft: Weft, desk: Desk
) -> None:
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
