"""Publishers with their own ingress streams: their commands are bound to them, and none affects another."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import cast

import pytest

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import ingress
from runtime_core.bus.tasks import Submitted
from runtime_core.bus.topics import Topics, TopicSubscription
from runtime_core.consumer.announcements import announce
from runtime_core.declare.manifest import AgentEntry, Manifest
from runtime_core.errors import InvalidInput, ServerError
from runtime_core.state_manager import ingress as publisher_streams
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.state_manager.ingress import MAX_ENTRY_BYTES, IngressEntry, IngressStream
from runtime_core.state_manager.publishers import Publisher, Publishers
from runtime_core.state_manager.scheduler import Scheduler
from runtime_core.state_manager.schedules import ScheduleBounds, Schedules
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import task_id_of
from tests.contracts.broker import Broker, complete, question, suspend
from tests.contracts.test_ingress import admitting, until

LAST_ID = "18446744073709551615-18446744073709551615"


class World:
    """Two publishers of two tenants: `shop` of acme, and `desk` of globex."""

    def __init__(self, broker: Broker, bus: EventBus) -> None:
        self.broker = broker
        self.bus = bus

    async def register(
        self, name: str, tenant: str, *, agents: Sequence[str] | None = None, topics: Sequence[str] = ()
    ) -> None:
        allowed = None if agents is None else tuple(agents)
        await Publishers(self.bus).set(Publisher(name=name, tenant=tenant, agents=allowed, topics=tuple(topics)))

    def key(self, publisher: str = "") -> str:
        return ingress(self.broker.keys.namespace, publisher)

    async def send(self, publisher: str, kind: str, data: object, *, entry: str = "*", **attributes: str) -> str:
        """Append a command to a publisher's stream, or with `` to the shared one of trusted programs."""
        flat = [part for pair in attributes.items() for part in pair]
        fields = ["type", f"weft.{kind}", "data", json.dumps(data), *flat]
        return cast(bytes, await self.broker.call("XADD", self.key(publisher), entry, *fields)).decode()

    async def settled(self, *publishers: str) -> bool:
        return not any([await self.broker.call("XLEN", self.key(name)) for name in publishers])

    async def admitted(self, *publishers: str) -> None:
        """Run an admitter until the streams are empty."""
        async with admitting(self.broker, self.bus):
            await until(lambda: self.settled(*publishers))

    async def letters(self) -> list[dict[str, str]]:
        return await self.broker.entries("dead")

    async def answers(self, key: str) -> list[dict[str, str]]:
        found = pairs(await self.broker.call("XRANGE", key, "-", "+"))
        return [{flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)} for _, flat in found]

    async def drop(self, *keys: str) -> None:
        for key in keys:
            await self.broker.call("DEL", key)


