"""Messages as JSON, and values that cannot be emitted."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.errors import InvalidInput
from tests.unit.runs.run_world import World
from weft import AgentContext
from weft.aworld import (
    AgentMessage,
    CancelMessage,
    EventLoop,
    EventManager,
    MemoryEventMessage,
    Message,
)


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
