"""A pydantic-ai agent in a run: the names of its steps, replay from each prefix of the journal, deps, refusals."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import ApprovalRequired, ModelRetry
from pydantic_ai.messages import ModelMessage, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

from runtime_core.app.app import App
from runtime_core.consumer.effects import Completed, Failed, TurnResult
from runtime_core.declare.tool import AbandonedThreads, ToolContext
from runtime_core.errors import InvalidInput
from runtime_core.llm.pydantic_ai.definition import PydanticAgent
from runtime_core.llm.pydantic_ai.durability import CARRIED
from runtime_core.runs.journal import pack
from runtime_core.wire.step import RESULT_ERROR, RESULT_OK, Step
from tests.unit.runs.run_world import World


@dataclass
class Deps:
    user: str


requests: list[int] = []
done: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    requests.clear()
    done.clear()


async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
    """Three tool calls at once, one of which is repeated; then a payment; then the answer."""
    requests.append(len(messages))
    match len(messages):
        case 1:
            for place in range(3):
                call = DeltaToolCall(name="look", json_args=json.dumps({"place": place}), tool_call_id=f"look-{place}")
                yield {place: call}
        case 3:
            yield {0: DeltaToolCall(name="look", json_args='{"place": 9}', tool_call_id="again")}
            yield {1: DeltaToolCall(name="pay", json_args='{"amount": 5}', tool_call_id="pay")}
        case _:
            parts = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
            yield "Found: "
            yield ", ".join(str(part.content) for part in parts)


def sample() -> tuple[App, PydanticAgent]:
    agent = Agent(FunctionModel(stream_function=model), name="own-name", deps_type=Deps, retries=2)

    @agent.tool
    async def look(ctx: RunContext[Deps], place: int) -> str:
        done.append(f"look {place}")
        if place == 2:
            raise ModelRetry("not there: look elsewhere")
        return f"{ctx.deps.user} sees {place}"

    @agent.tool
    def pay(ctx: RunContext[Deps], amount: int) -> str:
        if not ctx.tool_call_approved:
            raise ApprovalRequired
        done.append(f"pay {amount}")
        return f"paid {amount}"

    app = App("sample")
    app.add_pydantic_agent("researcher", agent)
    definition = app.agents["researcher"]
    assert isinstance(definition, PydanticAgent)
    return app, definition


class ToolWorld(World):
    """A world whose app runs the tools, as a tool-handler does."""

    app: App
    threads: ThreadPoolExecutor

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.model_rows: list[Step] = []

    def commit(self, result: TurnResult) -> None:
        self.model_rows += [row for row in result.steps if row.kind == "model"]
        super().commit(result)

    async def answer_here(self, step: str) -> None:
        kind, name, data = self.open[step]
        if kind != "tool":
            self.answer_one(step)
            return
        del self.open[step]
        digest = self.pending.pop(step)
        context = ToolContext(task_id="t-1", run_id=f"r/{step}")
        try:
            result = await self.app.tools[name].call(
                json.dumps(data).encode(), context, self.threads, AbandonedThreads()
            )
            self.journal[step] = pack(digest, RESULT_OK, self._tick(), result)
        except Exception as error:
            told = json.dumps({"type": type(error).__name__, "message": str(error)}).encode()
            self.journal[step] = pack(digest, RESULT_ERROR, self._tick(), told)
        if self.run is not None:
            self.run.deliver(step, self.journal[step])

    async def play_agent(self, definition: PydanticAgent, input: object) -> Completed | Failed:
        while True:
            result = await self.turn(definition, input)  # type: ignore[arg-type]  # a definition is a program
            if isinstance(result, Completed | Failed):
                return result
            if self.cold:
                assert self.run is not None
                await self.run.aclose()
                self.run = None
            while not self.awake():
                choices = list(self.open)
                await self.answer_here(self.order.choice(choices) if self.order else choices[0])


async def play(journal: dict[str, bytes] | None = None, **more: Any) -> tuple[Completed | Failed, ToolWorld]:
    app, definition = sample()
    world = ToolWorld(functions=app.functions, **more)
    world.app = app
    world.journal = dict(journal or {})
    with ThreadPoolExecutor(2) as world.threads:
        result = await world.play_agent(definition, {"prompt": "Look.", "deps": {"user": "ann"}})
    return result, world


FOUND = "Found: ann sees 0, ann sees 1, not there: look elsewhere, ann sees 9, paid 5"


async def test_the_names_of_the_steps_are_pinned() -> None:
    """They are stored with each run: other names would park running work."""
    result, world = await play()
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == FOUND
    assert sorted((step, kind, name) for step, kind, name, _ in world.asked) == [
        ("1.3.148457176.1", "tool", "researcher.look"),
        ("1.3.259911222.1", "tool", "researcher.look"),
        ("1.3.41679144.1", "tool", "researcher.look"),
        ("1.5.185318349.1", "tool", "researcher.pay"),
        ("1.5.222845545.1", "tool", "researcher.pay"),
        ("1.5.47588383.1", "tool", "researcher.look"),
        ("1.5.52887520.1", "human", "May researcher call pay?"),
    ]
    assert sorted((step, kind) for kind, step, _, _ in world.rows) == [
        ("1.2.136159511.2", "model"),
        ("1.4.186857791.2", "model"),
        ("1.6.45124444.2", "model"),
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cold", [False, True])
async def test_every_order_of_results_does_the_same_work_once(seed: int, cold: bool) -> None:
    result, world = await play(order=random.Random(seed), cold=cold)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == FOUND
    assert requests == [1, 3, 5]
    assert sorted(done) == ["look 0", "look 1", "look 2", "look 9", "pay 5"]
    # Suspended for the looks, for the second look and the payment, for the human, for the payment again.
    assert world.turns == 5 or not cold


async def test_each_prefix_of_the_journal_leads_to_the_same_end() -> None:
    result, world = await play()
    assert isinstance(result, Completed), result
    written = list(world.journal.items())
    models = [step for step, _ in written if step in world.recorded]
    assert len(models) == 3
    for length in range(len(written) + 1):
        requests.clear()
        done.clear()
        again, _ = await play(dict(written[:length]), cold=bool(length % 2))
        assert isinstance(again, Completed), again
        assert again.output == result.output
        kept = [step for step, _ in written[:length]]
        assert len(requests) == 3 - sum(step in models for step in kept), "asked again though the answer was journaled"


async def test_the_text_is_streamed_and_the_usage_reported() -> None:
    result, world = await play()
    assert isinstance(result, Completed), result
    assert "".join(str(piece) for _, _, piece in world.streamed) == FOUND


async def test_requests_are_recorded_with_the_same_bytes_for_the_same_messages() -> None:
    """This holds if another process has replayed the earlier part: no message contains its clock."""
    _, world = await play(cold=True)
    recorded = [json.loads(bytes(row.input)) for row in world.model_rows]
    assert [len(request["messages"]) for request in recorded] == [1, 3, 5]
    for shorter, longer in itertools.pairwise(recorded):
        assert longer["messages"][: len(shorter["messages"])] == shorter["messages"]
    assert [tool["name"] for tool in recorded[0]["tools"]] == ["look", "pay"]


@pytest.mark.parametrize(
    ("input", "field"),
    [({"prompt": "x", "more": 1}, "input.more"), (7, "input.prompt"), ([{"kind": "no"}], "input.prompt")],
)
def test_a_wrong_input_is_refused_by_its_field(input: object, field: str) -> None:
    _, definition = sample()
    with pytest.raises(InvalidInput) as refused:
        definition.decode_input(json.dumps(input).encode())
    assert refused.value.field == field


async def test_a_tool_event_without_its_run_is_refused() -> None:
    app, _ = sample()
    context, tool = ToolContext(task_id="t", run_id="r/1"), app.tools["researcher.look"]
    with ThreadPoolExecutor(1) as threads, pytest.raises(InvalidInput, match=CARRIED):
        await tool.call(b'{"place": 1}', context, threads, AbandonedThreads())
