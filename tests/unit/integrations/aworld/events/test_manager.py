"""An event-driven run gives the same result in every order of answers, cold or warm, and with crashes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Failed
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import World
from weft.aworld import (
    AgentMessage,
    ChunkMessage,
    EventManager,
    HumanMessage,
    Message,
    TaskMessage,
    ToolMessage,
    TopicType,
    run_events,
)


async def talk(ctx: AgentContext, input: Any) -> object:
    """Tools at once, chunks between them, a human, agents, and functions that collect."""
    manager = EventManager(ctx)
    collected: list[object] = []

    async def collect(message: Message) -> AsyncIterator[Message]:
        collected.append(message.payload["got"])
        yield ChunkMessage(payload=len(collected))
        if len(collected) == 3:
            yield HumanMessage(payload="go on?", sender="asker")

    async def asked(message: Message) -> list[Message]:
        follow = AgentMessage(receiver="writer", payload=collected, caller="closer")
        return [follow, follow.replace(receiver="editor", priority=-3)]

    async def close(message: Message) -> Message | None:
        collected.append(message.sender)
        return TaskMessage(topic=TopicType.FINISHED, payload=collected) if len(collected) == 5 else None

    for name, function in (("collector", collect), ("asker", asked), ("closer", close)):
        await manager.register("agent", name, function)
    first = [ToolMessage(receiver="search", payload={"n": n}, sender="collector") for n in range(3)]
    answer = (await run_events(ctx, first, manager=manager)).value()
    return [answer, [(message.id, message.category, message.payload) for message in manager.messages]]


async def failing(ctx: AgentContext, input: Any) -> object:
    """If two fail at once, the first in order counts."""
    first = [ToolMessage(receiver=f"bad{n}", payload={"n": n}) for n in range(3)]
    return (await run_events(ctx, first)).value()


def shown(result: Completed | Failed) -> object:
    return result.output if isinstance(result, Completed) else (result.type, result.message)


async def straight(code: Any) -> tuple[object, World]:  # Any: an agent's function
    world = World()
    return shown(await world.play(code)), world


@pytest.mark.parametrize("code", [talk, failing])
async def test_answers_in_any_order_and_cold_turns_change_nothing(code: Any) -> None:  # Any: an agent's function
    expected, reference = await straight(code)
    assert reference.turns > 1
    for seed in range(10):
        world = World(order=random.Random(seed), cold=seed % 2 == 0)  # not for secrets
        assert shown(await world.play(code)) == expected, f"seed {seed}"
        assert sorted(world.asked) == sorted(reference.asked)
        assert sorted(world.emitted) == sorted(reference.emitted)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("code", [talk, failing])
async def test_a_crash_at_any_write_changes_nothing(code: Any, before: bool) -> None:  # Any: an agent's function
    expected, reference = await straight(code)
    # After the last write, the commit of the end, there is nothing left to run.
    for at in range(1, reference.writes + (1 if before else 0)):
        world = World(crash_at=at, crash_before=before)
        assert shown(await world.play(code)) == expected, f"crash at write {at}"
        assert world.asked == reference.asked
        assert world.emitted == reference.emitted


async def test_the_first_error_in_order_ends_the_run() -> None:
    found, _ = await straight(failing)
    assert found == ("ValueError", "bad0 is bad")
