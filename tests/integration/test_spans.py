"""Spans of turns, tools and model calls in a process that traces; counts of model calls in one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from runtime_core import AgentContext, App
from runtime_core.agents.model_step import ModelCall
from runtime_core.testing.local import LocalApp

PARENT = "0xb7ad6b7169203331"


def spans_of(input: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.traced_app", input], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    spans: list[dict[str, Any]] = json.loads(done.stdout)
    assert {span["context"]["trace_id"] for span in spans} == {"0x0af7651916cd43dd8448eb211c80319c"}
    return spans


def test_each_turn_has_a_span_and_model_calls_are_under_their_turn() -> None:
    spans = spans_of("Ulm")
    first_call, first_turn, tool, second_call, second_turn = spans
    names = [span["name"] for span in spans]
    assert names == ["chat gpt-x", "invoke_agent guide", "execute_tool look", "chat gpt-x", "invoke_agent guide"]
    assert first_turn["parent_id"] == second_turn["parent_id"] == tool["parent_id"] == PARENT
    assert first_call["parent_id"] == first_turn["context"]["span_id"]
    assert second_call["parent_id"] == second_turn["context"]["span_id"]
    assert first_turn["attributes"]["gen_ai.conversation.id"] == "s-1"
    assert tool["attributes"]["gen_ai.tool.call.id"] == "r/2"


def test_a_turn_that_fails_says_so() -> None:
    turn = spans_of("fail")[-1]
    assert turn["attributes"]["error.type"] == "RuntimeError"
    assert turn["status"] == {"status_code": "ERROR", "description": "cannot go on"}


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
