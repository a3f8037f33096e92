"""A run of an agent object's handler: its steps, and its ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from runtime_core.bus.deliveries import RunFields
from runtime_core.bus.replies import Answer
from runtime_core.consumer.effects import Completed, Effect, Failed
from runtime_core.declare.declaration import Place
from runtime_core.errors import BusError, JournalMoved, LimitExceeded
from runtime_core.integrations.actors import actor
from runtime_core.integrations.actors.actor import ActorDefinition, ActorRun, Actors, current_run
from runtime_core.integrations.actors.agents import native
from runtime_core.integrations.actors.identity import AgentId, TopicId
from runtime_core.integrations.actors.instances import Instances
from runtime_core.integrations.actors.message import MessageEnvelope, content_of, encode_envelope
from runtime_core.integrations.actors.serialization import SerializationRegistry
from runtime_core.runs.effects import Call, Publish
from runtime_core.runs.journal import packed_now
from runtime_core.runs.ports import Attempt, Meta, Workplace
from runtime_core.wire.ids import step_digest
from runtime_core.wire.step import RESULT_OK
from tests.unit.runs.run_world import World

Handle = Callable[[ActorRun], Awaitable[None]]

TOPIC = TopicId("news", "all")
ECHO = AgentId("echo", "one")


class Broker(World):
    """Answers requests in the middle of a turn with null, or fails."""

    def __init__(self, fault: BusError | LimitExceeded | None = None, lost: JournalMoved | None = None) -> None:
        """`fault`: every request fails with it. `lost`: every answer is lost."""
        super().__init__()
        self.fault = fault
        self.lost = lost
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        """Cleared: requests wait."""
        self.gate.set()
        self.requests = 0
        self.left: list[str] = []
        """Steps sent in the middle of a turn, in order."""
        self.states: list[bytes] = []
        """The state that each request took along."""

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b"", *, answered: str = ""
    ) -> dict[str, asyncio.Future[Answer]]:
        self.called.set()
        self.requests += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        self.left += [each.step for each in (*sends, *calls)]
        self.states.append(state)
        answers = {call.step: asyncio.get_running_loop().create_future() for call in calls}
        for call in calls:
            if self.lost is not None:
                answers[call.step].set_exception(self.lost)
            else:
                answers[call.step].set_result(Answer(packed_now(call.digest, RESULT_OK)))
        return answers


def run_of(
    handle: Handle,
    broker: Broker,
    *,
    seconds: float = 30.0,
    journal: Mapping[str, bytes] | None = None,
    log: list[str] | None = None,
) -> ActorRun:
    """Create a run whose handler calls `handle` with it. `log` is the agent's state."""
    registry = SerializationRegistry()

    class Handler:
        async def on_message(self, message: object, ctx: object) -> None:
            run = current_run(actors)
            assert run is not None
            await handle(run)

        async def close(self) -> None:
            """Nothing to close."""

    class Logging(Handler):
        async def save_state(self) -> Mapping[str, object]:
            return {"log": log}

        async def load_state(self, state: Mapping[str, object]) -> None:
            """Nothing else writes it."""

    async def build(type: str, key: str) -> Handler:
        return Handler() if log is None else Logging()

    actors = Actors(native(), registry, Instances(build, native().keeps_state, 10), lambda error: None)
    actors.shared = log is not None
    definition = ActorDefinition("handler", actors, Place(__file__, 1), timeout_seconds=seconds)
    data = encode_envelope(MessageEnvelope(content_of("go", registry), message_id="m"))
    stored = RunFields(data=data, started_ms=1, journal=dict(journal or {}))
    return ActorRun(definition, Attempt("t-1", "r", key="one"), stored, broker, Workplace(broker.functions), Meta())