@pytest.fixture
async def world(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(publisher_streams, "REGISTRY_SECONDS", 0.02)
    monkeypatch.setattr(publisher_streams, "STREAM_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(publisher_streams, "STREAM_BACKOFF_MIN_SECONDS", 0.02)
    monkeypatch.setattr(publisher_streams, "STREAM_BACKOFF_MAX_SECONDS", 0.02)
    world = World(broker, bus)
    await world.register("shop", "acme")
    await world.register("desk", "globex")
    return world


def submit(task: str, agent: str = "writer", **more: object) -> dict[str, object]:
    return {"agent": agent, "input": task, "task_id": task, **more}


# -- what a command is bound to ------------------------------------------------------------------------------------


async def test_a_submit_is_bound_to_its_publisher_and_tenant(world: World) -> None:
    await world.send("shop", "task.submit", submit("t", key="k", session_id="s"), id="e", partitionkey="p")
    await world.admitted("shop")
    turn = await world.broker.take(world.bus)
    assert (turn.task, turn.key) == ("acme.t", "acme/k")
    context = json.loads(turn.context)
    assert (context["tenant"], context["session_id"]) == ("acme", "acme/s")
    header = (await world.broker.task("acme.t"))["h"].split("\n")
    assert (header[6], header[7]) == ("e", "shop")


async def test_a_submit_without_a_task_id_gets_one_of_its_source_and_id(world: World) -> None:
    await world.send("shop", "task.submit", {"agent": "writer", "input": 1}, id="e", source="checkout")
    await world.admitted("shop")
    assert (await world.broker.take(world.bus)).task == f"acme.{task_id_of('shop/checkout', 'e')}"


async def test_names_may_have_the_prefix_already(world: World) -> None:
    await world.send("shop", "task.submit", submit("acme.t", key="acme/k"), source="shop/web")
    await world.admitted("shop")
    turn = await world.broker.take(world.bus)
    assert (turn.task, turn.key) == ("acme.t", "acme/k")
    assert (await world.broker.task("acme.t"))["h"].split("\n")[7] == "shop/web"


async def test_two_publishers_of_one_tenant_share_its_names(world: World) -> None:
    await world.register("web", "acme")
    await world.send("shop", "task.submit", submit("t"))
    await world.admitted("shop")
    await world.send("web", "task.cancel", {"task_id": "t"})
    await world.admitted("web")
    assert await world.broker.status("acme.t") == "cancelled"


async def test_the_same_names_of_two_tenants_are_two_things(world: World) -> None:
    """Otherwise the second would count as a repeat of the first, or be refused because of it."""
    for publisher in ("shop", "desk"):
        await world.send(publisher, "task.submit", submit("t", key="k"), id="e", source="web")
    await world.admitted("shop", "desk")
    started = {
        (turn.task, turn.key) for turn in [await world.broker.take(world.bus), await world.broker.take(world.bus)]
    }
    assert started == {("acme.t", "acme/k"), ("globex.t", "globex/k")}
    assert await world.letters() == []


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"tenant": "globex"}, "tenant"),
        ({"replyto": "desk:answers"}, "replyto"),
        ({"replyto": "shop:answer"}, "replyto"),
        ({"replyto": "shop"}, "replyto"),
    ],
)
async def test_attributes_of_another_publisher_are_refused(
    world: World, attributes: dict[str, str], field: str
) -> None:
    await world.send("shop", "task.submit", submit("t"), **attributes)
    await world.admitted("shop")
    (letter,) = await world.letters()
    assert (letter["field"], letter["stream"]) == (field, "tasks:shop")
    assert await world.answers(attributes.get("replyto", "none")) == []


async def test_its_own_tenant_may_be_stated(world: World) -> None:
    await world.send("shop", "task.submit", submit("t"), tenant="acme")
    await world.admitted("shop")
    assert await world.broker.status("acme.t") == "accepted"


async def test_answers_go_to_the_publishers_own_streams(world: World) -> None:
    """This also holds if the data cannot be read."""
    mine, other = "shop:answers:1", "desk:answers"
    try:
        await world.send("shop", "task.submit", submit("t"), replyto=mine, id="e")
        await world.send("shop", "task.submit", "no object", replyto=mine)
        await world.send("shop", "task.submit", "no object", replyto=other)
        await world.admitted("shop")
        accepted, rejected = await world.answers(mine)
        assert (accepted["type"], json.loads(accepted["data"])) == ("weft.task.accepted", {"task_id": "acme.t"})
        assert accepted["causationid"] == "e"
        assert rejected["type"] == "weft.task.rejected"
        assert await world.answers(other) == []
    finally:
        await world.drop(mine, other)


async def test_names_that_are_too_long_with_the_prefix_are_refused(world: World) -> None:
    await world.send("shop", "task.submit", submit("t" * 196))
    await world.send("shop", "task.submit", submit("t", key="k" * 252))
    await world.send("shop", "task.submit", submit("t", session_id="s" * 252))
    await world.send(
        "shop", "schedule.set", {"schedule_id": "s" * 176, "agent": "writer", "input": 1, "cron": "@daily"}
    )
    await world.admitted("shop")
    fields = [letter["field"] for letter in await world.letters()]
    assert fields == ["data.task_id", "data.key", "data.session_id", "data.schedule_id"]


