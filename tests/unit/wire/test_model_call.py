"""Reading recorded model calls: answers for items and the tree, and usage after a crash."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from runtime_core.client.fork import runs_of
from runtime_core.consumer.effects import Completed
from runtime_core.runs.context import AgentContext
from runtime_core.runs.journal import usage_and_attributes
from runtime_core.runs.model_step import ModelCall
from runtime_core.telemetry.secret_search import HIDDEN
from runtime_core.trajectory.items import DefaultTrajectoryStrategy
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import render, to_tree
from runtime_core.wire.model_call import (
    answer_of,
    content_of,
    is_model_call,
    tool_calls_of,
    usage_of,
)
from runtime_core.wire.step import NOTHING, Step, StepFailure, TaskEnd
from tests.unit.runs.run_world import Program, World

QUESTION = {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "Where is Ulm?"}]}
ANSWER: dict[str, Any] = {
    "message": {
        "kind": "response",
        "parts": [
            {"part_kind": "thinking", "content": "look it up"},
            {"part_kind": "text", "content": "I look."},
            {"part_kind": "tool-call", "tool_name": "look", "args": '{"q":"Ulm"}', "tool_call_id": "c1"},
            {"part_kind": "tool-call", "tool_name": "look", "args": {"q": 2}, "tool_call_id": "c2"},
            {"part_kind": "tool-call", "tool_name": "bad", "args": '{"q"', "tool_call_id": "c3"},
        ],
        "provider_response_id": "r-1",
    },
    "finish_reason": "tool_call",
    "usage": {"input_tokens": 1204, "output_tokens": 56, "tokens": 1260, "requests": 1, "cost": 0.00314},
    "provider": "openai",
    "model": "gpt-x-1",
    "seconds": 0.8,
}
PUT_OFF = {"retry_after": 2.5, "error": {"type": "RateLimited", "message": "too many"}}


def json_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def call(path: str, output: object, **changes: object) -> Step:
    plain = Step(run="r", step=path, kind="model", name="gpt-x", status="completed", started=100, ended=900)
    plain.input = json_of({"messages": [QUESTION], "model": "gpt-x", "settings": {}})
    plain.output = NOTHING if output is ... else json_of(output)
    return msgspec.structs.replace(plain, **changes)


def of(*steps: Step) -> TaskTrajectory:
    run = Step(run="r", kind="agent", name="guide", status="completed", started=50, ended=2000)
    end = TaskEnd("t", "completed", "guide", 1 + len(steps), 0.0, 2000.0)
    return TaskTrajectory("weft", "t", end, [run, *steps])


def test_an_answer_is_read_from_its_message() -> None:
    step = call("1", ANSWER)
    answer = answer_of(step)
    assert answer is not None
    assert (answer.text, answer.thinking) == ("I look.", "look it up")
    assert (answer.model, answer.provider, answer.finish_reason, answer.seconds) == (
        "gpt-x-1",
        "openai",
        "tool_call",
        0.8,
    )
    assert content_of(step) == "I look."
    assert tool_calls_of(step) == [
        {"id": "c1", "type": "function", "name": "look", "arguments": {"q": "Ulm"}},
        {"id": "c2", "type": "function", "name": "look", "arguments": {"q": 2}},
        {"id": "c3", "type": "function", "name": "bad", "arguments": '{"q"'},
    ]
    assert usage_of(step)["input_tokens"] == 1204


@pytest.mark.parametrize(
    "output",
    [
        None,
        "text",
        [ANSWER],
        {"message": "text"},
        {"message": {"content": "an answer of another client"}},
        {"retry_after": None},
        {"message": {"kind": "response"}, "usage": "many"},
        {"message": {"kind": "response", "parts": 3}, "seconds": "long"},
    ],
)
def test_other_results_have_no_model_answer(output: object) -> None:
    step = call("1", output)
    assert answer_of(step) is None
    assert is_model_call(step)
    render(of(step))


def test_a_message_with_unknown_parts_has_an_empty_answer() -> None:
    answer = answer_of(call("1", {"message": {"kind": "response", "parts": [3, {}, {"part_kind": "text"}]}}))
    assert answer is not None
    assert (answer.text, answer.tool_calls, answer.shown) == ("", [], None)


def test_an_item_has_the_answer_and_postponed_calls_have_none() -> None:
    reserved = call("2", None, status="failed", error=StepFailure("Reserved", "others hold it"))
    items = DefaultTrajectoryStrategy().items(of(call("1", PUT_OFF), reserved, call("3", ANSWER)))
    (item,) = items
    assert item.meta.step_id == "3"
    assert item.state.messages == [QUESTION]
    assert item.action.content == "I look."
    assert [each["name"] for each in item.action.tool_calls] == ["look", "look", "bad"]
    assert item.action.usage["tokens"] == 1260
    told = {name: item.action.ext_info[name] for name in ("model", "provider", "finish_reason", "thinking")}
    assert told == {
        "model": "gpt-x-1",
        "provider": "openai",
        "finish_reason": "tool_call",
        "thinking": "look it up",
    }


def test_the_tree_has_a_readable_line_for_each_call() -> None:
    first = call("1", PUT_OFF)
    failed = call(
        "2",
        ...,
        input=json_of("asked"),
        status="failed",
        error=StepFailure("ModelFailed", "openai refused the key"),
    )
    answered = call("3", ANSWER, usage={"tokens": 1260, "input_tokens": 1204, "output_tokens": 56, "cost": 0.00314})
    last = call("4", {**ANSWER, "message": {"kind": "response", "parts": [{"part_kind": "text", "content": "Here."}]}})
    lines = render(of(first, failed, answered, last)).splitlines()
    assert lines[2:6] == [
        "   ├─ ○ model gpt-x  step 1  completed  800.0 ms  retry in 2.5 s  Where is Ulm?  ✗ RateLimited: too many",
        '   ├─ ○ model gpt-x  step 2  failed  800.0 ms  "asked"  ✗ ModelFailed: openai refused the key',
        "   ├─ ○ model gpt-x  step 3  completed  800.0 ms  gpt-x-1  1204 → 56 tokens, 0.00314 cost  tool_call  "
        'Where is Ulm? → I look. look({"q":"Ulm"}) look({"q":2}) bad("{\\…',
        "   └─ ○ model gpt-x  step 4  completed  800.0 ms  gpt-x-1  1204 → 56 tokens, 0.00314 cost  tool_call  "
        "Where is Ulm? → Here.",
    ]
    answered.attributes = {"gen_ai.provider.name": "openai"}
    node = to_tree(of(answered))["runs"][0]["children"][0]
    assert node["attributes"] == {"gen_ai.provider.name": "openai"}


def test_a_result_alone_says_usage_and_attributes() -> None:
    usage, attributes = usage_and_attributes(msgspec.json.encode(ANSWER))
    assert usage == ANSWER["usage"]
    assert attributes["gen_ai.response.id"] == "r-1"
    assert attributes["gen_ai.response.finish_reasons"] == ["tool_call"]
    assert usage_and_attributes(msgspec.json.encode(PUT_OFF)) == ({}, {"error.type": "RateLimited"})
    assert usage_and_attributes(b'{"message":1}') == usage_and_attributes(b"[1]") == ({}, {})


async def test_a_call_whose_process_died_after_its_answer_is_recorded_by_its_result() -> None:
    async def answer(request: object, call: ModelCall) -> object:
        call.row(attributes={"gen_ai.request.model": "gpt-x"})
        return ANSWER

    async def code(ctx: AgentContext, _: object) -> object:
        first = await ctx.model("gpt-x", {"messages": [QUESTION]}, answer, identity={"call": 1})
        return [first, await ctx.model("gpt-x", {"messages": [QUESTION]}, answer)]

    world = World()
    lived = await world.play(code)
    assert isinstance(lived, Completed)
    digest = world.journal["1"][:8].decode()
    assert [row.attributes for row in lived.steps] == [
        {"gen_ai.request.model": "gpt-x", "weft.digest": digest},
        {"gen_ai.request.model": "gpt-x"},
    ]
    result = await world.new_run(Program(code), unrecorded=["1", "2"]).advance()
    assert [row.usage for row in result.steps] == [ANSWER["usage"], ANSWER["usage"]]
    assert [row.attributes.get("weft.digest") for row in result.steps] == [digest, None]
    assert [row.attributes["gen_ai.response.id"] for row in result.steps] == ["r-1", "r-1"]


def test_a_replay_finds_a_call_by_its_own_digest_and_what_was_redacted_by_its_name() -> None:
    plain = call("1", ANSWER)
    named = call("2", ANSWER, attributes={"weft.digest": "12345678"})
    hidden = call("3", ANSWER)
    hidden.input = json_of({"messages": [HIDDEN]})
    steps = runs_of(of(plain, named, hidden))["r"].steps
    assert steps["2"].digest == "12345678"
    assert steps["1"].digest not in (steps["2"].digest, steps["3"].digest)
    assert steps["3"].digest.encode() == steps["3"].wildcard[:8]
    assert json.loads(steps["1"].payload)["model"] == "gpt-x-1"
