"""A wrong argument raises at once; the error names the argument and the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.integrations.actors.agents import DEFAULT, Ask, Echo
from weft.errors import ConfigurationError, InvalidInput
from weft.runtime import AgentId, DefaultInterventionHandler, Runtime, TopicId

SECONDS = 60
ECHO = AgentId("echo", "a")
Call = Callable[[Any], Awaitable[object]]
"""Calls of a runtime. Any: they are wrong on purpose, so no type fits."""

WRONG_CALLS: dict[str, tuple[Call, str]] = {
    "recipient, a text": (lambda it: it.send_message(Ask("x"), "echo/a"), r"^recipient: 'echo/a' .* AgentId"),
    "recipient, a topic": (lambda it: it.send_message(Ask("x"), DEFAULT), "^recipient: .* AgentId"),
    "recipient, none": (lambda it: it.send_message(Ask("x"), None), "^recipient: None"),
    "sender": (lambda it: it.send_message(Ask("x"), ECHO, sender="me"), "^sender: 'me' .* AgentId"),
    "token": (lambda it: it.send_message(Ask("x"), ECHO, cancellation_token="t"), "^cancellation_token: 't'"),
    "token, its class": (lambda it: it.send_message(Ask("x"), ECHO, cancellation_token=str), "^cancellation_token"),
    "message id": (lambda it: it.send_message(Ask("x"), ECHO, message_id=5), "^message_id: 5"),
    "message id, empty": (lambda it: it.send_message(Ask("x"), ECHO, message_id=""), "^message_id: ''"),
    "timeout, none left": (lambda it: it.send_message(Ask("x"), ECHO, timeout=0), "^timeout: 0 .* above 0"),
    "timeout, no number": (lambda it: it.send_message(Ask("x"), ECHO, timeout=float("nan")), "^timeout: nan"),
    "timeout, a text": (lambda it: it.send_message(Ask("x"), ECHO, timeout="3"), "^timeout: '3'"),
    "topic, a text": (lambda it: it.publish_message(Ask("x"), "default"), "^topic_id: 'default' .* TopicId"),
    "topic, an agent": (lambda it: it.publish_message(Ask("x"), ECHO), "^topic_id: .* TopicId"),
    "publisher": (lambda it: it.publish_message(Ask("x"), DEFAULT, sender=TopicId("a", "b")), "^sender"),
    "type": (lambda it: it.register_factory(None, Echo), "^type: None .* string"),
    "factory": (lambda it: it.register_factory("new", Echo()), "^agent_factory: .* function or a class"),
    "object": (lambda it: it.register_agent_instance(None, AgentId("one", "a")), "^agent: None .* BaseAgent"),
    "object, a class": (lambda it: it.register_agent_instance(Echo, AgentId("one", "a")), "^agent: .* BaseAgent"),
    "object's id": (lambda it: it.register_agent_instance(Echo(), "one/a"), "^agent_id: 'one/a'"),
    "class": (lambda it: it.try_get_underlying_agent_instance(ECHO, "Echo"), "^type: 'Echo' is not a class"),
    "id of an object": (lambda it: it.try_get_underlying_agent_instance("echo/a"), "^id: 'echo/a'"),
    "get": (lambda it: it.get(None), "^type: None"),
    "metadata": (lambda it: it.agent_metadata("echo/a"), "^agent: 'echo/a'"),
    "agent's state": (lambda it: it.agent_save_state("echo/a"), "^agent: 'echo/a'"),
    "state, none": (lambda it: it.agent_load_state(ECHO, None), "^state: None"),
    "state, a list": (lambda it: it.agent_load_state(ECHO, [1]), r"^state: \[1\]"),
    "state, no JSON": (lambda it: it.agent_load_state(ECHO, {"x": object()}), "^state: .*JSON"),
    "saved": (lambda it: it.load_state(None), "^state: None .*save_state"),
    "saved list": (lambda it: it.load_state({"weft:messages": 5}), r"^state\['weft:messages'\]: is a int"),
    "saved part": (
        lambda it: it.load_state({"weft:subscriptions": [{"topic": "t"}]}),
        r"^state\['weft:subscriptions'\]\[0\]: has no agent_type, prefix",
    ),
    "subscription": (lambda it: it.add_subscription("default"), "^subscription: 'default' .* TypeSubscription"),
    "condition": (lambda it: it.stop_when(True), "^condition: True"),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
async def test_a_wrong_argument_is_named(runtime: Runtime, wrong: str) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    call, says = WRONG_CALLS[wrong]
    with pytest.raises(InvalidInput, match=says):
        await asyncio.wait_for(call(runtime), SECONDS)
    assert (await asyncio.wait_for(runtime.send_message(Ask("hi"), ECHO), SECONDS)).text == "hi"


async def test_a_wrong_serializer_is_named(runtime: Runtime) -> None:
    wrong: Any = object()
    with pytest.raises(InvalidInput, match=r"^serializer: .* no type_name"):
        runtime.add_message_serializer([wrong])


@pytest.mark.parametrize("made", [None, 5, Echo], ids=str)
async def test_a_request_to_an_unknown_agent_raises(runtime: Runtime, made: object) -> None:
    await runtime.register_factory("echo", lambda: made)
    runtime.start()
    with pytest.raises(InvalidInput, match=r"^agent: .* of the factory of type 'echo' is not an agent"):
        await asyncio.wait_for(runtime.send_message(Ask("hi"), ECHO), SECONDS)


WRONG_SETTINGS: dict[str, dict[str, Any]] = {  # Any: wrong on purpose
    "lease_seconds is 0": {"lease_seconds": 0},
    "lease_seconds is -1": {"lease_seconds": -1},
    "shutdown_seconds is -1": {"shutdown_seconds": -1},
    "max_instances is 0": {"max_instances": 0},
    "max_instances is '3'": {"max_instances": "3"},
    "url is 3: pass": {"url": 3},
    "namespace is 'a b': pass 1 to 64 letters": {"namespace": "a b"},
    "namespace is 3: pass": {"namespace": 3},
    "services is 'yes': pass True or False": {"services": "yes"},
    "replay_unheard is None: pass": {"replay_unheard": None},
    "own_namespace is 1: pass": {"own_namespace": 1},
    "ignore_unhandled_exceptions is 'x': pass": {"ignore_unhandled_exceptions": "x"},
    "intervention_handlers: .* is a class": {"intervention_handlers": [DefaultInterventionHandler]},
    "intervention_handlers: .* has no on_send": {"intervention_handlers": [object()]},
    "intervention_handlers is .* list": {"intervention_handlers": DefaultInterventionHandler()},
}


@pytest.mark.parametrize("says", WRONG_SETTINGS)
def test_a_wrong_setting_is_named(says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Runtime(**{"url": "memory://", **WRONG_SETTINGS[says]})


async def test_a_repeat_whose_answer_has_expired_is_an_error(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    bus = (await runtime.broker())[0]
    await bus.transport.call("HSET", bus.keys.meta, "retention", "1")
    await runtime.send_message(Ask("hi"), ECHO, message_id="the-one")
    async with asyncio.timeout(SECONDS):
        while await bus.transport.call("ZCARD", bus.keys.index):
            await asyncio.sleep(0.05)
    with pytest.raises(InvalidInput, match=r"^message_id: 'the-one' .* new id"):
        await asyncio.wait_for(runtime.send_message(Ask("hi"), ECHO, message_id="the-one"), SECONDS)
