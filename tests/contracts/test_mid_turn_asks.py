"""Requests in the middle of a turn are sent once, answered on a reply stream, and fenced like a commit."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Replies, name_of_step
from runtime_core.bus.topics import TopicSubscription
from runtime_core.consumer.effects import Completed
from runtime_core.declare.declaration import Place
from runtime_core.errors import Fenced, JournalLost, JournalMoved, LimitExceeded, ServerError
from runtime_core.integrations.actors.actor import ActorDefinition, ActorRun, Actors, current_run
from runtime_core.integrations.actors.agents import native
from runtime_core.integrations.actors.identity import AgentId
from runtime_core.integrations.actors.instances import Instances
from runtime_core.integrations.actors.message import MessageEnvelope, content_of, encode_envelope
from runtime_core.integrations.actors.serialization import SerializationRegistry
from runtime_core.runs.commit import TurnPort, parts_of
from runtime_core.runs.effects import Call
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, fail, now, send, suspend

REPLY = "asker"
SECONDS = 30.0


@pytest.fixture(autouse=True)
async def reply_stream(broker: Broker) -> None:
    """Create the caller's stream, as its reader does: the bus writes only to streams that exist."""
    await broker.call("XGROUP", "CREATE", broker.keys.reply(REPLY), "client", "0", "MKSTREAM")


async def asks(
    bus: EventBus, turn: Delivery, *parts: list[Argument], reply: str = REPLY, state: bytes = b""
) -> dict[str, tuple[bytes, bytes]] | None:
    flat = [item for part in parts for item in part]
    return await bus.ask(turn, now(), reply, state, flat, len(parts))


def agent(step: str, name: str = "editor", key: str = "") -> list[Argument]:
    return ask(step, name, stream="agent", key=key)


async def told(broker: Broker, reply: str = REPLY) -> list[tuple[str, str, str]]:
    """Return what a reply stream holds: name, status and payload."""
    found = [entry for entry in await broker.entries(f"reply:{reply}") if "|" in entry["t"]]
    return [(entry["t"], entry["d"][8], entry["d"][22:]) for entry in found]


async def begun(broker: Broker, bus: EventBus, key: str = "") -> Delivery:
    await broker.submit(bus, "t", key=key)
    return await broker.take(bus)


