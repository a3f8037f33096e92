"""Failures of other agent runtimes in one process, and their features that Weft must have."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from runtime_core.errors import JournalMoved, WeftError
from tests.integration.integrations.actors.agents import (
    DEFAULT,
    Answer,
    Ask,
    Echo,
    Gate,
    Note,
    OwnError,
    Sink,
)
from tests.integration.integrations.actors.conftest import MakeRuntime
from weft import RetryPolicy
from weft.runtime import (
    AgentId,
    AgentProxy,
    CancellationToken,
    ClosureAgent,
    ClosureContext,
    DefaultInterventionHandler,
    DefaultSubscription,
    DropMessage,
    MessageContext,
    MessageDroppedException,
    Runtime,
    RuntimeStopped,
    TopicId,
    TypeSubscription,
    UndeliverableException,
)

SECONDS = 60


async def gate_of(runtime: Runtime, key: str = "one") -> Gate:
    return await runtime.try_get_underlying_agent_instance(AgentId("gate", key), Gate)


async def test_one_agent_handles_one_message_at_a_time_and_in_order(runtime: Runtime) -> None:
    await Gate.register(runtime, "gate", Gate)
    runtime.start()
    gate = await gate_of(runtime)
    asked = [asyncio.create_task(runtime.send_message(Ask(str(n)), AgentId("gate", "one"))) for n in range(5)]
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    gate.released.set()
    await asyncio.wait_for(asyncio.gather(*asked), SECONDS)
    assert gate.most_inside == 1
    assert gate.handled == ["0", "1", "2", "3", "4"]


async def test_a_request_that_the_broker_has_lost_ends_with_an_error(runtime: Runtime) -> None:
    await Gate.register(runtime, "gate", Gate)
    runtime.start()
    gate = await gate_of(runtime)
    asking = asyncio.create_task(runtime.send_message(Ask("1"), AgentId("gate", "one")))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    _, replies = await runtime._host.place("gate", "one")
    while not replies._asked:  # the answer to the submit may come after the message
        await asyncio.sleep(0)
    [future] = runtime._requests._waiting
    future.set_exception(JournalMoved("the broker has lost the request"))
    with pytest.raises(WeftError, match="lost the request to gate/one, or no longer stores its answer: send it again"):
        await asyncio.wait_for(asking, SECONDS)
    gate.released.set()


async def test_interleaved_agents_handle_messages_concurrently(runtime: Runtime) -> None:
    await runtime.register_factory("gate", Gate, interleave=True)
    runtime.start()
    gate = await gate_of(runtime)
    first = asyncio.create_task(runtime.send_message(Ask("first"), AgentId("gate", "one")))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    gate.entered.clear()
    second = asyncio.create_task(runtime.send_message(Ask("second"), AgentId("gate", "one")))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    assert gate.inside == 2
    gate.released.set()
    await asyncio.wait_for(asyncio.gather(first, second), SECONDS)


async def test_concurrent_first_messages_make_one_object(runtime: Runtime) -> None:
    made: list[Echo] = []

    async def slow_factory() -> Echo:
        await asyncio.sleep(0)
        made.append(Echo())
        return made[-1]

    await Echo.register(runtime, "echo", slow_factory)
    id = AgentId("echo", "one")
    await asyncio.gather(*(runtime.try_get_underlying_agent_instance(id, Echo) for _ in range(3)))
    runtime.start()
    await asyncio.gather(*(runtime.send_message(Ask("hi"), id) for _ in range(3)))
    assert len(made) == 1
    assert made[0].count == 3


class _Drop(DefaultInterventionHandler):
    """Drops every message that requests it."""

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any:
        return DropMessage if message.text == "drop" else message

    async def on_publish(self, message: Any, *, message_context: MessageContext) -> Any:
        return DropMessage() if message.text == "drop" else message

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any:
        return DropMessage if message.text == "drop the answer" else message


async def test_dropped_messages_do_not_keep_a_runtime_busy(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(intervention_handlers=[_Drop()])
    await Echo.register(runtime, "echo", Echo)
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    runtime.start()
    for text in ("drop", "drop the answer"):
        with pytest.raises(MessageDroppedException):
            await runtime.send_message(Ask(text), AgentId("echo", "one"))
    await runtime.publish_message(Note("drop"), DEFAULT)
    await runtime.publish_message(Note("keep"), DEFAULT)
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    sink = await runtime.try_get_underlying_agent_instance(AgentId("sink", "default"), Sink)
    echo = await runtime.try_get_underlying_agent_instance(AgentId("echo", "one"), Echo)
    assert sink.notes == ["keep"]
    assert echo.count == 1


class _Add(DefaultInterventionHandler):
    def __init__(self, text: str | None) -> None:
        self.text = text

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any:
        return None if self.text is None else Ask(message.text + self.text)

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any:
        return None if self.text is None else Answer(message.text + self.text.upper())


async def test_intervention_handlers_compose(make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    runtime = make_runtime(intervention_handlers=[_Add("a"), _Add(None), _Add("b")])
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    assert (await runtime.send_message(Ask("-"), AgentId("echo", "one"))).text == "-abAB"
    assert "return DropMessage to drop it" in caplog.text


class _Refuse(DefaultInterventionHandler):
    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any:
        raise PermissionError("not allowed")


async def test_an_error_of_an_intervention_handler_reaches_the_sender(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(intervention_handlers=[_Refuse()])
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    with pytest.raises(PermissionError, match="not allowed"):
        await runtime.send_message(Ask("hi"), AgentId("echo", "one"))
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)


async def test_stop_answers_waiting_callers_and_keeps_queued_messages(runtime: Runtime) -> None:
    await Gate.register(runtime, "gate", Gate)
    runtime.start()
    gate = await gate_of(runtime)
    asked = [asyncio.create_task(runtime.send_message(Ask(str(n)), AgentId("gate", "one"))) for n in range(3)]
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    stopping = asyncio.create_task(runtime.stop())
    gate.released.set()
    await asyncio.wait_for(stopping, SECONDS)
    ends = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), SECONDS)
    assert any(isinstance(end, RuntimeStopped) for end in ends)
    assert all(isinstance(end, RuntimeStopped | Answer) for end in ends)
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert gate.handled == ["0", "1", "2"]


async def test_stop_hands_back_a_handler_that_waits_for_another_agent(runtime: Runtime) -> None:
    await Gate.register(runtime, "gate", Gate)
    await Echo.register(runtime, "echo", Echo)

    async def ask_gate(agent: ClosureContext, message: Ask, ctx: MessageContext) -> None:
        await agent.send_message(message, AgentId("gate", "one"))
        await agent.send_message(message, AgentId("echo", "one"))

    await ClosureAgent.register_closure(runtime, "asker", ask_gate)
    runtime.start()
    gate = await gate_of(runtime)
    asked = asyncio.create_task(runtime.send_message(Ask("x"), AgentId("asker", "one")))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    stopping = asyncio.create_task(runtime.stop())
    gate.released.set()
    await asyncio.wait_for(stopping, SECONDS)
    with pytest.raises(RuntimeStopped):
        await asked
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    echo = await runtime.try_get_underlying_agent_instance(AgentId("echo", "one"), Echo)
    assert gate.handled == ["x"], "what had been answered was asked again"
    assert echo.count == 1


async def test_a_failing_subscriber_stops_no_sibling_and_idle_waits_for_all(runtime: Runtime) -> None:
    async def fails(agent: ClosureContext, message: Note, ctx: MessageContext) -> None:
        raise OwnError("mine")

    await ClosureAgent.register_closure(runtime, "fails", fails, subscriptions=lambda: [DefaultSubscription()])
    await Gate.register(runtime, "gate", Gate)
    await runtime.add_subscription(TypeSubscription("default", "gate"))
    runtime.start()
    gate = await gate_of(runtime, "default")
    for text in ("at work", "in line"):
        await runtime.publish_message(Note(text), DEFAULT)
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    idle = asyncio.create_task(runtime.stop_when_idle())
    done, _ = await asyncio.wait((idle,), timeout=0.2)
    assert not done, "it was idle while a subscriber was at work"
    gate.released.set()
    await asyncio.wait_for(idle, SECONDS)
    assert gate.handled == ["at work", "in line"]


async def test_an_unhandled_error_is_raised_on_request(make_runtime: MakeRuntime) -> None:
    async def fails(agent: ClosureContext, message: Note, ctx: MessageContext) -> None:
        raise OwnError("mine")

    runtime = make_runtime(ignore_unhandled_exceptions=False)
    await ClosureAgent.register_closure(runtime, "fails", fails, subscriptions=lambda: [DefaultSubscription()])
    runtime.start()
    await runtime.publish_message(Note("n"), DEFAULT)
    with pytest.raises(OwnError, match="mine"):
        await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)


async def test_a_handler_that_calls_exit_fails_its_message_and_not_the_process(runtime: Runtime) -> None:
    async def ends(agent: ClosureContext, message: Ask, ctx: MessageContext) -> None:
        sys.exit(3)

    await ClosureAgent.register_closure(runtime, "ends", ends)
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    with pytest.raises(RuntimeError, match=r"^the handler called sys\.exit\(3\): return or raise an error instead$"):
        await asyncio.wait_for(runtime.send_message(Ask("end"), AgentId("ends", "one")), SECONDS)
    answer = await asyncio.wait_for(runtime.send_message(Ask("go on"), AgentId("echo", "one")), SECONDS)
    assert answer.text == "go on"


async def test_idle_objects_are_released_and_restored_with_their_state(make_runtime: MakeRuntime) -> None:
    closed: list[str] = []

    class Closing(Echo):
        async def close(self) -> None:
            closed.append(self.id.key)

    runtime = make_runtime(max_instances=10)
    await Closing.register(runtime, "echo", Closing)
    runtime.start()
    for n in range(30):
        await runtime.send_message(Ask("hi"), AgentId("echo", str(n)))
    await runtime.send_message(Ask("hi"), AgentId("echo", "0"))
    assert len(closed) >= 20
    assert "0" in closed
    assert (await runtime.agent_save_state(AgentId("echo", "0"))) == {"count": 2}


def test_a_token_may_be_used_in_its_own_callbacks() -> None:
    token = CancellationToken()
    called: list[object] = []
    token.add_callback(lambda: called.append(token.is_cancelled()))
    token.add_callback(lambda: token.add_callback(lambda: called.append("late")))
    token.add_callback(token.cancel)
    token.cancel()
    assert called == [True, "late"]


async def test_wrong_calls_raise_what_the_protocol_says(runtime: Runtime) -> None:
    with pytest.raises(LookupError):
        await runtime.remove_subscription("never added")
    subscription = TypeSubscription("t", "echo")
    await runtime.add_subscription(subscription)
    with pytest.raises(ValueError, match="Subscription already exists"):
        await runtime.add_subscription(TypeSubscription("t", "echo"))
    await runtime.remove_subscription(subscription.id)
    with pytest.raises(LookupError):
        await runtime.remove_subscription(subscription.id)
    runtime.start()
    with pytest.raises(UndeliverableException, match="nobody"):
        await runtime.send_message(Ask("hi"), AgentId("nobody", "x"))
    await Echo.register(runtime, "echo", Echo)
    with pytest.raises(UndeliverableException, match="nobody"):
        await runtime.send_message(Ask("hi"), AgentId("nobody", "x"))
    with pytest.raises(ValueError, match="registered"):
        await Echo.register(runtime, "echo", Echo)


async def test_a_handler_that_fails_changes_no_state(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    id = AgentId("echo", "a")
    await runtime.send_message(Ask("hi"), id)
    with pytest.raises(OwnError, match="what went wrong"):
        await runtime.send_message(Ask("error"), id)
    await runtime.send_message(Ask("hi"), id)
    assert (await runtime.agent_save_state(id)) == {"count": 2}
    bus = (await runtime.broker())[0]
    assert await bus.transport.call("XLEN", bus.keys.dead) == 0, "the caller has the error: it is no dead letter too"


async def test_a_type_registered_after_the_start_is_read_at_once(runtime: Runtime) -> None:
    await Sink.register(runtime, "sink", Sink)
    runtime.start()
    await runtime.agent_save_state(AgentId("sink", "x"))
    await Echo.register(runtime, "echo", Echo)
    assert (await asyncio.wait_for(runtime.send_message(Ask("hi"), AgentId("echo", "a")), SECONDS)).text == "hi"


async def test_a_token_cancels_the_caller_and_the_handler(runtime: Runtime) -> None:
    cancelled = asyncio.Event()
    entered = asyncio.Event()

    async def waits(agent: ClosureContext, message: Ask, ctx: MessageContext) -> None:
        ctx.cancellation_token.add_callback(cancelled.set)
        entered.set()
        await asyncio.Event().wait()

    await ClosureAgent.register_closure(runtime, "waits", waits)
    runtime.start()
    token = CancellationToken()
    asked = asyncio.create_task(runtime.send_message(Ask("x"), AgentId("waits", "a"), cancellation_token=token))
    await asyncio.wait_for(entered.wait(), SECONDS)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert cancelled.is_set()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)


async def test_a_whole_runtime_is_saved_and_restored_with_its_queue(make_runtime: MakeRuntime) -> None:
    first = make_runtime()
    await Echo.register(first, "echo", Echo)
    await Sink.register(first, "sink", Sink)
    await first.add_subscription(TypeSubscription("default", "sink"))
    first.start()
    await first.send_message(Ask("hi"), AgentId("echo", "a b/c"))
    await first.stop_when_idle()
    await first.publish_message(Note("queued"), DEFAULT)
    saved = await first.save_state()
    await first.close()

    second = Runtime("memory://")
    await Echo.register(second, "echo", Echo)
    await Sink.register(second, "sink", Sink)
    await second.load_state(saved)
    second.start()
    await asyncio.wait_for(second.stop_when_idle(), SECONDS)
    assert (await second.agent_save_state(AgentId("echo", "a b/c"))) == {"count": 1}
    assert (await second.agent_save_state(AgentId("sink", "default"))) == {"notes": ["queued"]}
    await second.close()


async def test_a_proxy_forwards_to_its_agent(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    id = AgentId("echo", "far")
    proxy = AgentProxy(id, runtime)
    assert proxy.id == id
    assert (await proxy.metadata).type == "echo"
    await proxy.load_state({"count": 41})
    assert await proxy.send_message(Ask("hi")) == Answer("hi", "echo/far")
    assert await proxy.save_state() == await runtime.agent_save_state(id) == {"count": 42}


async def test_an_object_is_registered_as_one_agent(runtime: Runtime) -> None:
    echo = Echo()
    await echo.register_instance(runtime, AgentId("echo", "only"))
    with pytest.raises(ValueError, match="registered"):
        await Echo().register_instance(runtime, AgentId("echo", "only"))
    runtime.start()
    await runtime.send_message(Ask("hi"), AgentId("echo", "only"))
    assert echo.count == 1
    with pytest.raises(LookupError, match="no factory"):
        await runtime.send_message(Ask("hi"), AgentId("echo", "another"))


async def test_a_factory_that_fails_answers_the_request(runtime: Runtime) -> None:
    def broken() -> Echo:
        raise OwnError("cannot be made")

    await runtime.register_factory("echo", broken)
    await runtime.register_factory("wrong", lambda: Sink(), expected_class=Echo)  # type: ignore[arg-type, return-value]  # the mistake
    runtime.start()
    with pytest.raises(OwnError, match="cannot be made"):
        await runtime.send_message(Ask("hi"), AgentId("echo", "a"))
    with pytest.raises(ValueError, match="returned a Sink, not a Echo"):
        await runtime.send_message(Ask("hi"), AgentId("wrong", "a"))


async def test_starting_twice_and_stopping_what_is_not_started_are_errors(runtime: Runtime) -> None:
    with pytest.raises(RuntimeError, match="not started"):
        await runtime.stop()
    runtime.start()
    with pytest.raises(RuntimeError, match="already started"):
        runtime.start()
    await runtime.stop()
    with contextlib.suppress(RuntimeStopped):
        runtime.start()


def test_a_runtime_outlives_its_event_loop() -> None:
    """Scripts call `asyncio.run` repeatedly; the first run ends without a stop, in the middle of a handler."""
    runtime = Runtime("memory://", lease_seconds=1.0)

    async def first() -> Answer:
        await Echo.register(runtime, "echo", Echo)
        await Gate.register(runtime, "gate", Gate)
        await runtime.add_subscription(TypeSubscription("gates", "gate"))
        runtime.start()
        await runtime.publish_message(Ask("x"), TopicId("gates", "one"))
        await (await gate_of(runtime)).entered.wait()
        answer: Answer = await runtime.send_message(Ask("hi"), AgentId("echo", "a"))
        return answer

    async def second() -> list[str]:
        await runtime.add_subscription(TypeSubscription("default", "echo"))
        gate = await gate_of(runtime)
        gate.released.set()
        runtime.start()
        assert await runtime.send_message(Ask("hi"), AgentId("echo", "a")) == Answer("hi", by="echo/a")
        await runtime.stop_when_idle()
        return gate.handled

    async def third() -> Mapping[str, Any]:
        state = await runtime.agent_save_state(AgentId("echo", "a"))
        await runtime.close()
        return state

    assert asyncio.run(asyncio.wait_for(first(), SECONDS)) == Answer("hi", by="echo/a")
    assert asyncio.run(asyncio.wait_for(second(), SECONDS)) == ["x"]
    assert asyncio.run(asyncio.wait_for(third(), SECONDS)) == {"count": 2}


def test_a_closed_runtime_is_started_again_in_another_event_loop(broker_url: str, namespace: str) -> None:
    runtime = Runtime(broker_url, namespace, services=False, lease_seconds=1.0)

    async def run(*, first: bool) -> Answer:
        async with runtime:
            if first:
                await Echo.register(runtime, "echo", Echo)
            answer: Answer = await asyncio.wait_for(runtime.send_message(Ask("hi"), AgentId("echo", "a")), SECONDS)
            return answer

    assert asyncio.run(run(first=True)) == asyncio.run(run(first=False)) == Answer("hi", by="echo/a")


async def test_a_runtime_belongs_to_one_thread_at_a_time(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    with pytest.raises(RuntimeError, match="another thread's event loop"):
        await asyncio.to_thread(asyncio.run, runtime.get(AgentId("echo", "a"), lazy=False))


async def test_stop_does_not_wait_forever_for_a_handler(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(shutdown_seconds=0.1)
    await Gate.register(runtime, "gate", Gate)
    runtime.start()
    gate = await gate_of(runtime)
    asked = asyncio.create_task(runtime.send_message(Ask("x"), AgentId("gate", "one")))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    await asyncio.wait_for(runtime.stop(), SECONDS)
    with pytest.raises(RuntimeStopped):
        await asked
    assert gate.inside == 0
    gate.released.set()
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert gate.handled == ["x"]


async def test_a_handler_has_its_time_limit(runtime: Runtime) -> None:
    await runtime.register_factory("gate", Gate, timeout_seconds=0.1)
    runtime.start()
    with pytest.raises(TimeoutError, match="ran for more than"):
        await asyncio.wait_for(runtime.send_message(Ask("x"), AgentId("gate", "one")), SECONDS)


@pytest.mark.parametrize("published", [True, False])
async def test_the_error_of_a_handler_is_in_the_log_with_its_traceback(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, published: bool
) -> None:
    await Echo.register(runtime, "echo", Echo)
    await runtime.add_subscription(TypeSubscription("default", "echo"))
    runtime.start()
    if published:
        await runtime.publish_message(Ask("error"), DEFAULT)
        await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    else:
        with pytest.raises(OwnError):
            await runtime.send_message(Ask("error"), AgentId("echo", "one"))
    (record,) = [each for each in caplog.records if each.name == "runtime_core.integrations.actors.actor"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OwnError)
    assert "agent 'echo'" in record.getMessage()


async def test_a_failed_publication_is_retried_as_declared_and_kept(runtime: Runtime) -> None:
    seen: list[str] = []

    class Fails(Echo):
        async def on_message_impl(self, message: Any, ctx: MessageContext) -> None:
            seen.append(ctx.message_id)
            raise OwnError("always")

    await runtime.register_factory("fails", Fails, retry=RetryPolicy(attempts=3, base_seconds=0.01))
    await runtime.add_subscription(TypeSubscription("default", "fails"))
    runtime.start()
    await runtime.publish_message(Note("n"), DEFAULT, message_id="the-note")
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert seen == ["the-note"] * 3
    bus = (await runtime.broker())[0]
    assert await bus.transport.call("XLEN", bus.keys.dead) == 1


async def test_a_runtime_in_memory_does_not_grow_with_what_was_handled(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    for _ in range(10):
        await runtime.send_message(Ask("hi"), AgentId("echo", "a"))
    bus = (await runtime.broker())[0]
    deadline = asyncio.get_running_loop().time() + SECONDS
    while await bus.transport.call("XLEN", bus.keys.record):
        assert asyncio.get_running_loop().time() < deadline, "nobody trims the record"
        await asyncio.sleep(0.05)