async def test_steps_are_named_by_their_content() -> None:
    """Processes of other releases find these ids in the journal, so they may not change."""
    told, asked = MessageEnvelope(message_id="told"), MessageEnvelope(message_id="asked")

    async def handle(run: ActorRun) -> None:
        for _ in range(2):
            run.publish(TOPIC, told)
            await run.request(ECHO, asked, None)

    broker = Broker()
    assert isinstance(await run_of(handle, broker).advance(), Completed)
    published = step_digest("publish", "news", "all", encode_envelope(told))
    requested = step_digest("agent", "echo", "one", encode_envelope(asked))
    assert broker.left == [f"p{published}.0", f"c{requested}.0", f"p{published}.1", f"c{requested}.1"]


async def test_a_message_sent_in_an_earlier_attempt_is_sent_once_and_recorded() -> None:
    async def handle(run: ActorRun) -> None:
        run.publish(TOPIC, MessageEnvelope())
        await run.request(ECHO, MessageEnvelope(), None)

    first = Broker()
    await run_of(handle, first).advance()
    journal = {step: packed_now(step[1:9]) for step in first.left}
    again = Broker()
    result = await run_of(handle, again, journal=journal).advance()
    assert isinstance(result, Completed)
    assert (again.left, result.sends) == ([], [])
    assert [each.step for each in result.journaled] == first.left[:1], "the commit checks that the broker still has it"
    assert [(row.kind, row.step) for row in result.steps] == [("publish", first.left[0])]
    [message] = [json.loads(bytes(row.input)) for row in result.steps]
    assert message["message_id"], "a message without an id gets one that each attempt repeats"


async def test_a_handler_that_takes_too_long_fails_permanently() -> None:
    async def handle(run: ActorRun) -> None:
        await asyncio.Event().wait()

    result = await run_of(handle, Broker(), seconds=0.05).advance()
    assert isinstance(result, Failed)
    assert (result.type, result.retryable) == ("TimeLimit", False)
    assert "a handler of agent 'handler' ran for more than 0.05 s" in result.message


async def test_a_broker_error_ends_the_run_whatever_the_handler_catches() -> None:
    async def handle(run: ActorRun) -> None:
        try:
            await run.request(ECHO, MessageEnvelope(), None)
        except BaseException:
            return

    with pytest.raises(BusError, match="gone"):
        await run_of(handle, Broker(BusError("gone"))).advance()


async def test_a_lost_request_ends_the_run_whatever_the_handler_catches() -> None:
    """It is replayed from what the broker holds, and sends its request again."""

    async def handle(run: ActorRun) -> None:
        try:
            await run.request(ECHO, MessageEnvelope(), None)
        except BaseException:
            return

    with pytest.raises(JournalMoved, match="lost"):
        await run_of(handle, Broker(lost=JournalMoved("lost"))).advance()


async def test_the_commit_names_the_answers_that_the_handler_has_used() -> None:
    """A server that has lost one handles the requested run again: what it changes would count twice."""
    requests = [MessageEnvelope(message_id=number) for number in ("1", "2")]

    async def handle(run: ActorRun) -> None:
        for request in requests:
            await run.request(ECHO, request, None)

    digests = [step_digest("agent", "echo", "one", encode_envelope(request)) for request in requests]
    journal = {f"c{digests[0]}.0": packed_now(digests[0], RESULT_OK, b"null")}
    result = await run_of(handle, Broker(), journal=journal).advance()
    assert isinstance(result, Completed)
    assert result.answered == [f"c{digest}.0" for digest in digests]


async def test_a_replay_keeps_the_state_that_was_written_last() -> None:
    """Two reentrant calls changed the state while the handler waited for both; the first one ended last."""
    seen: list[bytes] = []

    async def catch_up(state: bytes) -> None:
        seen.append(state)

    async def handle(run: ActorRun) -> None:
        assert run._instance is not None
        run._instance.catch_up = catch_up  # type: ignore[method-assign]
        for number in ("1", "2"):
            await run.request(ECHO, MessageEnvelope(message_id=number), None)

    def step(number: str) -> str:
        return step_digest("agent", "echo", "one", encode_envelope(MessageEnvelope(message_id=number)))

    journal = {f"c{step(number)}.0": packed_now(step(number), RESULT_OK, b"null") for number in ("1", "2")}
    run = run_of(handle, Broker(), journal=journal)
    run.overrides = {f"c{step('1')}.0": b'10 {"calls":2}', f"c{step('2')}.0": b'9 {"calls":1}'}

    assert isinstance(await run.advance(), Completed)
    assert [state for state in seen if state] == [b'{"calls":2}']


