"""A server that loses its last writes while an agent object handles a message: what left in mid-turn is not lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus import replies as replies_module
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Replies
from runtime_core.bus.topics import TopicSubscription
from runtime_core.declare.declaration import Place
from runtime_core.integrations.actors import actor
from runtime_core.integrations.actors.actor import ActorDefinition, ActorRun, Actors, current_run
from runtime_core.integrations.actors.agents import native
from runtime_core.integrations.actors.identity import AgentId, TopicId
from runtime_core.integrations.actors.instances import Instances
from runtime_core.integrations.actors.message import MessageEnvelope, content_of, encode_envelope
from runtime_core.integrations.actors.serialization import SerializationRegistry
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, complete, now
from tests.contracts.test_kept_turns import reconnect

REPLY = "asker"
SECONDS = 20.0
NEWS = TopicId("news", "all")
Handle = Callable[[ActorRun], Awaitable[None]]


@pytest.fixture(autouse=True)
async def subscriber(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The desk gets the news, which leave as soon as they are published."""
    monkeypatch.setattr(actor, "FLUSH_SECONDS", 0.0)
    await bus.subscribe(TopicSubscription("news", "desk"))


@asynccontextmanager
async def handling(broker: Broker, bus: EventBus, handle: Handle) -> AsyncIterator[asyncio.Task[None]]:
    """Give a message to an object whose handler calls `handle` with its run."""

    class Writer:
        async def on_message(self, message: object, ctx: object) -> None:
            run = current_run(actors)
            assert run is not None
            await handle(run)

        async def close(self) -> None:
            """Nothing is open."""

    async def build(type: str, key: str) -> Writer:
        return Writer()

    registry, app = SerializationRegistry(), App("objects")
    actors = Actors(native(), registry, Instances(build, native().keeps_state, 1), lambda error: None)
    app.functions.agents.add(ActorDefinition("writer", actors, Place(__file__, 1)))
    replies = Replies(bus, REPLY, await broker.connect())
    replies.start()
    await broker.submit(bus, "t", key="k", input_json=encode_envelope(MessageEnvelope(content_of("go", registry))))
    turns = TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"), replies=replies)
    task = asyncio.create_task(turns.handle(await broker.take(bus)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await replies.close()


async def has_step(broker: Broker, kind: str) -> str:
    """Wait until the run's hash has a field of this kind for a step, and return the step."""
    async with asyncio.timeout(SECONDS):
        while True:
            for name in await broker.task("t"):
                if name.startswith(kind):
                    return name[2:]
            await asyncio.sleep(0.01)


async def lose_news(broker: Broker) -> None:
    """The server comes back without the message that the turn has published, and without its step."""
    step = await has_step(broker, "j:p")
    entry = (await broker.entries("agent"))[-1]
    task, name = (entry["h"].split("\n")[at] for at in (2, 4))
    assert name == "desk"
    await broker.call("XDEL", broker.keys.stream("agent"), entry["id"])
    await broker.call("DEL", broker.keys.task(task), broker.keys.base + "inst:desk/all")
    await broker.call("HDEL", broker.keys.run("t", "r"), f"j:{step}")


async def test_a_lost_message_is_published_again_by_the_commit(broker: Broker, bus: EventBus) -> None:
    handled = list[str]()

    async def handle(run: ActorRun) -> None:
        handled.append(run.run_id)
        run.publish(NEWS, MessageEnvelope(message_id="news"))
        await lose_news(broker)

    async with handling(broker, bus, handle) as task, asyncio.timeout(SECONDS):
        await task
    assert await broker.status("t") == "completed"
    assert (await broker.take(bus)).name == "desk"
    await broker.nothing(bus)
    assert handled == ["r"]


async def test_a_lost_message_is_published_again_before_the_next_request(broker: Broker, bus: EventBus) -> None:
    handled, lost = list[str](), asyncio.Event()

    async def handle(run: ActorRun) -> None:
        handled.append(run.run_id)
        run.publish(NEWS, MessageEnvelope(message_id="news"))
        await lose_news(broker)
        lost.set()
        await run.request(AgentId("editor", "e"), MessageEnvelope(), None)

    async with handling(broker, bus, handle) as task, asyncio.timeout(SECONDS):
        await lost.wait()
        taken = [(await bus.read(["agent"], 1, int(SECONDS * 1000)))[0][0] for _ in range(2)]
        assert [each.name for each in taken] == ["desk", "editor"]
        assert await complete(bus, taken[1], output=b"null")
        await task
    await broker.nothing(bus)
    assert handled == ["r"]


async def lose_answer(broker: Broker, step: str, missing: str) -> None:
    """The server comes back without the answer to this request, which it still owes."""
    await broker.call("HDEL", broker.keys.run("t", "r"), f"j:{step}")
    await broker.call("HSET", broker.keys.run("t", "r"), f"m:{step}", missing)


@pytest.mark.parametrize("next_one", ["request", "message"])
async def test_nothing_leaves_after_a_lost_answer(broker: Broker, bus: EventBus, next_one: str) -> None:
    """The request is answered again, perhaps differently. What leaves next may depend on the lost answer."""
    used = [asyncio.Event(), asyncio.Event()]
    lost, runs = asyncio.Event(), list[str]()

    async def handle(run: ActorRun) -> None:
        again = len(runs)
        runs.append(run.run_id)
        await run.request(AgentId("editor", "e"), MessageEnvelope(), None)
        used[again].set()
        await lost.wait()
        if next_one == "request":
            await run.request(AgentId("desk", "d"), MessageEnvelope(message_id=f"{again}"), None)
        else:
            run.publish(NEWS, MessageEnvelope(message_id=f"{again}"))
            await has_step(broker, "j:p")

    async with handling(broker, bus, handle), asyncio.timeout(SECONDS):
        (editor,), _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
        step = await has_step(broker, "m:")
        missing = (await broker.task("t"))[f"m:{step}"]
        assert await complete(bus, editor, output=b"null")
        await used[0].wait()
        await lose_answer(broker, step, missing)
        lost.set()
        while len(runs) < 2:
            await asyncio.sleep(0.01)
        await broker.nothing(bus)
        await broker.call("HDEL", broker.keys.run("t", "r"), f"m:{step}")
        await broker.call("HSET", broker.keys.run("t", "r"), f"j:{step}", f"{missing[:8]}K{now()}null")
        (desk,), _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
        assert json.loads((await broker.entries("agent"))[-1]["d"])["message_id"] == "1"
        assert desk.name == "desk"


async def test_nothing_leaves_after_a_lost_request(broker: Broker, bus: EventBus) -> None:
    """It had the object's state for requests back into it, which the later ones rely on."""
    lost, runs = asyncio.Event(), list[str]()

    async def handle(run: ActorRun) -> None:
        runs.append(run.run_id)
        first = asyncio.create_task(run.request(AgentId("editor", "e"), MessageEnvelope(), None))
        if len(runs) == 1:
            await lost.wait()
            await run.request(AgentId("desk", "d"), MessageEnvelope(), None)
        await first

    async with handling(broker, bus, handle), asyncio.timeout(SECONDS):
        (editor,), _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
        assert editor.name == "editor"
        step = await has_step(broker, "m:")
        await broker.call("XDEL", broker.keys.stream("agent"), editor.entry)
        await broker.call("DEL", broker.keys.run("t", editor.run), broker.keys.base + "inst:editor/e")
        await broker.call("HDEL", broker.keys.run("t", "r"), f"m:{step}")
        lost.set()
        await has_step(broker, "m:")
        assert len(runs) == 2
        (again,), _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
        assert again.name == "editor", "and not the desk"


async def test_a_failed_handler_runs_again_if_an_answer_is_lost(broker: Broker, bus: EventBus) -> None:
    """Its message may depend on the answer, so it is not published again before the handler has the new one."""
    runs, used, lost = list[str](), asyncio.Event(), asyncio.Event()

    async def handle(run: ActorRun) -> None:
        runs.append(run.run_id)
        await run.request(AgentId("editor", "e"), MessageEnvelope(), None)
        if len(runs) == 1:
            run.publish(NEWS, MessageEnvelope(message_id="1"))
            await lose_news(broker)
            used.set()
            await lost.wait()
            raise RuntimeError("the handler fails after the server is back")

    async with handling(broker, bus, handle), asyncio.timeout(SECONDS):
        (editor,), _ = await bus.read(["agent"], 1, int(SECONDS * 1000))
        step = await has_step(broker, "m:")
        missing = (await broker.task("t"))[f"m:{step}"]
        assert await complete(bus, editor, output=b"null")
        await used.wait()
        await lose_answer(broker, step, missing)
        await reconnect(broker, bus)
        lost.set()
        while len(runs) < 2:
            await asyncio.sleep(0.01)
        await broker.nothing(bus)


async def test_every_answer_whose_reply_was_lost_is_found(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind more open requests than one lookup covers."""
    monkeypatch.setattr(replies_module, "LOOKUP_MAX", 2)
    replies = Replies(bus, REPLY, await broker.connect())
    waiting = [replies.expect(f"t{number}") for number in range(5)]
    await broker.call("HSET", broker.keys.task("t4"), "status", "completed", "out", "{}")
    for _ in range(3):
        await replies._look_up()
    assert [each.done() for each in waiting] == [False] * 4 + [True]
    await broker.call("HSET", broker.keys.task("t0"), "status", "completed", "out", "{}")
    await replies._look_up()
    assert waiting[0].done()
