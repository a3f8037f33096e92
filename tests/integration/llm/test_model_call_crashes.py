"""A process dies at any write of a model call: the answer is the same, and paid for twice only if it must be."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.consumer.effects import Completed
from runtime_core.llm.attempt import messages_json
from runtime_core.llm.model_call import ask_model
from runtime_core.llm.tokens import said
from tests.integration.llm.asking import asker
from tests.openai_server.driver import OpenAIServer, Usage, answer, calls, failing, turns
from tests.unit.runs.run_world import Program, World
from weft import AgentContext, App


@pytest.mark.slow
async def test_a_crash_at_any_write_changes_nothing_of_the_answer(openai_server: OpenAIServer) -> None:
    used = Usage(input=10, output=2)
    openai_server.play(
        failing(503, times=1), turns(calls(("look", {"at": "it"}), usage=used), answer("Right.", usage=used))
    )
    functions = App("crashes").functions
    model = asker(openai_server).model

    async def code(ctx: AgentContext, prompt: str) -> list[str]:
        first = await ask_model(ctx, model, [said(prompt)], name="first")
        result = {
            "part_kind": "tool-return",
            "tool_name": "look",
            "content": "seen",
            "tool_call_id": first.tool_calls[0].tool_call_id,
            "timestamp": ctx.now().isoformat(),
        }
        messages = [said(prompt), messages_json([first])[0], {"kind": "request", "parts": [result]}]
        second = await ask_model(ctx, model, messages, name="second")
        return [first.tool_calls[0].tool_name, second.text or ""]

    async def played(prompt: str, **crash: Any) -> tuple[World, int]:
        world = World(functions=functions, cold=True, **crash)
        result = await world.play(Program(code), prompt)
        assert isinstance(result, Completed), result
        assert result.output == b'["look","Right."]'
        complete = [
            entry for entry in openai_server.ledger(conversation=prompt[1:-1]) if entry.answer and entry.complete
        ]
        return world, len(complete)

    try:
        whole, complete = await played("[c-whole]")
        assert complete == 2
        repeated = 0
        for write in range(1, whole.writes):  # the last one is the end of the run
            after, complete = await played(f"[c-after-{write}]", crash_at=write)
            assert complete == 2, f"what was kept is not asked again (write {write})"
            assert after.used == whole.used
            before, complete = await played(f"[c-before-{write}]", crash_at=write, crash_before=True)
            assert before.used == whole.used
            repeated += complete - 2
        assert repeated == 2, "each of the two answers is asked for again only where it came and was not kept"
    finally:
        await functions.models.close()
