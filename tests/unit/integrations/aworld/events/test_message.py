"""Messages as JSON, and which handler gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.integrations.aworld.events.handlers import DefaultAgentHandler, DefaultTaskHandler
from tests.unit.runs.run_world import World
from weft import AgentContext, App
from weft.aworld import (
    AgentMessage,
    CancelMessage,
    EventLoop,
    EventManager,
    Handler,
    HandlerTable,
    MemoryEventMessage,
    Message,
    TaskMessage,
    run_events,
)


class Mine(Handler):
    """A handler of the user's own."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        yield TaskMessage(payload=message.payload)


def test_a_message_is_read_back_as_the_class_of_its_category() -> None:
    for message in (
        AgentMessage(receiver="a", payload=[1], priority=3, headers={"key": "k"}),
        CancelMessage(payload="enough"),
        MemoryEventMessage(payload="x", agent="a", memory_event_type="human"),
        Message(category="mine", payload=None),
    ):
        told = message.to_dict()
        assert Message.is_message(told)
        assert Message.from_dict(told) == message
        assert type(Message.from_dict(told)) is type(message)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"category": "agent", "payload": 1, "reciever": "x"}, "message.reciever"),
        ({"category": "agent", "payload": 1, "receiver": 7}, "message.receiver"),
        ({"category": "", "payload": 1}, "message.category"),
        ({"category": "tool", "payload": 1, "priority": "high"}, "message.priority"),
        ({"category": "tool", "payload": 1, "headers": []}, "message.headers"),
    ],
)
def test_an_invalid_message_is_refused_by_its_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        Message.from_dict(data)
    assert error.value.field == field


@pytest.mark.parametrize("value", [None, "agent", {"category": "agent"}, {"category": "a", "payload": 1, "more": 2}])
def test_an_answer_is_distinguished_from_a_message(value: object) -> None:
    assert not Message.is_message(value)


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


async def test_an_unstorable_value_is_refused_where_it_is_emitted() -> None:
    async def emitting(ctx: AgentContext, input: object) -> None:
        manager = EventManager(ctx)
        with pytest.raises(InvalidInput, match=r"message\.payload"):
            await manager.emit_message(Message(category="mine", payload=object()))
        with pytest.raises(InvalidInput, match="is not a Message"):
            await manager.emit_message({"category": "mine"})  # type: ignore[arg-type]  # what a user may do
        with pytest.raises(InvalidInput, match="cannot be called"):
            await manager.register("mine", "", 7)  # type: ignore[arg-type]  # what a user may do
        with pytest.raises(InvalidInput, match="not registered"):
            await manager.unregister("mine", "", print)
        with pytest.raises(InvalidInput, match="max_steps"):
            EventLoop(manager, max_steps=0)
        assert manager.messages == []

    await World().play(emitting)


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
