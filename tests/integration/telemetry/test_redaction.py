"""Secrets reach the model and the tool, and nothing that is kept or shown: rows, errors, dead letters, logs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runtime_core.runs.model_step import ModelCall
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.telemetry import logs
from runtime_core.telemetry.redaction import Redactor, redactor, use
from runtime_core.wire.step import ENCODER
from weft import AgentContext, App, Reject, RetryPolicy, ToolContext
from weft.testing import LocalApp

KEY = "a plain word of mine"
PASSWORD = "open" + "sesame"
LEARNED = "a word of the code's own"
OWN = "CUSTOMER-4711"
SECRETS = (KEY, PASSWORD, LEARNED, OWN)

seen: list[object] = []
app = App("redaction")


@app.tool(retry=RetryPolicy(attempts=2, base_seconds=0.01))
def charge(ctx: ToolContext, account: str, api_key: str) -> dict[str, str]:
    seen.append((account, api_key))
    if account.startswith("bad"):
        raise ValueError(f"no account {OWN} at postgresql://me:{PASSWORD}@db with {KEY} and {LEARNED}")
    return {"password": PASSWORD, "account": account}


@app.agent("asker")
async def asker(ctx: AgentContext, input: dict[str, str]) -> object:
    redactor().learn(LEARNED)

    async def answer(request: object, call: ModelCall) -> dict[str, str]:
        seen.append(request)
        call.row(attributes={"gen_ai.request.model": f"m {LEARNED}"})
        return {"content": f"I know {KEY} and {LEARNED}"}

    said = await ctx.model("m", {"messages": [{"role": "user", "content": f"my key is {KEY}"}]}, answer)
    seen.append(said)
    done = await ctx.tool(charge, account=f"{OWN}", api_key="another")
    seen.append(done)
    if input["then"] == "tool":
        await ctx.tool(charge, account=f"bad {OWN}", api_key="another")
    if input["then"] == "reject":
        raise Reject(f"will not go on with {KEY}")
    raise RuntimeError(f"cannot go on with {KEY}")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", KEY)
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{PASSWORD}@db/x")
    monkeypatch.setenv("WEFT_REDACT", r"CUSTOMER-\d+")


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    """What a service would log, as it goes through both formats."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    file = tmp_path / "log"
    with file.open("w") as stream:
        logs.configure("test", "debug", "json", stream)
        text = logging.StreamHandler(stream)
        text.setFormatter(logs.TextFormatter("test"))
        root.addHandler(text)
        yield file
    root.handlers[:] = before[0]
    root.setLevel(before[1])


@pytest.mark.parametrize("then", ["tool", "fail", "reject"])
async def test_stored_data_has_no_secrets_and_running_code_has_them(known: None, lines: Path, then: str) -> None:
    seen.clear()
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("asker", {"then": then, "password": PASSWORD})
        response = await task.result(timeout=60)
        recorded = await local.recorded(task.task_id, timeout=60)
        letters = await DeadLetters(client.buses).newest(10)
        with use(Redactor.from_environment(os.environ, os.environ["WEFT_REDACT"])):
            redactor().learn(LEARNED)
            shown = [letter.without_secrets().details() for letter in letters]
    rows = ENCODER.encode([recorded.steps, recorded.end]).decode()
    errors = json.dumps([letter.errors for letter in letters] + [letter.error for letter in letters])
    for kept in (rows, errors, json.dumps(response.error), json.dumps(shown), lines.read_text()):
        assert [secret for secret in SECRETS if secret in kept] == []
        assert "another" not in kept
        assert "***" in kept or not letters
    kinds = {row.kind for row in recorded.steps}
    assert {"agent", "model", "tool"} <= kinds
    # Whoever works with them has got them.
    for secret in SECRETS:
        assert secret in str(seen)
    assert "another" in str(seen)
    # What is sent again is what was sent.
    assert any(PASSWORD.encode() in b"".join(letter.fields.values()) for letter in letters) or then != "fail"
    assert bool(letters) == (then != "reject")
    assert "***" in json.dumps(response.error)


async def test_an_answer_of_a_person_is_kept_without_its_secrets(known: None) -> None:
    people = App("people")

    @people.agent("guard")
    async def guard(ctx: AgentContext, input: None) -> str:
        answer = await ctx.human("the password?")
        seen.append(answer)
        return "thanks"

    seen.clear()
    local = LocalApp(people, trajectory=True)
    async with local as client:
        task = await client.submit("guard")
        async for event in task.stream():
            if event.type == "weft.human.requested":
                await task.signal(event.data["request_id"], f"it is {KEY}")
        await task.result(timeout=60)
        recorded = await local.recorded(task.task_id, timeout=60)
    assert seen == [f"it is {KEY}"]
    rows = ENCODER.encode(recorded.steps)
    assert KEY.encode() not in rows
    assert msgspec.json.encode("it is ***") in rows
