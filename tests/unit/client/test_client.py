"""Valid arguments of `Client.submit`, and the error for each mistake."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from runtime_core.wire.codec import MAX_DATA_BYTES
from weft import Agent, AgentContext, App, Client, SubmitOptions, handles
from weft.errors import InvalidInput
from weft.testing import LocalApp

app = App("options")


@app.agent("greeter")
async def greet(ctx: AgentContext, name: str) -> str:
    return f"Hello, {name}"


@app.agent("whose")
async def whose(ctx: AgentContext) -> list[object]:
    return [ctx.tenant, ctx.metadata, ctx.engine().name]


@app.agent("first")
@app.agent("second")
async def twice(ctx: AgentContext) -> None: ...


async def undeclared(ctx: AgentContext) -> None: ...


@dataclass
class Add:
    number: int


class Adder(Agent):
    @handles(Add)
    async def add(self, message: Add, ctx: AgentContext) -> int:
        return message.number + 1


app.add_agent("adder", Adder)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with LocalApp(app) as connected:
        yield connected


async def test_an_agent_is_named_by_its_name_its_function_or_its_class(client: Client) -> None:
    for task in (await client.submit("greeter", "Ann"), await client.submit(greet, "Ann")):
        assert (await task.result(timeout=60)).value() == "Hello, Ann"
    assert (await (await client.submit(Adder, {"number": 2})).result(timeout=60)).value() == 3


async def test_a_new_task_id_begins_with_the_time(client: Client) -> None:
    before = time.time_ns() // 1_000_000
    task = await client.submit("greeter", "Ann")
    assert before <= int(task.task_id[:12], 16) <= time.time_ns() // 1_000_000
    assert (await task.result(timeout=60)).value() == "Hello, Ann"


async def test_a_function_and_its_name_are_the_same_submit(client: Client) -> None:
    one = await client.submit(greet, "Ann", task_id="t-1")
    assert (await client.submit("greeter", "Ann", task_id="t-1")).task_id == one.task_id


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, 0),
        ({"timeout": 300}, 0),
        ({"timeout": 301}, 1),
        ({"timeout": None}, 1),
        ({"task_id": "t-1"}, 1),
        ({"options": SubmitOptions(event_id="e-1")}, 1),
    ],
    ids=str,
)
async def test_only_a_random_id_that_is_not_repeated_for_long_has_no_place_in_the_dedupe_window(
    client: Client, given: dict[str, Any], kept: int
) -> None:
    task = await client.submit("greeter", "Ann", **given)
    assert (await task.result(timeout=60)).value() == "Hello, Ann"
    assert await task.bus.transport.call("HLEN", task.bus.keys.submits) == kept


async def test_options_reach_the_agent(client: Client) -> None:
    options = SubmitOptions(tenant="acme", metadata={"order": 7}, engine="local", timeout_seconds=60, max_steps=9)
    task = await client.submit(whose, options=options)
    assert (await task.result(timeout=60)).value() == ["acme", {"order": 7}, "local"]


async def test_a_schedule_takes_the_same_options(client: Client) -> None:
    options = SubmitOptions(tenant="acme", metadata={"order": 7}, priority=9)
    schedule = await client.schedule("later", whose, delay=3600, key="k", options=options)
    assert schedule.tenant == "acme"
    assert schedule.task == {
        "agent": "whose",
        "input": None,
        "key": "k",
        "conf": {"priority": 9},
        "metadata": {"order": 7},
    }
    for given in (SubmitOptions(event_id="e"), SubmitOptions(traceparent="00-1")):
        with pytest.raises(InvalidInput, match="a schedule starts many: remove it"):
            await client.schedule("later", whose, delay=3600, options=given)


async def test_a_fork_takes_the_same_options(client: Client) -> None:
    task = await client.submit(whose)
    await task.result(timeout=60)
    fork = await client.fork(task.task_id, options=SubmitOptions(tenant="acme", metadata={"order": 8}))
    assert (await fork.result(timeout=60)).value() == ["acme", {"order": 8}, "local"]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "an undeclared function": ({"agent": undeclared}, "data.agent", "is not declared as an agent in this process"),
    "two names": ({"agent": twice}, "data.agent", "is declared as 'second' and 'first': give one of them"),
    "no agent": ({"agent": None}, "data.agent", "is missing; name the agent"),
    "a number as agent": ({"agent": 3}, "data.agent", "3 is not text"),
    "a set as input": ({"input": {object()}}, "data.input", "cannot be JSON"),
    "a large input": ({"input": "x" * MAX_DATA_BYTES}, "data.input", "over the limit"),
    "a reserved key": ({"key": "~r"}, "data.key", "begins with `~`"),
    "a bad task id": ({"task_id": "a b"}, "data.task_id", "is not a task id"),
    "a bad session": ({"session_id": "a\0"}, "data.session_id", "control"),
    "a bad mode": ({"stream": "loud"}, "data.conf.streaming_mode", "choose from core"),
    "no mode": ({"stream": None}, "data.conf.streaming_mode", "choose from core"),
    "options as a dict": ({"options": {"max_steps": 5}}, "options", "is not a SubmitOptions"),
    "no steps": ({"options": SubmitOptions(max_steps=0)}, "data.conf.max_steps", "0 is not"),
    "no time": ({"options": SubmitOptions(timeout_seconds=0)}, "data.conf.timeout_seconds", "0 is not"),
    "no tokens": ({"options": SubmitOptions(max_tokens=0)}, "data.conf.max_tokens", "0 is not"),
    "no cost": ({"options": SubmitOptions(max_cost=-1)}, "data.conf.max_cost", "-1 is not"),
    "a high priority": ({"options": SubmitOptions(priority=10)}, "data.conf.priority", "10 is not"),
    "a long tenant": ({"options": SubmitOptions(tenant="a" * 257)}, "tenant", "is not text of 1 to 256"),
    "an unknown engine": (
        {"options": SubmitOptions(engine="mars")},
        "data.conf.engine",
        "choose from local, ray, spark",
    ),
    "a negative wait": (
        {"options": SubmitOptions(engine_wait_seconds=-1)},
        "data.conf.engine_wait_seconds",
        "-1 is not a number from 0 up",
    ),
    "a hook as text": ({"options": SubmitOptions(hooks={"start": "a"})}, "data.hooks.start", "is not a list of names"),
    "metadata as text": ({"options": SubmitOptions(metadata="a")}, "data.metadata", "is not an object"),  # type: ignore[arg-type]
    "large metadata": (
        {"input": "x" * 1000, "options": SubmitOptions(metadata={"x": "x" * (MAX_DATA_BYTES - 500)})},
        "data.metadata",
        "with the input, is over the limit",
    ),
    "an event id as number": ({"options": SubmitOptions(event_id=3)}, "id", "3 is not text"),  # type: ignore[arg-type]
    "a trace with a control": ({"options": SubmitOptions(traceparent="a\n")}, "traceparent", "control"),
}


@pytest.mark.parametrize(("given", "field", "message"), BAD.values(), ids=BAD.keys())
async def test_each_mistake_is_named_by_its_field(
    client: Client, given: dict[str, Any], field: str, message: str
) -> None:
    arguments = {"agent": "greeter", "input": "Ann", **given}
    with pytest.raises(InvalidInput) as caught:
        await client.submit(arguments.pop("agent"), arguments.pop("input"), **arguments)
    assert caught.value.field == field
    assert message in caught.value.message


def test_the_signature_stays_short() -> None:
    assert len(inspect.signature(Client.submit).parameters) <= 9
