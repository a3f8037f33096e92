"""Spans of turns, tools and model calls in a process with tracing; counts of model calls without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from runtime_core.runs.model_step import ModelCall
from weft import AgentContext, App
from weft.testing import LocalApp

PARENT = "0xb7ad6b7169203331"


def spans_of_program(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spans: list[dict[str, Any]] = json.loads(done.stdout)
    return spans


def lines_of(spans: list[dict[str, Any]]) -> Counter[str]:
    """Return the names of the spans, each after the names of its ancestors."""
    known = {span["context"]["span_id"]: span for span in spans}

    def line(span: dict[str, Any]) -> str:
        parent = known.get(span["parent_id"])
        return str(span["name"]) if parent is None else f"{line(parent)} > {span['name']}"

    return Counter(line(span) for span in spans)


def spans_of(input: str) -> list[dict[str, Any]]:
    spans = spans_of_program("tests.apps.traced_app", input)
    assert {span["context"]["trace_id"] for span in spans} == {"0x0af7651916cd43dd8448eb211c80319c"}
    return spans


def test_each_turn_has_a_span_that_is_the_parent_of_its_calls() -> None:
    found = spans_of("Ulm")
    spans = {span["context"]["span_id"]: span for span in found}
    turn = "send tasks > process agent > invoke_agent guide"
    assert sorted(lines_of(found).elements()) == [
        "send tasks",
        "send tasks > process agent",
        "send tasks > process agent",
        turn,
        turn,
        f"{turn} > chat gpt-x",
        f"{turn} > chat gpt-x",
        f"{turn} > process tool",
        f"{turn} > process tool > execute_tool look",
    ]
    sent = next(span for span in spans.values() if span["name"] == "send tasks")
    assert sent["parent_id"] == PARENT
    tool = next(span for span in spans.values() if span["name"] == "execute_tool look")
    assert tool["attributes"]["gen_ai.tool.call.id"] == "r/2"
    turns = [span for span in spans.values() if span["name"] == "process agent"]
    assert [link["context"]["span_id"] for span in turns for link in span["links"]] == [tool["context"]["span_id"]]
    assert {span["attributes"].get("gen_ai.conversation.id") for span in spans.values()} == {None, "s-1"}


def test_a_failed_turn_marks_its_span_as_failed() -> None:
    agent, turn = spans_of("fail")[-2:]
    assert (agent["name"], turn["name"]) == ("invoke_agent guide", "process agent")
    for span in (agent, turn):
        assert span["attributes"]["error.type"] == "RuntimeError"
        assert span["status"] == {"status_code": "ERROR", "description": "cannot go on"}


TURN = "send tasks > process agent > invoke_agent researcher"


def test_an_agent_of_pydantic_ai_has_spans_of_its_requests_to_the_model_and_of_its_tools() -> None:
    spans = spans_of_program("tests.integration.telemetry.traced_libraries", "pydantic")
    assert lines_of(spans) == {
        "send tasks": 1,
        "send tasks > process agent": 2,
        TURN: 2,
        f"{TURN} > chat gpt-x": 2,
        f"{TURN} > process tool": 1,
        f"{TURN} > process tool > execute_tool researcher.look": 1,
    }
    chat = next(span for span in spans if span["name"] == "chat gpt-x")
    told = {name: value for name, value in chat["attributes"].items() if not name.startswith("gen_ai.usage.")}
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "function",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.request.stream": True,
        "gen_ai.agent.name": "researcher",
        "gen_ai.conversation.id": "s-1",
        "gen_ai.output.type": "text",
        "gen_ai.response.model": "gpt-x",
        "gen_ai.response.finish_reasons": ["tool_call"],
    }
    assert chat["attributes"]["gen_ai.usage.output_tokens"] > 0


def test_spans_of_pydantic_ai_are_below_the_turn_and_not_duplicated() -> None:
    lines = lines_of(spans_of_program("tests.integration.telemetry.traced_libraries", "instrumented"))
    # The run is in each of its turns, in the second by a replay: what the first one did has its spans already.
    own = f"{TURN} > invoke_agent researcher"
    assert lines == {
        "send tasks": 1,
        "send tasks > process agent": 2,
        TURN: 2,
        f"{TURN} > process tool": 1,
        f"{TURN} > process tool > execute_tool researcher.look": 1,
        own: 2,
        f"{own} > chat gpt-x": 2,
        f"{own} > execute_tool look": 1,
    }


def test_a_runtime_message_continues_the_trace_of_its_program() -> None:
    worker = "process agent:worker > invoke_agent worker"
    lines = lines_of(spans_of_program("tests.integration.telemetry.traced_libraries", "runtime"))
    assert lines == {
        "the program": 1,
        "the program > send tasks": 1,
        "the program > send tasks > process agent:worker": 1,
        f"the program > send tasks > {worker}": 1,
        f"the program > send tasks > {worker} > answers": 1,
        f"the program > send tasks > {worker} > process agent:worker": 1,
        f"the program > send tasks > {worker} > {worker}": 1,
        f"the program > send tasks > {worker} > {worker} > hears": 1,
        "the program > send topics": 1,
        "the program > send topics > process agent:worker": 1,
        f"the program > send topics > {worker}": 1,
        f"the program > send topics > {worker} > hears": 1,
    }


def test_a_library_with_its_own_sdk_keeps_its_own_trace() -> None:
    lines = lines_of(spans_of_program("tests.integration.telemetry.traced_libraries", "own"))
    assert lines == {"the program": 1, "the program > answers": 1, "the program > hears": 2}


async def test_model_calls_are_counted_by_what_their_rows_say() -> None:
    app = App("counted")

    @app.agent("asker")
    async def asker(ctx: AgentContext, input: None) -> None:
        async def answered(request: object, call: ModelCall) -> str:
            call.spend(model="gpt-x-1", input_tokens=7, output_tokens=3, cached_tokens=2, cost=0.25)
            call.row(attributes={"gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-x"})
            return "an answer"

        async def put_off(request: object, call: ModelCall) -> object:
            call.row(error=("RateLimited", "too many"))
            return {"retry_after": 1, "error": {"type": "RateLimited", "message": "too many"}}

        await ctx.model("gpt-x", {}, answered)
        await ctx.sleep(0.01)
        await ctx.model("gpt-x", {}, answered)
        await ctx.model("small", {}, put_off)

    local = LocalApp(app)
    async with local as client:
        task = await client.submit("asker")
        assert (await task.result(timeout=30)).error is None
    shown = local.metrics.exposition().decode().splitlines()
    for line in (
        'weft_model_calls_total{model="gpt-x",outcome="answered",provider="openai"} 2.0',
        'weft_model_calls_total{model="small",outcome="RateLimited",provider=""} 1.0',
        'weft_model_call_seconds_count{model="gpt-x",provider="openai"} 2.0',
        'weft_model_tokens_total{model="gpt-x",type="input"} 14.0',
        'weft_model_tokens_total{model="gpt-x",type="output"} 6.0',
        'weft_model_tokens_total{model="gpt-x",type="cached"} 4.0',
        'weft_model_cost_total{model="gpt-x"} 0.5',
    ):
        assert line in shown
