"""Additions of the adapter to the runtime of agents: AutoGen's types, serializers, events and handling of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from autogen_agentchat.messages import StructuredMessage
from autogen_core import (
    EVENT_LOGGER_NAME,
    JSON_DATA_CONTENT_TYPE,
    AgentId,
    AgentInstantiationContext,
    AgentRuntime,
    BaseAgent,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    UnknownPayload,
    default_subscription,
    event,
    message_handler,
    rpc,
)
from autogen_core.exceptions import UndeliverableException
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

import runtime_core.integrations.autogen as integrations_autogen
import weft.autogen
from runtime_core.errors import ConfigurationError
from runtime_core.integrations.actors.errors import SerializationError
from runtime_core.integrations.autogen import WeftAgentRuntime
from runtime_core.integrations.autogen.serialization import FaithfulRegistry

IDLE_SECONDS = 60
HERE = AgentId("agent", "default")


@dataclass
class Ask:
    value: Any = None


@dataclass
class Said:
    text: str


class Number(BaseModel):
    number: int


class Refusal(BaseException):
    """An error that is no Exception, like those of AutoGen's tools."""


@default_subscription
class Agent(RoutedAgent):
    """Does what `value` says, and keeps its messages."""

    def __init__(self) -> None:
        super().__init__("an agent")
        self.contexts: list[MessageContext] = []
        self.heard: list[object] = []
        self.go_on = asyncio.Event()

    @rpc
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Ask:
        self.contexts.append(ctx)
        if message.value == "wait":
            await self.go_on.wait()
        elif message.value == "go on":
            self.go_on.set()
        elif message.value == "refuse":
            raise Refusal("no")
        return message

    @event
    async def on_said(self, message: Said, ctx: MessageContext) -> None:
        self.contexts.append(ctx)
        self.heard.append(message)
        if message.text == "fail":
            await self.publish_message(Said("it failed"), DefaultTopicId())
            raise ValueError("it failed")

    @message_handler
    async def on_structured(self, message: StructuredMessage[Number], ctx: MessageContext) -> None:
        self.heard.append(message)


@pytest.fixture
async def runtime() -> AsyncIterator[WeftAgentRuntime]:
    made = WeftAgentRuntime(url="memory://")
    made.start()
    yield made
    await made.close()


async def idle(runtime: WeftAgentRuntime) -> None:
    await asyncio.wait_for(runtime.stop_when_idle(), IDLE_SECONDS)


class ByHand(BaseAgent):
    """Sets in its `__init__` what BaseAgent would, as the agent in AutoGen's tutorial does."""

    def __init__(self, description: str) -> None:
        self._runtime = AgentInstantiationContext.current_runtime()
        self._id = AgentInstantiationContext.current_agent_id()
        self._description = description

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> str:  # Any: as the base class
        assert isinstance(self._runtime, WeftAgentRuntime)
        return f"{self.id} {self._description}"


def test_the_runtime_has_one_class_under_each_name() -> None:
    assert weft.autogen.WeftAgentRuntime is integrations_autogen.WeftAgentRuntime is WeftAgentRuntime


async def test_an_agent_gets_its_id_and_runtime_while_its_factory_runs(runtime: WeftAgentRuntime) -> None:
    await runtime.register_factory("byhand", lambda: ByHand("by hand"))
    assert await runtime.send_message("hi", AgentId("byhand", "k")) == "byhand/k by hand"


async def test_agents_see_the_types_of_autogen(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    await runtime.send_message(Ask(), HERE, sender=AgentId("other", "key"))
    await runtime.publish_message(Said("x"), TopicId("default", "default"))
    await idle(runtime)
    agent = await runtime.try_get_underlying_agent_instance(HERE, Agent)
    asked, heard = agent.contexts
    assert isinstance(runtime, AgentRuntime)
    assert type(asked) is MessageContext
    assert (asked.sender, asked.topic_id, asked.is_rpc) == (AgentId("other", "key"), None, True)
    assert (heard.sender, heard.topic_id, heard.is_rpc) == (None, TopicId("default", "default"), False)
    assert (agent.id, agent.runtime) == (HERE, runtime)


async def test_the_spans_of_an_agent_are_in_the_trace_of_the_sender() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    runtime = WeftAgentRuntime(url="memory://", tracer_provider=provider)
    runtime.start()
    try:
        await Agent.register(runtime, "agent", Agent)
        with provider.get_tracer("program").start_as_current_span("the program"):
            await runtime.send_message(Ask("x"), HERE)
            await runtime.publish_message(Said("y"), TopicId("default", "default"))
        await idle(runtime)
    finally:
        await runtime.close()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context}
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    assert [span.name for span in spans.values() if span.parent is None] == ["the program"]
    parents = {span.name: spans[span.parent.span_id].name for span in spans.values() if span.parent is not None}
    assert parents["autogen send agent.(default)-A"] == "autogen create agent.(default)-A"
    assert parents["autogen publish default.(default)-T"] == "autogen create default.(default)-T"