async def test_a_copy_of_an_answered_request_leaves_the_object_before_its_caller_continues() -> None:
    """A recreated group delivered a reentrant call to this process, too, while another one handled it."""
    events: list[str] = []
    began = asyncio.Event()
    request = MessageEnvelope(message_id="1")
    asked = f"c{step_digest('agent', 'echo', 'one', encode_envelope(request))}.0"

    async def handle(run: ActorRun) -> None:
        if run.run_id != "r":
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                events.append("copy ended")
        else:
            await run.request(ECHO, request, None)
            events.append("caller continues")

    broker = Broker()
    broker.gate.clear()
    caller = run_of(handle, broker)
    handling = asyncio.create_task(caller.advance())
    await broker.called.wait()
    stored, workplace = RunFields(data=caller.input, started_ms=1), Workplace(broker.functions)
    copy = ActorRun(caller.actor, Attempt("t-1", f"r/{asked}", key="one"), stored, Broker(), workplace, Meta())
    copying = asyncio.create_task(copy.advance())
    await began.wait()
    broker.gate.set()
    assert isinstance(await handling, Completed)
    assert events == ["copy ended", "caller continues"]
    with pytest.raises(asyncio.CancelledError):
        await copying


async def test_a_request_takes_the_state_along_if_it_has_changed() -> None:
    """Between two requests, a reentrant call by the first one may have changed the state on the broker."""
    log: list[str] = []

    async def handle(run: ActorRun) -> None:
        await asyncio.gather(*(run.request(ECHO, MessageEnvelope(message_id=id), None) for id in ("1", "2")))
        log.append("changed")
        await run.request(ECHO, MessageEnvelope(message_id="3"), None)

    broker = Broker()
    assert isinstance(await run_of(handle, broker, log=log).advance(), Completed)
    assert broker.states == [b'{"log":[]}', b"", b'{"log":["changed"]}']


async def test_a_concurrent_request_waits_until_the_broker_has_the_state() -> None:
    """If the first one fails, the second one must not start a reentrant call without the state."""

    async def handle(run: ActorRun) -> None:
        await asyncio.gather(
            *(run.request(AgentId("echo", key), MessageEnvelope(), None) for key in "ab"), return_exceptions=True
        )

    broker = Broker()
    broker.gate.clear()
    handling = asyncio.create_task(run_of(handle, broker, log=["told"]).advance())
    await broker.called.wait()
    await asyncio.sleep(0)
    broker.fault = BusError("no such luck")
    broker.gate.set()
    with pytest.raises(BusError):
        await handling
    assert broker.states == []
    assert broker.requests == 1


async def test_an_object_admits_a_handler_while_all_others_wait() -> None:
    """The broker gives the others their answers when that one is over."""

    async def build(type: str, key: str) -> object:
        return object()

    instances, waits = Instances(build, lambda agent: False, 10), [False]
    place = ("handler", "one")
    first = await instances.enter(*place, "t", "r/1", b"", alone=True, shared=True, waits=lambda: waits[0])
    second = asyncio.create_task(instances.enter(*place, "t", "r/2", b"", alone=True, shared=True))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    waits[0] = True
    first.freed.set()
    assert await second is first


async def test_concurrent_handlers_begin_in_the_order_of_their_messages() -> None:
    """The first one waits for the object, which those that come a moment later find."""
    created, begun = asyncio.Event(), list[int]()

    async def build(type: str, key: str) -> object:
        await created.wait()
        return object()

    instances = Instances(build, lambda agent: False, 10)

    async def handle(number: int) -> None:
        await instances.enter("handler", "one", str(number), "r", b"", alone=False, shared=True)
        begun.append(number)

    handling = [asyncio.create_task(handle(0))]
    await asyncio.sleep(0)
    created.set()
    while not begun:
        handling.append(asyncio.create_task(handle(len(handling))))
        await asyncio.sleep(0)
    await asyncio.gather(*handling)
    assert begun == list(range(len(handling)))


