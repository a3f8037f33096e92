"""Which handlers a run has, and that they do not share their messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runtime_core.consumer.effects import Completed
from runtime_core.errors import ConfigurationError
from runtime_core.integrations.aworld.events.handlers import DefaultAgentHandler, DefaultTaskHandler
from tests.unit.runs.run_world import World
from weft import AgentContext, App
from weft.aworld import (
    EventManager,
    Handler,
    HandlerTable,
    Message,
    TaskMessage,
    run_events,
)


class Mine(Handler):
    """A handler of the user's own."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        yield TaskMessage(payload=message.payload)


def test_a_table_has_defaults_that_can_be_replaced_and_restored() -> None:
    table = HandlerTable({"mine": Mine})
    assert (table["mine"], table["agent"]) == (Mine, DefaultAgentHandler)
    table["task"] = Mine
    assert dict(table)["task"] == Mine
    del table["task"]
    assert dict(table)["task"] == DefaultTaskHandler
    assert set(table) > {"mine", "agent", "group"}
    assert "unheard of" not in table
    with pytest.raises(ConfigurationError, match=r"subclass of weft\.aworld\.Handler"):
        table["tool"] = print  # type: ignore[assignment]  # what a user may do


def test_two_apps_that_are_joined_agree_on_their_handlers() -> None:
    one, other = App("one"), App("other")
    one.handlers["tool"] = Mine
    other.include(one)
    assert other.handlers == {"tool": Mine}
    third = App("third")
    third.handlers["tool"] = DefaultTaskHandler
    with pytest.raises(ConfigurationError, match="'tool'"):
        third.include(one)


async def test_handlers_do_not_share_their_messages() -> None:
    """A change by one is invisible to the others."""

    async def sharing(ctx: AgentContext, input: object) -> None:
        manager = EventManager(ctx)
        seen: list[object] = []

        def spoil(message: Message) -> None:
            seen.append(list(message.payload))
            message.payload.append("spoiled")

        await manager.register("mine", "", spoil)
        payload: list[object] = [1]
        messages = [Message(category="mine", payload=payload) for _ in range(2)]
        finish = TaskMessage(topic="__finished", priority=9)
        await run_events(ctx, [*messages, finish], manager=manager)
        assert seen == [[1], [1]]
        assert payload == [1]

    assert isinstance(await World().play(sharing), Completed)
