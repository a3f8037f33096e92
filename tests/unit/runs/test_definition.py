"""How agents read their input, start, keep their state and write their output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from runtime_core.app.app import App
from runtime_core.declare.declaration import Agent
from runtime_core.errors import InvalidInput
from runtime_core.runs.definition import handles
from tests.unit.runs.fake_context import context, run

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class Facts(BaseModel):
    topic: str
    facts: list[str] = []


@dataclass
class Praise:
    text: str


async def test_a_function_agent_takes_no_input_or_one_with_a_default() -> None:
    app = App("test")

    @app.agent("none")
    async def none(ctx: AgentContext) -> str:
        return "ran"

    @app.agent("default")
    async def default(ctx: AgentContext, facts: Facts = Facts(topic="standard")) -> str:  # noqa: B008  # never written
        return facts.topic

    app.check()

    assert await run(app.agents["none"], None) == "ran"
    with pytest.raises(InvalidInput, match=r"^input: agent 'none' takes no input: remove it$"):
        app.agents["none"].decode_input(b'"x"')
    assert await run(app.agents["default"], None) == "standard"
    assert await run(app.agents["default"], {"topic": "own"}) == "own"
    schema = app.agents["default"].input_schema()
    assert schema["anyOf"][1] == {"type": "null"}  # type: ignore[index]  # JSON


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b'{"topic": 5}', "input.topic: Input should be a valid string, got 5"),
        (b'{"topic": "a", "facts": [1]}', "input.facts.0: Input should be a valid string, got 1"),
        (b"{}", "input.topic: is missing"),
        (b'{"topik": "x"}', "input.topic: is missing; there is 'topik'"),
        (b"nonsense", "input: Invalid JSON"),
    ],
)
def test_wrong_input_is_refused_by_field(data: bytes, refusal: str) -> None:
    app = App("test")

    @app.agent("a")
    async def a(ctx: AgentContext, facts: Facts) -> None: ...

    with pytest.raises(InvalidInput) as refused:
        app.agents["a"].decode_input(data)

    assert str(refused.value).startswith(refusal)


def test_output_that_json_cannot_hold_names_the_field() -> None:
    app = App("test")

    @app.agent("a")
    async def a(ctx: AgentContext) -> None: ...

    with pytest.raises(InvalidInput, match=r"^output: object cannot be written"):
        app.agents["a"].encode_output(object())


class Desk(Agent):
    state = {"seen": [], "count": 0}  # noqa: RUF012  # what a new key starts with; never written

    def __init__(self) -> None:
        self.fresh = True

    @handles(Facts)
    async def on_facts(self, message: Facts, ctx: AgentContext) -> object:
        assert self.fresh
        self.fresh = False
        seen = ctx.state["seen"]
        seen.append(message.topic)
        return seen

    @handles(Praise)
    @handles(str)
    async def on_words(self, message: Praise | str, ctx: AgentContext) -> str:
        return message if isinstance(message, str) else message.text


async def test_a_class_agent_picks_the_handler_by_the_messages_type() -> None:
    app = App("test")
    app.add_agent("desk", Desk)
    app.check()
    desk = app.agents["desk"]

    assert await run(desk, {"type": "Praise", "data": {"text": "good"}}) == "good"
    assert await run(desk, {"type": "str", "data": "plain"}) == "plain"
    assert await run(desk, json.loads(desk.encode_input(Praise("fine")))) == "fine"
    for data, refusal in [
        (
            b'{"type": "Blame", "data": {}}',
            "input.type: agent 'desk' handles no 'Blame': it handles Facts, str, Praise",
        ),
        (b'{"topic": "x"}', 'input: agent \'desk\' takes {"type": …, "data": …} with a type of Facts, str, Praise'),
        (b'{"type": "Facts", "data": {}}', "input.data.topic: is missing"),
        (b"[", "input: agent 'desk' takes"),
    ]:
        with pytest.raises(InvalidInput) as refused:
            desk.decode_input(data)
        assert str(refused.value).startswith(refusal)


async def test_state_begins_with_the_classs_and_lives_in_the_context() -> None:
    app = App("test")
    app.add_agent("desk", Desk)
    held: dict[str, object] = {"count": 7}
    ctx = context(held)

    assert await run(app.agents["desk"], {"type": "Facts", "data": {"topic": "a"}}, ctx) == ["a"]
    assert await run(app.agents["desk"], {"type": "Facts", "data": {"topic": "b"}}, ctx) == ["a", "b"]

    assert held == {"count": 7, "seen": ["a", "b"]}
    assert Desk.state == {"seen": [], "count": 0}


async def test_with_a_single_handler_the_data_may_be_untagged() -> None:
    class Typed(BaseModel):
        type: str
        data: int

    class One(Agent):
        @handles(Typed)
        async def on_it(self, message: Typed, ctx: AgentContext) -> list[object]:
            return [message.type, message.data]

    app = App("test")
    app.add_agent("one", One)

    assert await run(app.agents["one"], {"type": "x", "data": 3}) == ["x", 3]
    assert await run(app.agents["one"], {"type": "Typed", "data": {"type": "y", "data": 4}}) == ["y", 4]
