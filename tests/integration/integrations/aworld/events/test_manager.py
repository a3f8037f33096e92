"""Event-driven runs: messages and handlers on the core, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.events.message import Recorded
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.wire.events import TaskResponse
from tests.apps.events_app import GROUP, app
from weft import AgentContext, App, Client
from weft.aworld import (
    AgentMessage,
    CancelMessage,
    ChunkMessage,
    ContextMessage,
    EventManager,
    HumanMessage,
    MemoryEventMessage,
    Message,
    TaskMessage,
    ToolMessage,
    TopicType,
    run_events,
)
from weft.errors import ConfigurationError


async def run(first: list[Message], **more: Any) -> TaskResponse:  # Any: JSON
    async with LocalApp(app) as client:
        task = await client.submit("dispatcher", {"messages": [message.to_dict() for message in first], **more})
        return await task.result(timeout=60)


async def answer_question(client: Client, task_id: str, value: object) -> None:
    handle = await client.task(task_id)
    async for event in handle.stream():
        if event.type == "weft.human.requested":
            await handle.signal(event.data["request_id"], value)
            return


def collecting() -> App:
    """An app whose only agent emits eight messages before any is handled, and logs their order."""
    collector = App("collecting")

    @collector.agent("collect")
    async def collect(ctx: AgentContext, priorities: list[int]) -> list[object]:
        manager = EventManager(ctx)
        order: list[object] = []
        await manager.register("mine", "", lambda message: order.append(message.payload))
        first = [
            Message(category="mine", payload=number, priority=priority) for number, priority in enumerate(priorities)
        ]
        last = TaskMessage(topic=TopicType.FINISHED, payload=None, priority=1000)
        await run_events(ctx, [*first, last], manager=manager)
        return order

    return collector


async def test_messages_of_equal_priority_are_handled_in_the_order_of_emission() -> None:
    async with LocalApp(collecting()) as client:
        task = await client.submit("collect", [0] * 8)
        assert (await task.result(timeout=60)).value() == [0, 1, 2, 3, 4, 5, 6, 7]


async def test_a_function_is_subscribed_by_a_decorator_for_all_runs_of_its_app() -> None:
    loud, desk = App("loud"), App("desk")

    @loud.subscribe("mine", transformer=True)
    async def shout(message: Message) -> Message:
        return message.replace(payload=message.payload.upper())

    @desk.subscribe("mine", "greet")
    def greet(message: Message) -> TaskMessage:
        return TaskMessage(topic=TopicType.FINISHED, payload=f"hello {message.payload}")

    @desk.agent("desk")
    async def run_desk(ctx: AgentContext, name: str) -> object:
        return (await run_events(ctx, [Message(category="mine", topic="greet", payload=name)])).value()

    desk.include(loud)
    desk.include(loud)  # once more is not twice
    async with LocalApp(desk) as client:
        ends = [await (await client.submit("desk", name)).result(timeout=60) for name in ("ann", "bob")]
    assert [end.value() for end in ends] == ["hello ANN", "hello BOB"]
    assert greet(Message(payload="x")).payload == "hello x", "the function is as it was"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"event_type": ""}, "category"),
        ({"event_type": 3}, "category"),
        ({"event_type": "mine", "topic": None}, "topic"),
        ({"event_type": "mine", "order": "first"}, "order"),
    ],
)
def test_an_invalid_subscription_is_refused_at_once(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        App("desk").subscribe(**wrong)(print)


async def test_every_one_of_1500_messages_is_recorded_in_order_when_the_task_has_ended() -> None:
    app = App("many")

    @app.agent("many")
    async def many(ctx: AgentContext, count: int) -> object:
        manager = EventManager(ctx)
        await manager.register("mine", "", lambda message: None)
        first = [Message(category="mine", payload=number) for number in range(count)]
        last = TaskMessage(topic=TopicType.FINISHED, payload="all")
        return (await run_events(ctx, [*first, last], manager=manager, max_steps=2 * count)).value()

    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("many", 1500)
        assert (await task.result(timeout=60)).value() == "all"
        await local.recorded(task.task_id)
        kept = await EventManager.of(Recorded(local.trajectories, namespace="local")).messages_by_task_id(task.task_id)
    assert [message.payload for message in kept] == [*range(1500), "all"]


async def test_higher_priorities_go_first() -> None:
    async with LocalApp(collecting()) as client:
        task = await client.submit("collect", [0, 2, -5, 0, -5, -1])
        assert (await task.result(timeout=60)).value() == [2, 4, 5, 0, 3, 1]


async def test_messages_that_follow_a_higher_priority_run_before_waiting_lower_ones() -> None:
    own = App("follow")

    @own.agent("follow")
    async def follow(ctx: AgentContext, input: object) -> list[object]:
        manager = EventManager(ctx)
        order: list[object] = []

        def take(message: Message) -> Message | None:
            order.append(message.payload)
            return message.replace(payload="urgent, too") if message.payload == "urgent" else None

        await manager.register("mine", "", take)
        first = [
            Message(category="mine", payload="later"),
            Message(category="mine", payload="urgent", priority=-1),
            TaskMessage(topic=TopicType.FINISHED, priority=9),
        ]
        await run_events(ctx, first, manager=manager)
        assert len({message.id for message in manager.messages}) == 4, "what is emitted again has an id of its own"
        return order

    async with LocalApp(own) as client:
        task = await client.submit("follow")
        assert (await task.result(timeout=60)).value() == ["urgent", "urgent, too", "later"]


async def test_an_agent_is_asked_and_its_answer_ends_the_task() -> None:
    response = await run([AgentMessage(receiver="adder", payload=[1, 2, 3])])
    assert response.value() == 6


async def test_the_result_of_a_tool_goes_to_the_caller() -> None:
    response = await run([ToolMessage(receiver="double", payload={"number": 4})])
    assert response.value() == 8
    several = [{"tool": "double", "arguments": {"number": number}} for number in (1, 2, 3)]
    response = await run([ToolMessage(payload=several, sender="adder")])
    assert response.value() == 12


async def test_a_group_returns_the_results_of_its_members_in_order() -> None:
    assert (await run([GROUP])).value() == [8, 3]


async def test_a_cancel_overtakes_waiting_commands() -> None:
    response = await run([AgentMessage(receiver="adder", payload=[1]), CancelMessage(payload="enough")])
    assert response.status == "cancelled"
    assert response.error == {"type": "Cancelled", "message": "enough"}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (AgentMessage(receiver="nobody"), "nobody"),
        (AgentMessage(), "name the agent"),
        (ToolMessage(receiver="nothing"), "nothing"),
        (Message(category="mystery"), "mystery"),
        (TaskMessage(topic="__whatever"), "__whatever"),
    ],
)
async def test_a_message_without_a_handler_ends_the_task_with_an_error_that_names_it(
    message: Message, told: str
) -> None:
    async with LocalApp(app) as client:
        task = await client.submit("dispatcher", {"messages": [message.to_dict()]})
        response = await task.result(timeout=60)
        [letter] = await DeadLetters(client.buses).newest(10)
    assert (letter.task, letter.error["type"]) == (task.task_id, "UnknownReceiver")
    assert response.status == "failed"
    assert response.error is not None
    assert response.error["type"] == "UnknownReceiver"
    assert told in response.error["message"]


async def test_an_error_of_a_handler_ends_the_task_with_that_error() -> None:
    response = await run([AgentMessage(receiver="broken"), AgentMessage(receiver="adder", payload=[1], priority=5)])
    assert response.error is not None
    assert response.error["type"] == "LookupError"
    assert response.error["message"] == "nothing here"


async def test_a_failed_run_has_all_its_messages_and_its_input_on_record() -> None:
    local = LocalApp(app, trajectory=True)
    first = [Message(category="mystery", payload=1).to_dict()]
    async with local as client:
        task = await client.submit("dispatcher", {"messages": first})
        assert (await task.result(timeout=60)).status == "failed"
        recorded = await local.recorded(task.task_id)
        assert recorded.complete
        history = EventManager.of(Recorded(local.trajectories, "local"))
        messages = await history.messages_by_task_id(task.task_id)
    assert [(one.category, one.topic) for one in messages] == [("mystery", ""), ("task", TopicType.ERROR)]
    assert messages[1].payload["type"] == "UnknownReceiver"
    assert messages[1].headers["message_id"] == messages[0].id
    assert b"mystery" in bytes(recorded.steps[0].input)


async def test_a_run_fails_with_too_many_messages_or_with_none_left() -> None:
    again = TaskMessage(topic=TopicType.OUTPUT, payload="tick").to_dict()
    response = await run([TaskMessage(topic=TopicType.START, payload=[again] * 5)], max_steps=3)
    assert response.error is not None
    assert response.error["type"] == "LimitExceeded"
    assert "max_steps=3" in response.error["message"]
    response = await run([ChunkMessage(payload="half")])
    assert response.error is not None
    assert response.error["type"] == "NoMessageLeft"


async def test_a_handler_of_the_app_may_add_to_the_default_one() -> None:
    response = await run(
        [ToolMessage(receiver="double", payload={"number": 4})], handlers={"tool": "audited_tools"}, max_steps=10
    )
    assert response.value() == 8
    response = await run([ToolMessage(receiver="double", payload={"number": 4})], handlers={"tool": "unheard_of"})
    assert response.error is not None
    assert "conf.handlers.tool" in response.error["message"]


async def test_a_callback_sees_a_tools_result_and_may_replace_it() -> None:
    own = App("callbacks")
    own.include(app)

    @own.agent("called_back")
    async def called_back(ctx: AgentContext, number: int) -> object:
        manager = EventManager(ctx)
        await manager.register("tool_callback", "double", lambda message: message.payload["result"] + 1)
        first = ToolMessage(receiver="double", payload={"number": number})
        return (await run_events(ctx, [first], manager=manager)).value()

    async with LocalApp(own) as client:
        assert (await (await client.submit("called_back", 4)).result(timeout=60)).value() == 9


async def test_a_transformer_that_returns_no_message_raises_a_clear_error() -> None:
    own = App("forgetful")

    @own.agent("runs")
    async def runs(ctx: AgentContext, number: int) -> object:
        manager = EventManager(ctx)
        await manager.register("tool", "double", lambda message: None, transformer=True)
        outcome = await run_events(ctx, [ToolMessage(receiver="double", payload={"number": number})], manager=manager)
        return [type(outcome.cause).__name__, str(outcome.cause)]

    async with LocalApp(own) as client:
        found = (await (await client.submit("runs", 1)).result(timeout=60)).value()
    assert found == [
        "InvalidInput",
        "message: a transformer returned null: return the Message that replaces the given one",
    ]


async def test_transformers_change_a_message_and_registrations_can_be_taken_back() -> None:
    own = App("transformers")
    own.include(app)

    @own.agent("transformed")
    async def transformed(ctx: AgentContext, number: int) -> object:
        manager = EventManager(ctx)

        def more(message: Message) -> Message:
            return message.replace(payload={"number": message.payload["number"] + 1})

        await manager.register("tool", "double", more, transformer=True)
        await manager.register("tool", "", lambda message: TaskMessage(topic=TopicType.FINISHED, payload="taken"))
        await manager.unregister("tool", "", manager.subscribers("tool")[0])
        first = ToolMessage(receiver="double", payload={"number": number})
        return (await run_events(ctx, [first], manager=manager)).value()

    async with LocalApp(own) as client:
        assert (await (await client.submit("transformed", 4)).result(timeout=60)).value() == 10


async def test_called_agents_see_the_context_messages() -> None:
    own = App("context")

    @own.agent("reader")
    async def reader(ctx: AgentContext, name: str) -> object:
        return ctx.context.get(name)

    @own.agent("speaker")
    async def speaker(ctx: AgentContext, words: list[str]) -> object:
        said = [ContextMessage(payload={"last": word}) for word in words]
        return (await run_events(ctx, [*said, AgentMessage(receiver="reader", payload="last", priority=1)])).value()

    async with LocalApp(own) as client:
        assert (await (await client.submit("speaker", ["x", "y"])).result(timeout=60)).value() == "y"


async def test_context_and_memory_are_kept_and_output_is_streamed() -> None:
    own = App("kept")

    @own.agent("keeper")
    async def keeper(ctx: AgentContext, words: list[str]) -> object:
        manager = EventManager(ctx)
        finish = TaskMessage(topic=TopicType.FINISHED, payload="done", priority=9)
        first = [
            *(ContextMessage(payload={"last": word}) for word in words),
            *(MemoryEventMessage(payload=word, agent="a", memory_event_type="human") for word in words),
            *(ChunkMessage(payload=word) for word in words),
        ]
        await run_events(ctx, [*first, finish], manager=manager)
        return {"context": manager.context, "memory": [item["content"] for item in ctx.state["memory"]["a"]]}

    async with LocalApp(own) as client:
        task = await client.submit("keeper", ["x", "y"], key="one", stream=True)
        deltas = [event.text async for event in task.stream() if event.type == "weft.output.delta"]
        assert (await task.result(timeout=60)).value() == {"context": {"last": "y"}, "memory": ["x", "y"]}
    assert sorted(deltas) == ["x", "y"]


async def test_a_task_with_tools_a_human_and_an_agent_is_event_driven_and_recorded() -> None:
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("pipeline", [1, 2, 3], session_id="s-1")
        await answer_question(client, task.task_id, True)
        assert (await task.result(timeout=60)).value() == 12
        recorded = await local.recorded(task.task_id)
        assert recorded.complete
        history = EventManager.of(Recorded(local.trajectories, "local"))
        messages = await history.messages_by_task_id(task.task_id)
        assert [message.category for message in messages] == (
            ["tool"] * 3 + ["agent"] * 3 + ["human", "agent", "agent", "task"]
        )
        assert len({message.id for message in messages}) == len(messages)
        assert [one.payload for one in await history.messages_by_sender("double", task.task_id)] == [2, 4, 6]
        assert await history.messages_by_session_id("s-1") == messages
        assert await history.messages_by_key("t-other") == []
        assert [one.topic for one in await history.messages_by_topic(TopicType.FINISHED)] == [TopicType.FINISHED]


async def test_a_humans_denial_ends_the_task() -> None:
    async with LocalApp(app) as client:
        task = await client.submit("pipeline", [1])
        await answer_question(client, task.task_id, False)
        response = await task.result(timeout=60)
    assert response.error == {"type": "Cancelled", "message": "a human said no"}


async def test_more_than_a_thousand_messages_are_all_kept_in_order() -> None:
    own = App("many")

    @own.agent("many")
    async def many(ctx: AgentContext, count: int) -> int:
        manager = EventManager(ctx)
        for number in range(count):
            await manager.emit_message(Message(category="mine", payload=number, caller="" if number else "first"))
        return len(await manager.messages_by_task_id(ctx.task_id))

    local = LocalApp(own, trajectory=True)
    async with local as client:
        task = await client.submit("many", 1501)
        assert (await task.result(timeout=60)).value() == 1501
        await local.recorded(task.task_id, timeout=60)
        history = EventManager.of(Recorded(local.trajectories, "local"))
        assert [one.payload for one in await history.messages_by_key(task.task_id)] == list(range(1501))
        assert [one.payload for one in await history.messages_by_caller("first", task.task_id)] == [0]


async def test_a_human_message_reaches_the_sender_with_its_answer() -> None:
    async with LocalApp(app) as client:
        first = HumanMessage(payload="how many?").to_dict()
        task = await client.submit("dispatcher", {"messages": [first]})
        await answer_question(client, task.task_id, 7)
        assert (await task.result(timeout=60)).value() == 7