# -- what belongs to another tenant --------------------------------------------------------------------------------


async def test_nobody_cancels_another_tenants_task(world: World) -> None:
    await world.send("shop", "task.submit", submit("t"))
    await world.admitted("shop")
    for named in ("t", "acme.t"):
        await world.send("desk", "task.cancel", {"task_id": named})
    await world.admitted("desk")
    assert await world.broker.status("acme.t") == "accepted"


async def test_no_tenant_blocks_the_submits_of_another(world: World) -> None:
    """A cancel that comes first refuses the submit of its task."""
    await world.send("desk", "task.cancel", {"task_id": "acme.t"})
    await world.admitted("desk")
    await world.send("shop", "task.submit", submit("t"))
    await world.admitted("shop")
    assert await world.broker.status("acme.t") == "accepted"


async def test_nobody_answers_another_tenants_question(world: World) -> None:
    await world.send("shop", "task.submit", submit("t"))
    await world.admitted("shop")
    assert await suspend(world.bus, await world.broker.take(world.bus), question("1"))
    for named in ("t", "acme.t"):
        await world.send("desk", "task.signal", {"task_id": named, "request_id": "r:1", "value": True})
    await world.admitted("desk")
    assert [letter["field"] for letter in await world.letters()] == ["data.task_id"] * 2
    await world.send("shop", "task.signal", {"task_id": "t", "request_id": "r:1", "value": True})
    await world.admitted("shop")
    assert await complete(world.bus, await world.broker.take(world.bus))


async def test_schedules_are_their_tenants(world: World) -> None:
    """No other publisher can replace or delete it; its tasks run for the tenant, under its names."""
    data = {"schedule_id": "s", "agent": "writer", "input": 1, "key": "k", "session_id": "x", "every_seconds": 60}
    await world.send("shop", "schedule.set", data)
    await world.admitted("shop")
    for named in ("s", "acme.s"):
        await world.send("desk", "schedule.set", {**data, "schedule_id": named, "every_seconds": 1})
        await world.send("desk", "schedule.delete", {"schedule_id": named})
    await world.admitted("desk")
    admission = Admission([world.bus])
    (kept,) = await Schedules(world.bus, admission).all()
    assert (kept.schedule_id, kept.every_ms, kept.tenant) == ("acme.s", 60_000, "acme")

    async def later() -> int:
        return await world.bus.time_ms() + 61_000

    await Scheduler(world.bus, admission, clock=later).start_due()
    turn = await world.broker.take(world.bus)
    context = json.loads(turn.context)
    assert (turn.task.rpartition("-")[0], turn.key) == ("acme.s", "acme/k")
    assert (context["tenant"], context["session_id"]) == ("acme", "acme/x")
    await world.send("shop", "schedule.delete", {"schedule_id": "s"})
    await world.admitted("shop")
    assert await Schedules(world.bus, admission).all() == []


async def test_the_schedules_of_a_tenant_are_bounded_in_bytes(world: World) -> None:
    """Otherwise 10,000 of them with inputs of 1 MiB would fill the broker, whose limits are about tasks."""
    data = {"agent": "writer", "input": "x" * 3_000, "cron": "@daily"}
    schedules = Schedules(world.bus, Admission([world.bus]))
    for leader in range(2):  # the second one counts what it finds
        async with admitting(world.broker, world.bus, schedule_bounds=ScheduleBounds(100, 10_000)):
            for number in range(5):
                await world.send("shop", "schedule.set", {**data, "schedule_id": f"s{leader}-{number}"})
            # The same again, and a smaller one, take no more; a larger one does.
            await world.send("shop", "schedule.set", {**data, "schedule_id": "s0-0"})
            await world.send("shop", "schedule.set", {**data, "schedule_id": "s0-1", "input": "x" * 2_900})
            await world.send("shop", "schedule.set", {**data, "schedule_id": "s0-2", "input": "x" * 9_000})
            await world.send("desk", "schedule.set", {**data, "schedule_id": f"s{leader}"})
            await until(lambda: world.settled("shop", "desk"))
        found = {each.schedule_id: each for each in await schedules.all()}
        assert set(found) - {"globex.s0", "globex.s1"} == {"acme.s0-0", "acme.s0-1", "acme.s0-2"}
        assert found["acme.s0-1"].task["input"] == "x" * 2_900
    refused = await world.letters()
    assert len(refused) == 3 + 6
    assert all("would take more than 10000 bytes" in each["error"] for each in refused)
    async with admitting(world.broker, world.bus, schedule_bounds=ScheduleBounds(100, 10_000)):
        await world.send("shop", "schedule.delete", {"schedule_id": "s0-0"})
        await world.send("shop", "schedule.set", {**data, "schedule_id": "s3"})
        await until(lambda: world.settled("shop"))
    assert "acme.s3" in {each.schedule_id for each in await schedules.all()}
    for each in await schedules.all():
        await schedules.delete(each.schedule_id)