async def test_messages_published_before_a_permanent_failure_are_sent() -> None:
    async def handle(run: ActorRun) -> None:
        run.publish(TOPIC, MessageEnvelope())
        raise ValueError("no")

    broker = Broker()
    result = await run_of(handle, broker).advance()
    assert isinstance(result, Failed)
    assert len(broker.left) == 1
    assert [row.kind for row in result.steps] == ["publish"]


async def test_messages_that_left_with_a_request_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "FLUSH_SECONDS", 0.0)
    flushed: list[bool] = []

    async def handle(run: ActorRun) -> None:
        run.publish(TOPIC, MessageEnvelope())
        flushing = run._flushing
        assert flushing is not None
        await run.request(ECHO, MessageEnvelope(), None)
        await flushing
        flushed.append(True)

    broker = Broker()
    assert isinstance(await run_of(handle, broker).advance(), Completed)
    assert (flushed, broker.requests) == ([True], 1)


async def test_a_handler_in_a_stopping_process_sends_no_request() -> None:
    """No agent of this process would answer: the message is handled again elsewhere."""

    async def handle(run: ActorRun) -> None:
        run.actors.stop()
        await run.request(ECHO, MessageEnvelope(), None)

    broker = Broker()
    with pytest.raises(asyncio.CancelledError, match="the runtime stops"):
        await run_of(handle, broker).advance()
    assert broker.requests == 0


async def test_the_commit_publishes_for_a_task_over_its_limit() -> None:
    """The broker refused a write in the middle of the turn, which changes nothing."""
    broker = Broker(LimitExceeded("max_steps"))

    async def handle(run: ActorRun) -> None:
        run.publish(TOPIC, MessageEnvelope(message_id="1"))
        await broker.called.wait()
        await asyncio.sleep(0)
        run.publish(TOPIC, MessageEnvelope(message_id="2"))
        with pytest.raises(LimitExceeded):
            await run.request(ECHO, MessageEnvelope(), None)

    result = await run_of(handle, broker).advance()
    assert isinstance(result, Completed)
    assert [json.loads(send.data)["message_id"] for send in result.sends if isinstance(send, Publish)] == ["1", "2"]


async def test_a_handler_that_ends_while_its_messages_are_written_loses_none() -> None:
    broker = Broker(LimitExceeded("max_steps"))
    broker.gate.clear()

    async def handle(run: ActorRun) -> None:
        run.publish(TOPIC, MessageEnvelope())
        await broker.called.wait()
        asyncio.get_running_loop().call_later(0.05, broker.gate.set)

    result = await run_of(handle, broker).advance()
    assert isinstance(result, Completed)
    assert len(result.sends) == 1


async def test_messages_sent_after_the_end_of_a_handler_are_not_part_of_its_run() -> None:
    late: list[ActorRun | None] = []
    ended = asyncio.Event()
    tasks = []

    async def handle(run: ActorRun) -> None:
        async def later() -> None:
            await ended.wait()
            late.append(current_run(run.actors))

        tasks.append(asyncio.create_task(later()))

    assert isinstance(await run_of(handle, Broker()).advance(), Completed)
    ended.set()
    await asyncio.gather(*tasks)
    assert late == [None]


async def test_a_cancel_fires_the_token_and_the_handler_decides() -> None:
    entered = asyncio.Event()

    async def handle(run: ActorRun) -> None:
        cancelled = asyncio.Event()
        run._token.add_callback(cancelled.set)
        entered.set()
        await cancelled.wait()

    run = run_of(handle, Broker())
    turn = asyncio.create_task(run.advance())
    await entered.wait()
    run.cancel("nobody wants it")
    assert isinstance(await turn, Completed)
