"""An LLMAgent runs on pydantic-ai: how its answer is read, and what the model is sent."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, cast

import pytest
from pydantic import BaseModel, Field
from pydantic_ai.exceptions import ApprovalRequired
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import ToolDefinition

# pydantic reads the TypedDict of the standard library only from Python 3.12 on.
from typing_extensions import TypedDict

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.errors import ConfigurationError
from runtime_core.llm.conversation import MAX_REPORTED_ERRORS
from runtime_core.llm.failures import ConversationFailed
from runtime_core.llm.pydantic_ai.durability import FAIL_AT, WARN_AT, RepetitionGuard
from runtime_core.llm.toolset import FINAL
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import AgentDefinition, Coro
from tests.unit.runs.run_world import Program, World
from weft import App, LLMAgent


class Report(BaseModel):
    """A report on a city."""

    city: str
    year: int = Field(ge=1900)
    written: date


@dataclass
class Point:
    x: int
    y: int = 0


class Row(TypedDict):
    name: str


Say = Callable[[int], list[TextPart | ToolCallPart]]
"""The parts of an answer, by its number from 0."""


async def conversation(say: Say, **given: Any) -> tuple[Completed | Failed, list[Any], list[AgentInfo]]:
    """Return how an agent's run ends whose model answers like this, and the parts that the model was sent each time."""
    sent: list[Any] = []
    infos: list[AgentInfo] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        sent.append(messages[-1].parts)
        infos.append(info)
        return ModelResponse(parts=say(len(sent) - 1))

    app = App("unit")
    app.add_agent("one", LLMAgent(FunctionModel(model), stream=False, **given))
    return await World(functions=app.functions).play(Program(partial(_start, app.agents["one"]))), sent, infos


def _start(definition: AgentDefinition, ctx: AgentContext, value: object) -> Coro:
    return definition.start(ctx, definition.decode_input(b'"Go."'))


def final(arguments: Any) -> list[TextPart | ToolCallPart]:
    return [ToolCallPart(FINAL, arguments)]


@pytest.mark.parametrize(
    ("declared", "given", "read"),
    [
        (Report, {"city": "Bern", "year": 2024, "written": "2024-05-01"}, ...),
        (Point, {"x": 1}, {"x": 1, "y": 0}),
        (Row, {"name": "a"}, ...),
        (list[Row], {"response": [{"name": "a"}]}, [{"name": "a"}]),
        (int, {"response": 3}, 3),
        (str | None, {"response": None}, None),
    ],
)
async def test_an_answer_is_read_by_its_type(declared: object, given: Any, read: Any) -> None:
    result, _, infos = await conversation(lambda number: final(given), output=declared)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == (given if read is ... else read)
    [tool] = infos[0].output_tools
    assert (tool.name, tool.parameters_json_schema["type"]) == (FINAL, "object")


async def test_every_problem_is_reported_with_its_place() -> None:
    right = {"city": "Bern", "year": 2024, "written": "2024-05-01"}
    answers = [{"city": "Bern", "year": 1000}, right]
    result, sent, _ = await conversation(lambda number: final(answers[number]), output=Report)
    assert isinstance(result, Completed), result
    told = sent[1][0].content
    assert "output.year: Input should be greater than or equal to 1900, got 1000" in told
    assert "output.written: Field required" in told


async def test_the_correction_of_a_wrong_answer_has_bounded_length() -> None:
    answers = [{"response": ["x" * 50] * 10_000}, {"response": [1]}]
    result, sent, _ = await conversation(lambda number: final(answers[number]), output=list[int])
    assert isinstance(result, Completed), result
    told = sent[1][0].content
    assert len(told) < 400 * MAX_REPORTED_ERRORS
    assert re.search(r"; and \d{4} more;", told)


@pytest.mark.parametrize("text", ['{"x": 1, "y": 2}', '```json\n{"x": 1, "y": 2}\n```'])
async def test_a_text_answer_may_be_in_a_code_fence(text: str) -> None:
    result, _, _ = await conversation(lambda number: [TextPart(text)], output=Point, output_mode="text")
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == {"x": 1, "y": 2}


async def test_an_answer_that_stays_empty_ends_the_conversation() -> None:
    result, sent, _ = await conversation(lambda number: [TextPart(" ")], output_retries=1)
    assert isinstance(result, Failed), result
    assert result.type == "OutputInvalid"
    assert "after 2 attempts (output_retries=1)" in result.message
    assert len(sent) == 2


async def test_an_invalid_call_is_reported_after_the_second_attempt() -> None:
    answers: list[list[TextPart | ToolCallPart]]
    answers = [[ToolCallPart("find", "{", "1")], [ToolCallPart("find", {}, "2")], [TextPart("Sorry.")]]
    result, sent, _ = await conversation(lambda number: answers[number], tool_retries=2)
    assert isinstance(result, Completed), result
    assert [parts[0].content for parts in sent[1:]] == ["there is no tool named 'find'; the tools are: none"] * 2


async def test_the_decision_about_a_call_stays_with_its_answer() -> None:
    """Another deploy offers no tools; the journaled answer calls an earlier tool, and its result is used."""
    answers: list[list[TextPart | ToolCallPart]] = [[ToolCallPart("look", {"at": "it"}, "1")], [TextPart("Done.")]]
    world = World(cold=True)
    for tools in (["look"], []):
        app = App("unit")

        @app.tool
        def look(at: str) -> str:
            return at

        def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            return ModelResponse(parts=answers[sum(message.kind == "response" for message in messages)])

        app.add_agent("one", LLMAgent(FunctionModel(model), stream=False, tools=tools))
        definition = app.agents["one"]
        world.functions = app.functions
        run = Program(partial(_start, definition))
        if tools:
            assert isinstance(await world.turn(run), Suspended), "it waits for the tool"
            assert world.run is not None
            await world.run.aclose()
            world.run = None
    assert [name for _, _, name, _ in world.asked] == ["look"]
    world.answer_one()
    result = await world.play(run)
    assert isinstance(result, Completed), result
    assert result.output == b'"Done."'


async def test_a_call_that_is_approved_counts_once_among_repeated_ones() -> None:
    guarding = RepetitionGuard("agent 'a'")

    async def ask(args: object) -> object:
        raise ApprovalRequired

    async def do(args: object) -> object:
        return "done"

    async def wrap(number: int, handler: Any) -> object:
        call = ToolCallPart("pay", {"amount": 1}, str(number))
        return await guarding.wrap_tool_execute(
            cast("Any", None), call=call, tool_def=ToolDefinition(name="pay"), args={}, handler=handler
        )

    for number in range(1, FAIL_AT):
        with pytest.raises(ApprovalRequired):
            await wrap(number, ask)
        result = await wrap(number, do)
        assert (result == "done") == (number < WARN_AT)
    with pytest.raises(ConversationFailed, match="6 times in a row"):
        await wrap(FAIL_AT, ask)


async def test_without_the_extra_the_run_ends_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError("No module named 'pydantic_ai'", name="pydantic_ai")

    monkeypatch.setattr(importlib, "import_module", missing)
    result, _, _ = await conversation(lambda number: [TextPart("Never.")])
    assert isinstance(result, Failed), result
    assert (result.type, result.message) == (
        "ConfigurationError",
        "agent 'one' needs pydantic_ai, which is not installed: pip install 'weft[llm]'",
    )


def test_a_type_without_a_schema_is_refused_where_it_is_declared() -> None:
    app = App("unit")
    with pytest.raises(ConfigurationError, match=r"agent 'a' \(.*test_conversation\.py:\d+\) has output="):
        app.add_agent("a", LLMAgent("openai-chat:m", output=object()))