async def test_a_tenant_cannot_take_the_schedules_of_others(world: World) -> None:
    data = {"agent": "writer", "input": 1, "cron": "@daily"}
    async with admitting(world.broker, world.bus, schedule_bounds=ScheduleBounds(3)):
        for number in range(5):
            await world.send("shop", "schedule.set", {**data, "schedule_id": f"s{number}"})
        await until(lambda: world.settled("shop"))
        # A schedule that exists may be replaced, and another tenant and trusted programs are not affected.
        await world.send("shop", "schedule.set", {**data, "schedule_id": "s0", "cron": "@hourly"})
        await world.send("desk", "schedule.set", {**data, "schedule_id": "s0"})
        await world.send("", "schedule.set", {**data, "schedule_id": "acme.trusted"})
        # A deleted one makes room.
        await world.send("shop", "schedule.delete", {"schedule_id": "s1"})
        await world.send("shop", "schedule.set", {**data, "schedule_id": "s5"})
        await until(lambda: world.settled("", "shop", "desk"))
    schedules = Schedules(world.bus, Admission([world.bus]))
    found = {each.schedule_id: each for each in await schedules.all()}
    assert set(found) == {"acme.s0", "acme.s2", "acme.s5", "acme.trusted", "globex.s0"}
    assert (found["acme.s0"].cron, found["acme.s2"].cron) == ("@hourly", "@daily")
    refused = await world.letters()
    assert len(refused) == 2
    assert all(
        "tenant 'acme' has 3 schedules, the maximum (WEFT_TENANT_SCHEDULES_MAX)" in each["error"] for each in refused
    )
    # The next leader counts those that it finds, and the one that a trusted program has set.
    await schedules.delete("acme.trusted")
    await schedules.delete("acme.s2")
    async with admitting(world.broker, world.bus, schedule_bounds=ScheduleBounds(3)):
        for number in range(6, 8):
            await world.send("shop", "schedule.set", {**data, "schedule_id": f"s{number}"})
        await until(lambda: world.settled("shop"))
    assert {each.schedule_id for each in await schedules.all()} == {"acme.s0", "acme.s5", "acme.s6", "globex.s0"}
    for each in await schedules.all():
        await schedules.delete(each.schedule_id)


@pytest.mark.parametrize("name", ["schedule", "client", "weft", "anonymous", "Shop", "a/b", "", "a" * 64, "-a", "a:b"])
async def test_names_that_publishers_may_not_have(world: World, name: str) -> None:
    """`schedule/…` is the source of what schedules start: its publisher could use up their ids."""
    with pytest.raises(InvalidInput) as refused:
        await world.register(name, "acme")
    assert refused.value.field == "publisher"