async def test_an_unknown_recipient_is_autogens_own_error_at_once(runtime: WeftAgentRuntime) -> None:
    with pytest.raises(UndeliverableException, match="nobody"):
        await runtime.send_message(Ask(), AgentId("nobody", "default"))


async def test_a_base_exception_reaches_the_caller(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    with pytest.raises(Refusal, match="no"):
        await runtime.send_message(Ask("refuse"), HERE)


async def test_messages_published_before_a_failure_are_sent(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    await Agent.register(runtime, "another", Agent)
    await runtime.send_message(Ask(), HERE)
    await runtime.publish_message(Said("fail"), DefaultTopicId(), sender=AgentId("another", "default"))
    await idle(runtime)
    another = await runtime.try_get_underlying_agent_instance(AgentId("another", "default"), Agent)
    assert another.heard == [Said("it failed")]


@pytest.mark.parametrize("interleave", [True, ["beside"]])
async def test_messages_of_an_interleaved_type_are_handled_concurrently(interleave: bool | list[str]) -> None:
    runtime = WeftAgentRuntime(url="memory://", interleave=interleave)
    await Agent.register(runtime, "beside", Agent)
    runtime.start()
    beside = AgentId("beside", "default")
    async with asyncio.timeout(IDLE_SECONDS):
        await asyncio.gather(runtime.send_message(Ask("wait"), beside), runtime.send_message(Ask("go on"), beside))
    await runtime.close()


@pytest.mark.parametrize("wrong", ["beside", 1, None, [1]])
def test_a_wrong_interleave_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"interleave is .*: pass True, False or a list of agent types"):
        WeftAgentRuntime(interleave=wrong)


async def test_interleave_names_only_types_that_are_registered() -> None:
    runtime = WeftAgentRuntime(url="memory://", interleave=["agent", "agnet"])
    await Agent.register(runtime, "agent", Agent)
    with pytest.raises(ConfigurationError, match=r"interleave names 'agnet', .* it has 'agent'"):
        runtime.start()
    await runtime.close()


@pytest.mark.parametrize("runtime_class", [WeftAgentRuntime, SingleThreadedAgentRuntime])
async def test_a_message_does_not_reach_later_subscribers(runtime_class: type[Any]) -> None:
    runtime = runtime_class()
    await runtime.publish_message(Said("early"), DefaultTopicId())
    runtime.start()
    await idle(runtime)
    await Agent.register(runtime, "agent", Agent)
    await runtime.publish_message(Said("late"), DefaultTopicId())
    runtime.start()
    await idle(runtime)
    agent = await runtime.try_get_underlying_agent_instance(HERE, Agent)
    assert agent.heard == [Said("late")]
    await runtime.close()


@pytest.mark.parametrize("runtime_class", [WeftAgentRuntime, SingleThreadedAgentRuntime])
async def test_a_program_may_step_through_its_messages(runtime_class: type[Any]) -> None:
    runtime = runtime_class()
    assert runtime.unprocessed_messages_count == 0
    await Agent.register(runtime, "agent", Agent)
    for text in ("one", "two"):
        await runtime.publish_message(Said(text), DefaultTopicId())
    asked = asyncio.create_task(runtime.send_message(Ask("x"), HERE))
    async with asyncio.timeout(IDLE_SECONDS):
        while runtime.unprocessed_messages_count < 3:
            await asyncio.sleep(0.01)
        for left, heard in ((2, ["one"]), (1, ["one", "two"])):
            await runtime.process_next()
            agent = await runtime.try_get_underlying_agent_instance(HERE, Agent)
            while [said.text for said in agent.heard] != heard or runtime.unprocessed_messages_count != left:
                await asyncio.sleep(0.01)
        await runtime.process_next()
        await runtime.process_next()
        assert await asked == Ask("x")
        assert runtime.unprocessed_messages_count == 0
    await runtime.publish_message(Said("three"), DefaultTopicId())
    runtime.start()
    await idle(runtime)
    assert [said.text for said in agent.heard] == ["one", "two", "three"]
    await runtime.close()


async def test_a_runtime_that_is_closed_between_two_steps_leaves_no_handler(runtime: WeftAgentRuntime) -> None:
    stepped = WeftAgentRuntime(url="memory://")
    await Agent.register(stepped, "agent", Agent)
    for text in ("one", "two"):
        await stepped.publish_message(Said(text), DefaultTopicId())
    async with asyncio.timeout(IDLE_SECONDS):
        await stepped.process_next()
        while not stepped._actors.stepping:  # the second message has arrived and waits for its step
            await asyncio.sleep(0.01)
        await stepped.close()


async def test_only_a_runtime_that_handles_all_messages_itself_steps_through_them(runtime: WeftAgentRuntime) -> None:
    with pytest.raises(RuntimeError, match="the runtime is started"):
        await runtime.process_next()
    shared = WeftAgentRuntime(url="redis://127.0.0.1:1", namespace="team")
    with pytest.raises(RuntimeError, match=r"process_next: other processes .* 'team'"):
        await shared.process_next()
    with pytest.raises(RuntimeError, match=r"unprocessed_messages_count: other processes .* 'team'"):
        _ = shared.unprocessed_messages_count


async def test_a_generic_message_keeps_its_class(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    sent = StructuredMessage[Number](content=Number(number=3), source="test")
    await runtime.publish_message(sent, DefaultTopicId())
    await idle(runtime)
    agent = await runtime.try_get_underlying_agent_instance(HERE, Agent)
    assert agent.heard == [sent]


async def test_an_object_that_cannot_be_sent_is_refused_where_it_is_sent(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    with pytest.raises(SerializationError, match=r"message\.value is a asyncio\.locks\.Event"):
        await runtime.send_message(Ask(asyncio.Event()), HERE)


@dataclass
class Upper:
    """Writes the texts of `Said` in capitals."""

    type_name: str = "Said"
    data_content_type: str = JSON_DATA_CONTENT_TYPE
    written: list[str] = field(default_factory=list)

    def serialize(self, message: Said) -> bytes:
        self.written.append(message.text)
        return f'"{message.text.upper()}"'.encode()

    def deserialize(self, payload: bytes) -> Said:
        return Said(payload.decode().strip('"'))


async def test_a_users_serializer_is_used(runtime: WeftAgentRuntime) -> None:
    await Agent.register(runtime, "agent", Agent)
    own = Upper()
    runtime.add_message_serializer(own)
    await runtime.publish_message(Said("text"), DefaultTopicId())
    await idle(runtime)
    agent = await runtime.try_get_underlying_agent_instance(HERE, Agent)
    assert own.written == ["text"]
    assert agent.heard == [Said("TEXT")]


def test_a_message_of_an_unknown_type_is_autogens_unknown_payload() -> None:
    found = FaithfulRegistry().deserialize(b"{}", type_name="no.such.Class", data_content_type=JSON_DATA_CONTENT_TYPE)
    assert found == UnknownPayload("no.such.Class", JSON_DATA_CONTENT_TYPE, b"{}")


async def test_a_message_and_its_answer_are_logged_as_autogen_logs_them(
    runtime: WeftAgentRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    await Agent.register(runtime, "agent", Agent)
    with caplog.at_level(logging.INFO, logger=EVENT_LOGGER_NAME):
        await runtime.send_message(Ask("x"), HERE)
        with pytest.raises(Refusal):
            await runtime.send_message(Ask("refuse"), HERE)
    logged: list[Any] = [record.msg for record in caplog.records if record.name == EVENT_LOGGER_NAME]
    said = [
        (event.kwargs["type"], str(event.kwargs.get("kind")), str(event.kwargs.get("delivery_stage")))
        for event in logged
    ]
    assert said == [
        ("Message", "MessageKind.DIRECT", "DeliveryStage.SEND"),
        ("Message", "MessageKind.DIRECT", "DeliveryStage.DELIVER"),
        ("Message", "MessageKind.RESPOND", "DeliveryStage.DELIVER"),
        ("Message", "MessageKind.DIRECT", "DeliveryStage.SEND"),
        ("Message", "MessageKind.DIRECT", "DeliveryStage.DELIVER"),
        ("MessageHandlerException", "None", "None"),
    ]