async def test_an_agent_answers_while_the_turn_continues(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    assert await asks(bus, turn, agent("c1")) == {}
    asked = await broker.take(bus)
    assert (asked.run, asked.name) == ("r/c1", "editor")
    assert await complete(bus, asked, output=b'"edited"')
    assert await told(broker) == [("t|r|c1", "K", '"edited"')]
    await broker.nothing(bus)  # no resume: the turn is still in hand
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_tool_answers_too(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    await asks(bus, turn, ask("c1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await told(broker) == [("t|r|c1", "K", '"found"')]
    assert (await broker.task("t"))["j:c1"].startswith(DIGEST + "K")
    await broker.nothing(bus)


async def test_a_failure_is_reported(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    await asks(bus, turn, agent("c1"), ask("c2"))
    await fail(bus, await broker.take(bus), "no ink")
    await bury(bus, await broker.take(bus, "tool"), message="no paper")
    told_now = [(name, status, json.loads(payload)["message"]) for name, status, payload in await told(broker)]
    assert told_now == [("t|r|c1", "E", "no ink"), ("t|r|c2", "E", "no paper")]


async def test_an_unknown_name_is_answered_at_once(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    found = await asks(bus, turn, ask("c1", "nobody", stream="?agent"))
    assert found is not None
    assert found["c1"][0][8:9] == b"E"
    assert json.loads(found["c1"][0][22:])["type"] == "UnknownName"
    task = await broker.task("t")
    assert (task["j:c1"], task["steps"]) == (found["c1"][0].decode(), "1")
    (entry,) = await broker.entries("record")
    (row,) = json.loads(entry["d"])
    assert (row["kind"], row["name"], row["status"], row["error"]["type"]) == (
        "agent", "nobody", "failed", "UnknownName",
    )  # fmt: skip


async def test_a_repeated_request_starts_nothing_and_gets_the_first_answer(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    await asks(bus, turn, agent("c1"), send("note", step="s1"))
    await asks(bus, turn, agent("c1"), send("note2", step="s1"))
    assert len(await broker.entries("agent")) == 3  # the turn, the question and one note
    for _ in range(2):
        await complete(bus, await broker.take(bus), output=b'"once"')
    found = await asks(bus, turn, agent("c1"), agent("c1"))
    assert found is not None
    assert found["c1"][0][22:] == b'"once"'


async def test_the_process_that_continues_the_turn_gets_the_answer(broker: Broker, bus: EventBus) -> None:
    """The caller died. Its successor sends the same request again and gets the answer."""
    turn = await begun(broker, bus)
    await asks(bus, turn, agent("c1"))
    second = await broker.owner()
    await broker.silence(bus)
    asked = None
    for _ in range(2):
        adopted = (await second.adopt("agent", 1, False)).deliveries
        if adopted:
            turn = adopted[0]
    await broker.call("XGROUP", "CREATE", broker.keys.reply("second"), "client", "0", "MKSTREAM")
    assert await asks(second, turn, agent("c1"), reply="second") == {}
    asked = await broker.take(second)
    assert await complete(second, asked)
    assert await told(broker) == []
    assert await told(broker, "second") == [("t|r|c1", "K", '"done"')]


async def test_only_the_turns_owner_sends_requests(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    assert await complete(bus, turn)
    before = await broker.snapshot()
    assert await asks(bus, turn, agent("c1"), send("note")) is None
    assert await broker.snapshot() == before


async def test_a_dead_owner_asks_nothing(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    await broker.owner()
    await broker.silence(bus)
    with pytest.raises(Fenced):
        await asks(bus, turn, agent("c1"))
    assert len(await broker.entries("agent")) == 1


async def test_the_limit_of_steps_counts_questions(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", max_steps=1)
    turn = await broker.take(bus)
    with pytest.raises(LimitExceeded, match="max_steps=1"):
        await asks(bus, turn, agent("c1"), agent("c2"))
    assert len(await broker.entries("agent")) == 1


async def test_a_turn_asks_up_to_its_limit_of_steps(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", max_steps=2)
    assert await asks(bus, await broker.take(bus), agent("c1"), agent("c2")) == {}


async def test_a_malformed_request_changes_nothing(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus, key="k")
    before = await broker.snapshot()
    short: list[Argument] = ["c", "agent", "c2"]
    malformed: list[list[Argument]] = [short, ["z", "c2", DIGEST], ["q", "c2", DIGEST, "!", b"{}", "", ""]]
    for part in malformed:
        with pytest.raises(ServerError, match="malformed part"):
            await asks(bus, turn, agent("c1"), part, state=b'{"n":1}')
    assert await broker.snapshot() == before


async def test_messages_leave_in_mid_turn(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(TopicSubscription("news", "desk"))
    turn = await begun(broker, bus)
    await asks(bus, turn, send("note", step="s1"), ["p", "m", "news", "k", b"1", b"", "", "p1", DIGEST])
    assert {(await broker.take(bus)).name for _ in range(2)} == {"editor", "desk"}
    await asks(bus, turn, send("note", step="s1"), ["p", "m", "news", "k", b"1", b"", "", "p1", DIGEST])
    await broker.nothing(bus)


async def test_a_reentrant_call_is_delivered_while_the_turn_waits(broker: Broker, bus: EventBus) -> None:
    """A calls B, which calls A: A's own turn is in flight, and the nested one still begins."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"), state=b'{"n":1}')
    editor = await broker.take(bus)
    await asks(bus, editor, agent("c1", "writer", key="k"))
    nested = await broker.take(bus)
    assert (nested.run, nested.instance) == ("r/c1/c1", "writer/k")
    fields = await bus.load(nested)
    assert fields is not None
    assert fields.state == b'{"n":1}'
    await complete(bus, nested, state=b'{"n":2}')
    await complete(bus, editor)
    # The answer brings what the nested turn has made of the state.
    final = next(entry for entry in await broker.entries(f"reply:{REPLY}") if entry["t"] == "t|r|c1")
    assert final["s"] == '1 {"n":2}', "with the number of the change: a replay takes answers in another order"
    repeated = await asks(bus, turn, agent("c1"))
    assert repeated is not None
    assert repeated["c1"][1] == b'1 {"n":2}', "a handler that runs and asks again gets it too"
    await complete(bus, turn, state=b'{"n":3}')
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":3}'
    await broker.idle()


async def test_a_reentrant_call_is_delivered_while_the_turn_waits_for_a_call_of_an_earlier_turn(
    broker: Broker, bus: EventBus
) -> None:
    turn = await begun(broker, bus, key="k")
    assert await suspend(bus, turn, agent("c1"), ask("c2"))
    editor = await broker.take(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await asks(bus, turn, agent("c1")) == {}
    await asks(bus, editor, agent("c1", "writer", key="k"))
    nested = await broker.take(bus)
    assert (nested.run, nested.instance) == ("r/c1/c1", "writer/k")
    for each in (nested, editor, turn):
        assert await complete(bus, each)
    await broker.idle()


async def test_a_repeated_request_keeps_the_state_changed_by_a_reentrant_call(broker: Broker, bus: EventBus) -> None:
    """Its state is the one before the request: the handler repeats it after a crash, or after a lost reply."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1", "writer", key="k"), state=b'{"n":1}')
    await complete(bus, await broker.take(bus), state=b'{"n":2}')
    await asks(bus, turn, agent("c1", "writer", key="k"), state=b'{"n":1}')
    await asks(bus, turn, agent("c2", "writer", key="k"))
    nested = await broker.take(bus)
    fields = await bus.load(nested)
    assert fields is not None
    assert (nested.run, fields.state) == ("r/c2", b'{"n":2}')


async def test_a_request_repeated_before_its_answer_keeps_the_state_of_a_reentrant_call(
    broker: Broker, bus: EventBus
) -> None:
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"), state=b'{"n":1}')
    editor = await broker.take(bus)
    await asks(bus, editor, agent("c1", "writer", key="k"))
    await complete(bus, await broker.take(bus), state=b'{"n":2}')
    await asks(bus, turn, agent("c1"), state=b'{"n":1}')
    await asks(bus, editor, agent("c2", "writer", key="k"))
    nested = await broker.take(bus)
    fields = await bus.load(nested)
    assert fields is not None
    assert (nested.run, fields.state) == ("r/c1/c2", b'{"n":2}')


async def test_reentrant_calls_run_one_at_a_time_while_their_holder_keeps_asking(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"), agent("c2", "desk"))
    for _ in range(2):
        await asks(bus, await broker.take(bus), agent("c1", "writer", key="k"))
    first = await broker.take(bus)
    assert first.run == "r/c1/c1"
    await asks(bus, turn, ask("c3"))
    await broker.nothing(bus)
    assert await complete(bus, first)
    assert (await broker.take(bus)).run == "r/c2/c1"


async def test_a_reentrant_call_knows_the_holder_of_its_instance(broker: Broker, bus: EventBus) -> None:
    """Other handlers that its process finds in the object are over."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1", "writer", key="k"))
    fields = await bus.load(await broker.take(bus))
    assert fields is not None
    assert fields.holders == ["t|r", "t|r/c1"]
    fields = await bus.load(turn)
    assert fields is None or fields.holders == []


@pytest.mark.parametrize("below", ["fails", "completes"])
async def test_a_reentrant_call_continues_after_the_run_below_it_ends(
    broker: Broker, bus: EventBus, below: str
) -> None:
    """Two reentrant calls of one turn: the second one starts when the first one waits, and completes before it."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1", "writer", key="k"), agent("c2", "writer", key="k"), state=b'{"n":1}')
    first = await broker.take(bus)
    await asks(bus, first, agent("c1", "editor"), state=b'{"n":2}')
    waits = {delivery.run: delivery for delivery in [await broker.take(bus), await broker.take(bus)]}
    assert await complete(bus, waits["r/c2"], state=b'{"n":3}')
    await (fail(bus, first) if below == "fails" else complete(bus, first))
    answers = [entry for entry in await broker.entries(f"reply:{REPLY}") if entry.get("t", "").startswith("t|r|c")]
    assert [entry["s"] for entry in answers if "s" in entry] == ['1 {"n":3}'], "the state that the second one has left"


async def test_a_turn_that_ends_below_a_reentrant_call_keeps_its_state(broker: Broker, bus: EventBus) -> None:
    """A time limit ended its handler's wait; the reentrant call is still in a handler."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"))
    editor = await broker.take(bus)
    await asks(bus, editor, agent("c1", "writer", key="k"))
    nested = await broker.take(bus)
    assert nested.instance == "writer/k"
    assert await complete(bus, turn, state=b'{"n":1}')
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":1}'
    for late in (nested, editor):
        assert not await complete(bus, late)
    await broker.idle()


async def test_a_reentrant_call_is_handled_again_after_a_turn_that_ends_below_it(broker: Broker, bus: EventBus) -> None:
    """It came through another partition, so it does not end with that turn, whose change it has not seen."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"))
    asked = await broker.take(bus)
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"0:t|r"}')
    nested = await broker.take(bus)
    assert nested.task == "back"
    assert await complete(bus, turn, state=b'{"n":1}')
    assert not await complete(bus, nested, state=b'{"stale":1}')
    repeated = await broker.take(bus)
    assert (repeated.task, repeated.run, repeated.turn) == ("back", "r", -1)
    fields = await bus.load(repeated)
    assert fields is not None
    assert fields.state == b'{"n":1}'
    assert await complete(bus, repeated, state=b'{"n":2}')
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":2}'
    assert not await complete(bus, asked)
    await broker.idle()


async def test_a_call_backs_next_attempt_begins_with_the_state_of_a_turn_that_ended_below(
    broker: Broker, bus: EventBus
) -> None:
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"))
    assert (await broker.take(bus)).name == "editor"
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"0:t|r"}')
    assert await bus.retry(await broker.take(bus), 60_000, b"")
    assert await complete(bus, turn, state=b'{"n":1}')
    await broker.nothing(bus)  # before its time
    assert (await broker.task("back"))["s0"] == '{"n":1}'


async def test_a_caller_whose_request_the_broker_lost_is_reported(broker: Broker, bus: EventBus) -> None:
    """A server that comes back without its last writes answers no request that was among them."""
    turn = await begun(broker, bus)
    replies = Replies(bus, REPLY, await broker.connect())
    on_its_way = replies.expect(name_of_step("t", "r", "c2"))
    port = TurnPort(bus, turn, App("asks"), replies=replies)
    waiting = (await port.ask([Call("agent", "c1", "editor", b"null", DIGEST)]))["c1"]
    await replies._look_up()
    assert not waiting.done(), "the broker owes its answer"
    await broker.call("HDEL", broker.keys.run("t", "r"), "m:c1")
    await replies._look_up()
    with pytest.raises(JournalMoved, match="c1"):
        await waiting
    assert not on_its_way.done(), "the broker has not had it yet"


async def test_an_answer_whose_reply_was_lost_is_found_in_the_journal(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    replies = Replies(bus, REPLY, await broker.connect())
    waiting = await TurnPort(bus, turn, App("asks"), replies=replies).ask([Call("agent", "c1", "editor", b"", DIGEST)])
    assert await complete(bus, await broker.take(bus), output=b'"edited"')
    await replies._look_up()
    assert (await waiting["c1"]).value.endswith(b'"edited"')


async def test_a_turn_stays_quarantined_while_its_answers_are_recorded(broker: Broker, bus: EventBus) -> None:
    """The code that killed its processes may follow an answer that the journal has."""
    turn = await begun(broker, bus)
    turn.deliveries, turn.quarantined = 4, True
    port = TurnPort(bus, turn, App("asks"), replies=Replies(bus, REPLY, await broker.connect()))
    call = Call("agent", "c1", "editor", b"", DIGEST)
    assert await asks(bus, turn, agent("c1")) == {}
    assert await complete(bus, await broker.take(bus), output=b'"edited"')
    await port.ask([call])
    assert (turn.deliveries, turn.quarantined) == (4, True)
    await port.ask([call, Call("agent", "c2", "editor", b"", DIGEST)])
    assert (turn.deliveries, turn.quarantined) == (1, False), "it waits for a called agent, which may need this process"


async def test_a_turn_does_not_end_with_an_answer_that_the_broker_lost(broker: Broker, bus: EventBus) -> None:
    """The requested run is handled again: the turn's state has its change already."""
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"), agent("c2"))
    for _ in range(2):
        assert await complete(bus, await broker.take(bus))
    port = TurnPort(bus, turn, App("asks"), loaded=True)
    parts, count = parts_of(Completed(b"1", answered=["c1", "c2"]), turn, App("asks"))
    await port.store_again([], (), ["c1", "c2"])
    kept = (await broker.task("t"))["j:c2"]
    await broker.call("HDEL", broker.keys.run("t", "r"), "j:c2")
    with pytest.raises(JournalLost):
        await bus.commit_turn(turn, "c", now(), b"", 0, b"1", b"", parts, count)
    with pytest.raises(JournalMoved, match="lost an answer"):
        await port.store_again([], (), ["c1", "c2"])
    await broker.call("HSET", broker.keys.run("t", "r"), "j:c2", kept)
    assert await bus.commit_turn(turn, "c", now(), b"", 0, b"1", b"", parts, count)


async def test_a_handler_whose_answer_the_broker_lost_runs_again(broker: Broker, bus: EventBus) -> None:
    runs, used, may_end = list[ActorRun](), asyncio.Event(), asyncio.Event()

    class Writer:
        async def on_message(self, message: object, ctx: object) -> None:
            run = current_run(actors)
            assert run is not None
            runs.append(run)
            await run.request(AgentId("editor", "e"), MessageEnvelope(), None)
            used.set()
            await may_end.wait()

        async def close(self) -> None:
            """Nothing is open."""

    async def build(type: str, key: str) -> Writer:
        return Writer()

    registry, app = SerializationRegistry(), App("objects")
    actors = Actors(native(), registry, Instances(build, native().keeps_state, 1), lambda error: None)
    app.functions.agents.add(ActorDefinition("writer", actors, Place(__file__, 1)))
    replies = Replies(bus, REPLY, await broker.connect())
    replies.start()
    message = encode_envelope(MessageEnvelope(content_of("go", registry)))
    await broker.submit(bus, "t", key="k", input_json=message)
    turns = TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"), replies=replies)
    handling = asyncio.create_task(turns.handle(await broker.take(bus)))
    taken, _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
    (editor,) = taken
    lost = next((name, value) for name, value in (await broker.task("t")).items() if name.startswith("m:"))
    assert await complete(bus, editor, output=b"null")
    await used.wait()
    await broker.call("HDEL", broker.keys.run("t", "r"), f"j:{lost[0][2:]}")
    await broker.call("HSET", broker.keys.run("t", "r"), *lost)
    may_end.set()
    async with asyncio.timeout(SECONDS):
        while len(runs) < 2:
            assert not handling.done()
            await asyncio.sleep(0.01)
    assert await broker.status("t") in ("accepted", "running")
    handling.cancel()
    await asyncio.wait((handling,))
    await replies.close()


async def test_others_wait_in_the_mailbox_while_a_turn_asks(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"))
    await broker.submit(bus, "other", key="k")
    assert (await broker.take(bus)).name == "editor"
    await broker.nothing(bus)
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "other"


async def test_the_end_of_a_task_frees_its_requests(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus)
    await asks(bus, turn, agent("c1", key="e"))
    asked = await broker.take(bus)
    assert await complete(bus, turn)
    assert not await complete(bus, asked)
    await broker.idle()


# -- two reentrant calls into one instance -------------------------------------------------------------------------


async def called_back_twice(broker: Broker, bus: EventBus, first: str = "") -> tuple[Delivery, Delivery, Delivery]:
    """A turn has asked two others, and both call back. The first one asks the editor, so the second one starts.

    Returns the first reentrant call, the run that it has asked, and the second one. `first`: the key of the one that
    makes the first reentrant call.
    """
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1", key=first), agent("c2", "desk"))
    one, two = await broker.take(bus), await broker.take(bus)
    await asks(bus, one, agent("1", "writer", "k"))
    back = await broker.take(bus)
    await asks(bus, back, agent("1", "desk"), state=b'{"n":1}')
    asked = await broker.take(bus)
    await asks(bus, two, agent("1", "writer", "k"))
    second = await broker.take(bus)
    assert (back.run, asked.run, second.run) == ("r/c1/1", "r/c1/1/1", "r/c2/1")
    return back, asked, second


async def test_a_reentrant_call_gets_its_answer_when_the_one_on_top_of_it_ends(broker: Broker, bus: EventBus) -> None:
    """It would go on with its state while the other one changes it."""
    _, asked, second = await called_back_twice(broker, bus)
    loaded = await bus.load(second)
    assert loaded is not None
    assert loaded.state == b'{"n":1}'
    assert await complete(bus, asked, output=b'"asked"')
    assert await told(broker) == []
    assert await complete(bus, second, state=b'{"n":2}')
    found = [entry for entry in await broker.entries(f"reply:{REPLY}") if "|" in entry["t"]]
    assert [(entry["t"], entry["d"][22:], entry.get("s")) for entry in found] == [
        ("t|r/c2|1", '"done"', None),
        ("t|r/c1/1|1", '"asked"', '1 {"n":2}'),
    ]


async def test_an_answer_that_was_held_back_is_delivered_once(broker: Broker, bus: EventBus) -> None:
    """Of two answers from another partition the first one counts, and has the row."""
    await called_back_twice(broker, bus)
    place = ("t", "r/c1/1", "1")
    assert await bus.answer_request(*place, b"K", b'"one"', "desk", "there")
    steps = (await broker.task("t"))["steps"]
    assert not await bus.answer_request(*place, b"K", b'"two"', "desk", "there")
    assert (await broker.task("t"))["steps"] == steps


async def test_a_reentrant_call_does_not_start_before_the_holder_waits(broker: Broker, bus: EventBus) -> None:
    turn = await begun(broker, bus, key="k")
    await asks(bus, turn, agent("c1"), agent("c2", "desk"))
    one, two = await broker.take(bus), await broker.take(bus)
    await asks(bus, one, agent("1", "writer", "k"))
    back = await broker.take(bus)
    await asks(bus, back, agent("1", "desk"))
    assert await complete(bus, await broker.take(bus))
    await asks(bus, two, agent("1", "writer", "k"))
    await broker.nothing(bus)
    await asks(bus, back, send("note", key="n"))
    assert (await broker.take(bus)).task == "note"
    await broker.nothing(bus)
    await asks(bus, back, agent("2", "desk"))
    assert [(await broker.take(bus)).run for _ in range(2)] == ["r/c1/1/2", "r/c2/1"]


async def test_a_turn_below_another_one_is_repeated_when_that_one_ends(broker: Broker, bus: EventBus) -> None:
    """Its process died. Until then the one on top of it has the instance's state."""
    other = await broker.owner()
    back, asked, second = await called_back_twice(broker, bus)
    assert await complete(bus, asked, output=b'"asked"')
    assert await bus.load(back) is None
    await broker.nothing(other)
    assert await complete(bus, second, state=b'{"n":2}')
    again = await broker.take(other)
    assert (again.run, again.kind) == (back.run, "resume")
    loaded = await other.load(again)
    assert loaded is not None
    assert (loaded.journal["1"][22:], loaded.overrides["1"]) == (b'"asked"', b'1 {"n":2}')


async def test_an_answer_that_was_held_back_outlives_the_end_of_its_task(broker: Broker, bus: EventBus) -> None:
    """A reopened task asks for it again, and who gave it is gone."""
    back, asked, _ = await called_back_twice(broker, bus)
    await asks(bus, back, ask("9"))
    await bury(bus, await broker.take(bus, "tool"))
    assert await complete(bus, asked, output=b'"asked"')
    await bus.cancel("t", "no more")
    run = await broker.hash(f"run:t/{back.run}")
    assert run["j:1"][22:] == '"asked"'
    assert not run.keys() & {"y", "m:1", "ao"}


async def test_a_request_that_would_wait_for_its_own_caller_is_a_deadlock(broker: Broker, bus: EventBus) -> None:
    """That one goes on only when this one is over: the request would wait for itself."""
    _, _, second = await called_back_twice(broker, bus, first="e")
    found = await asks(bus, second, agent("1", "editor", "e"))
    assert found is not None
    assert json.loads(found["1"][0][22:])["type"] == "Deadlock"