@pytest.mark.parametrize("tenant", ["", "a.b", "a/b", "Acme"])
async def test_names_that_tenants_may_not_have(world: World, tenant: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        await world.register("shop", tenant)
    assert refused.value.field == "tenant"


async def test_the_namespace_is_not_a_publisher(world: World) -> None:
    world.broker.keys.namespace = "production"
    world.bus.keys.namespace = "production"
    with pytest.raises(InvalidInput, match="reserved"):
        await world.register("production", "acme")


# -- references to blobs -------------------------------------------------------------------------------------------

STORE = "file:///blobs"


def reference(url: object) -> dict[str, object]:
    return {"weft.reference": url, "bytes": 1}


@pytest.mark.parametrize(
    "url", ["globex.t/a.json", "acme.t/../globex.t/a.json", "acmex/a.json", "", "acme.t/.\t./x", 7]
)
async def test_a_reference_to_another_tenants_blob_is_refused(world: World, url: object) -> None:
    """An engine function would read it with the rights of its service."""
    named = f"{STORE}/{world.broker.keys.namespace}/{url}" if isinstance(url, str) else url
    value = {"deep": [1, {"er": reference(named)}]}
    schedule = {"schedule_id": "s", "agent": "writer", "input": 1, "cron": "@daily"}
    await world.register("shop", "acme", topics=["facts"])
    for kind, data, field in (
        ("task.submit", {"agent": "writer", "input": value}, "data.input"),
        ("task.submit", {"agent": "writer", "input": 1, "metadata": {"a": value}}, "data.metadata"),
        ("task.signal", {"task_id": "t", "request_id": "q", "value": value}, "data.value"),
        ("topic.publish", {"topic": "facts", "data": value}, "data.data"),
        ("schedule.set", {**schedule, "input": value}, "data.input"),
        ("schedule.set", {**schedule, "metadata": {"a": value}}, "data.metadata"),
    ):
        await world.send("shop", kind, data)
        async with admitting(world.broker, world.bus, blob_url=STORE):
            await until(lambda: world.settled("shop"))
        letter = (await world.letters())[-1]
        assert letter["field"] == field
        message = json.loads(letter["error"])["message"]
        assert f"{field}: refers to {json.dumps(named)}, which is not a result of a task of tenant 'acme'" in message
        assert message.endswith("; send the value itself, or a reference from an answer to this tenant")
    await world.broker.nothing(world.bus)
    assert await Schedules(world.bus, Admission([world.bus])).all() == []


async def test_a_reference_to_the_tenants_own_blob_is_let_through(world: World) -> None:
    own = reference(f"{STORE}/{world.broker.keys.namespace}/acme.t/a.json")
    await world.send("shop", "task.submit", submit("t", input=[own]))
    async with admitting(world.broker, world.bus, blob_url=STORE):
        await until(lambda: world.settled("shop"))
    assert json.loads((await world.broker.take(world.bus)).data) == [own]


async def test_without_a_blob_store_no_reference_is_a_publishers_own(world: World) -> None:
    await world.send(
        "shop", "task.submit", submit("t", input=reference(f"/{world.broker.keys.namespace}/acme.t/a.json"))
    )
    await world.admitted("shop")
    assert [letter["field"] for letter in await world.letters()] == ["data.input"]


async def test_trusted_programs_may_refer_to_every_blob(world: World) -> None:
    found = reference(f"{STORE}/{world.broker.keys.namespace}/globex.t/a.json")
    await world.send("", "task.submit", submit("t", input=found))
    await world.admitted("")
    assert json.loads((await world.broker.take(world.bus)).data) == found


# -- agents and topics ---------------------------------------------------------------------------------------------


async def test_an_unknown_agents_refusal_names_no_others(world: World) -> None:
    await world.register("desk", "globex", agents=["editor", "desk"])
    await world.send("shop", "task.submit", submit("t", agent="nobody"))
    await world.send("shop", "schedule.set", {"schedule_id": "s", "agent": "nobody", "input": 1, "cron": "@daily"})
    await world.send("desk", "task.submit", submit("t", agent="writer"))
    await world.send("desk", "schedule.set", {"schedule_id": "s", "agent": "writer", "input": 1, "cron": "@daily"})
    await world.send("desk", "task.submit", submit("t", agent="editor"))
    await world.admitted("shop", "desk")
    errors = [json.loads(letter["error"])["message"] for letter in await world.letters()]
    unlisted = "data.agent: publisher 'desk' may not submit to writer; it may submit to editor, desk"
    assert sorted(errors) == ["data.agent: no agent is named nobody"] * 2 + [unlisted] * 2
    assert await world.broker.status("globex.t") == "accepted"


async def test_trusted_programs_see_the_names_of_agents(world: World) -> None:
    await world.send("", "task.submit", submit("t", agent="nobody"))
    await world.admitted("")
    (letter,) = await world.letters()
    assert "choose from desk, editor, writer" in letter["error"]


async def test_no_submit_starts_an_internal_agent(world: World) -> None:
    manifest = Manifest("app", "1", agents={"executor": AgentEntry(internal=True), "writer": AgentEntry()})
    await announce([world.bus], manifest)
    await world.send("shop", "task.submit", submit("a", agent="executor"))
    await world.send("shop", "schedule.set", {"schedule_id": "s", "agent": "executor", "input": 1, "cron": "@daily"})
    await world.send("", "task.submit", submit("b", agent="executor"))
    await world.send("", "schedule.set", {"schedule_id": "s", "agent": "executor", "input": 1, "cron": "@daily"})
    await world.admitted("", "shop")
    errors = sorted(json.loads(letter["error"])["message"] for letter in await world.letters())
    said = "data.agent: executor is internal: only other agents may call it"
    assert errors == [said] * 2 + ["data.agent: no agent is named executor"] * 2
    await world.broker.nothing(world.bus)


async def test_a_runner_is_reached_by_publishers_that_list_it(world: World) -> None:
    """It runs tasks that name any agent, even internal ones."""
    await world.broker.call("HSET", world.broker.keys.agents, "weft.task", "agent")
    await world.register("desk", "globex", agents=["weft.task"])
    for publisher in ("shop", "desk"):
        await world.send(publisher, "task.submit", submit("t", agent="weft.task"))
        await world.send(
            publisher, "schedule.set", {"schedule_id": "s", "agent": "weft.task", "input": 1, "cron": "@daily"}
        )
    await world.admitted("shop", "desk")
    assert [json.loads(letter["error"])["message"] for letter in await world.letters()] == [
        "data.agent: no agent is named weft.task"
    ] * 2
    assert await world.broker.status("globex.t") == "accepted"


async def test_a_publisher_publishes_on_topics_that_it_was_given(world: World) -> None:
    await world.register("desk", "globex", topics=["facts", "news.*"])
    for topic in ("facts", "news.today", "audit"):
        await Topics([world.bus]).subscribe(TopicSubscription(topic, "writer"))
    for publisher in ("shop", "desk"):
        for topic in ("facts", "news.today", "audit"):
            await world.send(publisher, "topic.publish", {"topic": topic, "source": "k", "data": 1})
    await world.admitted("shop", "desk")
    assert [letter["field"] for letter in await world.letters()] == ["data.topic"] * 4
    turn = await world.broker.take(world.bus)
    assert (turn.key, json.loads(turn.context)["tenant"]) == ("globex/k", "globex")
    assert await complete(world.bus, turn)
    assert json.loads((await world.broker.take(world.bus)).context)["topic"] == "news.today"


# -- streams of hostile publishers ---------------------------------------------------------------------------------


async def test_a_long_stream_delays_no_other(world: World) -> None:
    """The other publisher's single command is settled after a few of the long stream, not after all of them."""
    many = 2_000
    for _ in range(many):
        await world.send("shop", "task.cancel", {"task_id": "none"})
    await world.send("desk", "task.submit", submit("t"))
    async with admitting(world.broker, world.bus):
        await until(lambda: world.settled("desk"))
        left = cast(int, await world.broker.call("XLEN", world.key("shop")))
    assert left > 0, "the long stream was settled first"


async def test_a_waiting_command_delays_only_its_own_stream(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order holds there, and cancels overtake it as on the shared stream of trusted programs."""
    submits, room = world.bus.submit, asyncio.Event()

    async def full(new: Submission) -> Submitted:
        if new.task_id == "acme.waits" and not room.is_set():
            raise ServerError("OOM command not allowed")
        return await submits(new)

    monkeypatch.setattr(world.bus, "submit", full)
    await world.send("shop", "task.submit", submit("runs"))
    await world.send("shop", "task.submit", submit("waits"))
    await world.send("shop", "task.submit", submit("behind"))
    await world.send("shop", "task.cancel", {"task_id": "runs"})
    await world.send("desk", "task.submit", submit("t"))
    await world.send("", "task.submit", submit("trusted"))

    async def two_wait() -> bool:
        return await world.broker.call("XLEN", world.key("shop")) == 2

    async with admitting(world.broker, world.bus):
        await until(lambda: world.settled("desk", ""))
        await until(two_wait)
        assert await world.broker.status("globex.t") == "accepted"
        assert await world.broker.status("acme.runs") == "cancelled"
        assert await world.broker.status("acme.behind") == ""
        room.set()
        await until(lambda: world.settled("shop"))
    taken = [(await world.broker.take(world.bus)).task for _ in range(5)]
    assert [task for task in taken if task.startswith("acme.")] == ["acme.runs", "acme.waits", "acme.behind"]


@pytest.mark.parametrize("harm", ["deleted", "trimmed", "type", "group"])
async def test_damage_to_one_stream_stops_no_other(world: World, harm: str) -> None:
    key = world.key("shop")
    await world.send("shop", "task.submit", submit("before"))
    async with admitting(world.broker, world.bus):
        await until(lambda: world.settled("shop"))
        match harm:
            case "deleted":
                await world.broker.call("DEL", key)
            case "trimmed":
                for _ in range(3):
                    await world.broker.call("XADD", key, "MAXLEN", 1, "*", "type", "nonsense", "data", "{}")
            case "type":
                await world.broker.call("DEL", key)
                await world.broker.call("SET", key, "a string")
            case "group":
                await world.broker.call("XGROUP", "CREATE", key, "state-manager", "$", "MKSTREAM")
        await world.send("desk", "task.submit", submit("t"))
        await until(lambda: world.settled("desk"))
        if harm == "type":
            await world.broker.call("DEL", key)
        await world.send("shop", "task.submit", submit("after"))
        await until(lambda: world.settled("shop"))
    assert await world.broker.status("globex.t") == "accepted"
    assert await world.broker.status("acme.after") == "accepted"


async def test_a_stream_ended_by_its_last_id_is_recreated(world: World) -> None:
    async with admitting(world.broker, world.bus):
        await world.send("shop", "task.submit", submit("future"), entry=LAST_ID)

        async def takes_entries() -> bool:
            try:
                await world.send("shop", "task.submit", submit("t"))
            except ServerError:
                return False
            return True

        await until(takes_entries)
        await until(lambda: world.settled("shop"))
    assert await world.broker.status("acme.t") == "accepted"
    (letter,) = await world.letters()
    assert (letter["field"], letter["entry"]) == ("entry", LAST_ID)
    assert "is in the future" in letter["error"]


async def test_a_stream_that_was_ended_is_kept_until_all_its_entries_are_handled(world: World) -> None:
    stream = IngressStream(world.broker.admin, world.broker.keys.namespace, "shop")
    for entry in ("*", LAST_ID):
        await world.send("shop", "task.submit", submit("t"), entry=entry)
    first, last = await stream.read(b"", 10, 10_000)
    await stream.remove(first.id)
    assert await stream.read(last.id, 10, 10_000) == []
    assert [entry.id for entry in await stream.read(b"", 10, 10_000)] == [LAST_ID.encode()]
    await stream.remove(last.id)
    assert await stream.read(last.id, 10, 10_000) == []
    assert await world.broker.call("EXISTS", stream.key) == 1, "only a reader that starts over finds it empty"
    assert await stream.read(b"", 10, 10_000) == []
    assert await world.broker.call("EXISTS", stream.key) == 0


async def test_a_schedule_does_not_take_its_time_from_an_id_in_the_future(world: World) -> None:
    data = {"schedule_id": "s", "agent": "writer", "input": 1, "every_seconds": 60}
    await world.send("shop", "schedule.set", data, entry="18446744073709551615-0")
    await world.admitted("shop")
    assert await Schedules(world.bus, Admission([world.bus])).all() == []


async def test_large_entries_are_never_read_whole(world: World) -> None:
    """Neither many commands at once, nor one that is larger than any command may be."""
    large = "x" * (MAX_ENTRY_BYTES + 1)
    await world.send("shop", "task.submit", submit("large"), replyto="shop:answers", extension=large)
    taken: list[int] = []

    class Counted(IngressStream):
        async def read(self, after: bytes, count: int, size: int) -> list[IngressEntry]:
            entries = await super().read(after, count, size)
            taken.append(sum(len(field) for entry in entries for field in entry.fields))
            return entries

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publisher_streams, "IngressStream", Counted)
        patched.setattr(publisher_streams, "STREAM_BYTES_MAX", 1_500_000)
        for number in range(5):
            await world.send("shop", "task.submit", submit(f"t{number}", metadata={"x": "x" * 1_000_000}))
        await world.admitted("shop")
    try:
        assert max(taken) < 2_100_000
        (letter,) = await world.letters()
        assert (letter["field"], len(letter["event:extension"])) == ("entry", 4096)
        (answer,) = await world.answers("shop:answers")
        assert json.loads(answer["data"])["field"] == "entry"
        assert await world.broker.status("acme.t4") == "accepted"
    finally:
        await world.drop("shop:answers")


async def test_the_streams_of_registered_publishers_are_followed(world: World) -> None:
    """Streams of others are not read; one that is registered again is bound again."""
    await world.send("web", "task.submit", submit("t"))
    async with admitting(world.broker, world.bus):
        await world.send("desk", "task.submit", submit("t"))
        await until(lambda: world.settled("desk"))
        assert not await world.settled("web")
        await world.register("web", "initech")
        await until(lambda: world.settled("web"))
        await world.register("web", "acme")
        await asyncio.sleep(0)

        async def bound_again() -> bool:
            task = f"t{time.monotonic_ns()}"
            await world.send("web", "task.submit", submit(task))
            await until(lambda: world.settled("web"))
            return await world.broker.status(f"acme.{task}") == "accepted"

        await until(bound_again)
        await Publishers(world.bus).delete("web")

        async def left_alone() -> bool:
            await world.send("web", "task.submit", submit("late"))
            await world.send("desk", "task.submit", submit(f"d{time.monotonic_ns()}"))
            await until(lambda: world.settled("desk"))
            return not await world.settled("web")

        await until(left_alone)
    assert await world.broker.status("initech.t") == "accepted"


# -- dead letters --------------------------------------------------------------------------------------------------


async def test_a_redriven_letter_returns_to_its_publishers_stream(world: World) -> None:
    """On the shared stream of trusted programs it would be bound to nobody."""
    await world.send("shop", "task.submit", submit("t", agent="nobody"))
    await world.admitted("shop")
    letters = DeadLetters([world.bus])
    (letter,) = [letter async for letter in letters.all()]
    await letters.redrive(letter.letter_id, data=json.dumps(submit("t")).encode())
    await world.admitted("shop")
    assert await world.broker.status("acme.t") == "accepted"
    assert await world.settled("")


async def test_a_letter_of_a_deleted_publisher_is_not_redriven(world: World) -> None:
    await world.send("shop", "task.submit", submit("t", agent="nobody"))
    await world.admitted("shop")
    await Publishers(world.bus).delete("shop")
    letters = DeadLetters([world.bus])
    (letter,) = [letter async for letter in letters.all()]
    with pytest.raises(InvalidInput, match="weft publisher set shop"):
        await letters.redrive(letter.letter_id)
