"""The state-manager's admitter and relay: a command or answer that cannot proceed blocks no other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, ingress
from runtime_core.bus.partition import make_group
from runtime_core.bus.tasks import Submitted
from runtime_core.consumer.progress import ProgressWatch
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, ServerError
from runtime_core.host.state_manager import build
from runtime_core.settings import Settings
from runtime_core.state_manager import admitter, relay
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.admitter import Admitter
from runtime_core.state_manager.relay import Relay
from runtime_core.state_manager.schedules import ScheduleBounds, Schedules, parse_set
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire import events as facts
from runtime_core.wire.commands import Submission
from tests.conftest import OwnServer
from tests.contracts.broker import Broker, PassingTransport, complete, question, suspend
from tests.contracts.conftest import close_broker, open_broker, server_clients
from tests.servers.matrix import MATRIX, VALKEY_9, repeat_on
from tests.servers.process import Server

SECONDS = 60.0


class Edge(PassingTransport):
    """A connection on which chosen streams refuse appends."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.refuses: dict[str, str] = {}
        """What the server says, by stream."""
        self.tried: list[str] = []

    async def call(self, *args: Argument) -> Reply:
        if args[0] == "XADD":
            self.tried.append(str(args[1]))
            if (said := self.refuses.get(str(args[1]))) is not None:
                if not said:
                    await asyncio.Event().wait()
                raise ServerError(said)
        return await super().call(*args)


async def until(true: Callable[[], Awaitable[object]]) -> None:
    deadline = time.monotonic() + SECONDS
    while not await true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Work that must not end by itself: the leader would start it again and find the same entry."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


BOUNDS = ScheduleBounds(100)


def make_admitter(
    bus: EventBus, transport: Transport, blob_url: str | None = None, schedule_bounds: ScheduleBounds = BOUNDS
) -> Admitter:
    metrics, watch = Metrics(CollectorRegistry(), "test"), ProgressWatch(limit_seconds=60.0)
    return Admitter(
        transport, Admission([bus]), [bus], metrics, watch, blob_url=blob_url, schedule_bounds=schedule_bounds
    )


@asynccontextmanager
async def admitting(
    broker: Broker,
    bus: EventBus,
    edge: Edge | None = None,
    *,
    blob_url: str | None = None,
    schedule_bounds: ScheduleBounds = BOUNDS,
) -> AsyncIterator[None]:
    epoch = await bus.lead("admit")
    admitter = make_admitter(bus, edge or await connected(broker), blob_url, schedule_bounds)
    async with running(admitter.run(str(epoch))):
        yield


@asynccontextmanager
async def relaying(bus: EventBus, edge: Edge) -> AsyncIterator[None]:
    async with running(Relay(bus, [bus], edge, Metrics(CollectorRegistry(), "test")).run()):
        yield


async def connected(broker: Broker) -> Transport:
    """One more connection, which is closed with the broker."""
    broker.transports.append(transport := await broker.connect())
    return transport


async def command(broker: Broker, kind: str, **fields: object) -> bytes:
    """Append a command as a client in any language does. `data` is an object."""
    data = json.dumps(fields.pop("data"))
    flat = [str(part) for pair in fields.items() for part in pair]
    entry = await broker.call("XADD", ingress(broker.keys.namespace), "*", "type", f"weft.{kind}", "data", data, *flat)
    return cast(bytes, entry)


async def left(broker: Broker) -> int:
    """Return the entries of the ingress that are not settled."""
    return cast(int, await broker.call("XLEN", ingress(broker.keys.namespace)))


async def settled(broker: Broker) -> bool:
    return await left(broker) == 0


async def waits_for_answer(broker: Broker, bus: EventBus, task: str) -> None:
    await broker.submit(bus, task)
    assert await suspend(bus, await broker.take(bus), question("1"))


# -- answers that are delivered again ------------------------------------------------------------------------------


async def test_an_answer_delivered_again_after_a_crash_counts_once(broker: Broker, bus: EventBus) -> None:
    """Its admitter died after it had passed the answer to the relay, and before it acknowledged the entry."""
    await waits_for_answer(broker, bus, "t")
    data = {"task_id": "t", "request_id": "r:1", "value": True}
    entry = (await command(broker, "task.signal", data=data)).decode()
    assert await bus.signal("t", "r:1", b"true", f"anonymous\n{entry}") == ["ok"]
    assert await complete(bus, await broker.take(bus))
    async with admitting(broker, bus):
        await until(lambda: settled(broker))
    assert await broker.entries("dead") == []


async def test_a_second_answer_is_refused(broker: Broker, bus: EventBus) -> None:
    await waits_for_answer(broker, bus, "t")
    async with admitting(broker, bus):
        for name in ("e1", "e2"):
            data = {"task_id": "t", "request_id": "r:1", "value": True}
            await command(broker, "task.signal", id=name, source="shop", data=data)
        await until(lambda: settled(broker))
    (letter,) = await broker.entries("dead")
    assert (letter["reason"], letter["event:id"]) == ("rejected", "e2")
    assert "already answered" in letter["error"]


async def test_an_oversized_command_leaves_a_small_letter(broker: Broker, bus: EventBus) -> None:
    inbox = f"{broker.keys.namespace}-answers"
    data = {"agent": "writer", "input": "x" * (8 * 1024 * 1024)}
    async with admitting(broker, bus):
        for number in range(3):
            await command(broker, "task.submit", id=f"e{number}", replyto=inbox, data=data)
        await command(broker, "task.submit", id="small", data={"agent": "writer", "input": 1})
        await until(lambda: settled(broker))
    letters = await broker.entries("dead")
    assert [letter["event:id"] for letter in letters] == ["e0", "e1", "e2"]
    for letter in letters:
        assert json.loads(letter["cut"])["fields"]["event:data"]["bytes"] > 8 * 1024 * 1024
        assert sum(map(len, letter.values())) < 10_000
    assert await broker.call("XLEN", inbox) == 3, "each is answered"
    assert (await broker.take(bus)).task == "small"


# -- commands that wait --------------------------------------------------------------------------------------------


async def test_a_waiting_submit_delays_no_cancel(broker: Broker, bus: EventBus) -> None:
    """Until a handler has published its agents, submits wait in their order."""
    await broker.submit(bus, "runs")
    await waits_for_answer_of_second(broker, bus)
    agents = await broker.hash("agents")
    await broker.call("DEL", broker.keys.agents)
    for task in ("first", "second"):
        await command(broker, "task.submit", id=task, data={"agent": "writer", "input": task, "key": "k"})
    await command(broker, "task.cancel", data={"task_id": "runs"})
    await command(broker, "task.signal", data={"task_id": "asks", "request_id": "r:1", "value": 1})
    await command(broker, "task.cancel", data={"task_id": "second"})
    await command(broker, "task.submit", data="no object")
    async with admitting(broker, bus):
        await until(lambda: reached(broker, "runs", "cancelled"))
        assert await complete(bus, await broker.take(bus))
        await until(lambda: reached(broker, "asks", "completed"))
        await until(lambda: any_letter(broker))
        await until(lambda: both_submits_are_left(broker))
        assert (await broker.status("first"), await broker.status("second")) == ("", "")
        await broker.call("HSET", broker.keys.agents, *[part for pair in agents.items() for part in pair])
        await until(lambda: settled(broker))
    assert await broker.status("second") == "cancelled", "it was started, and cancelled then"
    assert (await broker.take(bus)).task == "first"


async def both_submits_are_left(broker: Broker) -> bool:
    """One of them is cancelled."""
    return await left(broker) == 3


async def waits_for_answer_of_second(broker: Broker, bus: EventBus) -> None:
    """`runs` is in a turn and continues; `asks` waits for an answer."""
    await broker.take(bus)
    await waits_for_answer(broker, bus, "asks")


async def reached(broker: Broker, task: str, status: str) -> bool:
    return await broker.status(task) == status


async def any_letter(broker: Broker) -> bool:
    return bool(await broker.entries("dead"))


async def test_submits_keep_their_order_behind_one_that_waits(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second could start at once, and would get the instance before the first."""
    monkeypatch.setattr(admitter, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(admitter, "TRIES_MAX", 2)  # a full broker is waited for however long it takes
    for task in ("first", "second"):
        await command(broker, "task.submit", id=task, data={"agent": "writer", "input": task, "key": "k"})
    tried, submit = [], bus.submit

    async def full_at_first(new: Submission) -> Submitted:
        tried.append(new.task_id)
        if len(tried) < 4:
            raise ServerError("OOM command not allowed")
        return await submit(new)

    monkeypatch.setattr(bus, "submit", full_at_first)
    async with admitting(broker, bus):
        await until(lambda: settled(broker))
    assert tried == ["first"] * 4 + ["second"]
    assert await broker.mailbox("writer/k") == ["second|r"]


class Breaks(Edge):
    """A connection whose next read fails with `error`."""

    error: Exception | None = None

    async def blocking(self, *args: Argument) -> Reply:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return await super().blocking(*args)

    async def broken(self) -> bool:
        return self.error is None


@pytest.mark.parametrize("error", [BusUnavailable("the connection broke"), ServerError("OOM command not allowed")])
async def test_commands_that_wait_outlive_a_read_that_fails(broker: Broker, bus: EventBus, error: Exception) -> None:
    agents = await broker.hash("agents")
    await broker.call("DEL", broker.keys.agents)
    await command(broker, "task.submit", id="t", data={"agent": "writer", "input": 1})
    edge = Breaks(await connected(broker))
    async with admitting(broker, bus, edge):
        await until(lambda: read(broker, 1))
        edge.error = error
        await until(edge.broken)
        await broker.call("HSET", broker.keys.agents, *[part for pair in agents.items() for part in pair])
        await until(lambda: settled(broker))
    assert await broker.status("t") == "accepted"


class Gated(Edge):
    """A connection whose reads wait for `may_read`."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.reads, self.may_read = asyncio.Event(), asyncio.Event()

    async def blocking(self, *args: Argument) -> Reply:
        self.reads.set()
        await self.may_read.wait()
        return await super().blocking(*args)


async def test_commands_that_a_former_leader_reads_are_admitted_in_their_order(broker: Broker, bus: EventBus) -> None:
    """It has not learned yet that it leads no longer, and the leader has already admitted all that it had read."""
    edge, shared = Gated(await connected(broker)), ingress(broker.keys.namespace)
    async with admitting(broker, bus, edge):
        await edge.reads.wait()
        for task in ("first", "second"):
            await command(broker, "task.submit", id=task, data={"agent": "writer", "input": task, "key": "k"})
        assert await broker.call("XREADGROUP", "GROUP", STATE_MANAGER, "admitter-1", "COUNT", 1, "STREAMS", shared, ">")
        edge.may_read.set()
        await until(lambda: settled(broker))
    assert (await broker.take(bus)).task == "first"
    assert await broker.mailbox("writer/k") == ["second|r"]


async def test_a_rejected_command_leaves_one_letter(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, even the relay could not take its answer."""
    monkeypatch.setattr(admitter, "RETRY_SECONDS", 0.01)
    away, tried = f"{broker.keys.namespace}-away", []

    async def full_at_first(_: object, reply_to: str, __: object) -> None:
        tried.append(reply_to)
        if len(tried) < 4:
            raise ServerError("OOM command not allowed")

    monkeypatch.setattr(relay.Answers, "send", full_at_first)
    await command(broker, "task.submit", id="t", replyto=away, data={"agent": "nobody", "input": 1})
    async with admitting(broker, bus):
        await until(lambda: settled(broker))
    assert tried == [away] * 4
    assert len(await broker.entries("dead")) == 1


async def test_commands_that_wait_are_bounded(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admitter, "WAITING_MAX", 3)
    monkeypatch.setattr(admitter, "READ_BATCH_MAX", 1)
    await broker.submit(bus, "runs")
    agents = await broker.hash("agents")
    await broker.call("DEL", broker.keys.agents)
    for number in range(5):
        await command(broker, "task.submit", id=f"t{number}", data={"agent": "writer", "input": number})
    await command(broker, "task.cancel", data={"task_id": "runs"})
    async with admitting(broker, bus):
        await until(lambda: read(broker, 3))
        assert await broker.status("runs") == "accepted"
        await broker.call("HSET", broker.keys.agents, *[part for pair in agents.items() for part in pair])
        await until(lambda: settled(broker))
        assert await broker.status("runs") == "cancelled"


async def read(broker: Broker, count: int) -> bool:
    try:
        pending = cast(list[Reply], await broker.call("XPENDING", ingress(broker.keys.namespace), STATE_MANAGER))
    except ServerError:
        return False
    return pending[0] == count


async def test_a_command_that_always_fails_is_abandoned(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another key has the name of its task: the commands after it continue."""
    monkeypatch.setattr(admitter, "RETRY_SECONDS", 0.01)
    await broker.call("SET", broker.keys.task("t"), "a string")
    await command(broker, "task.submit", id="t", data={"agent": "writer", "input": 1})
    await command(broker, "task.submit", id="u", data={"agent": "writer", "input": 1})
    async with admitting(broker, bus):
        await until(lambda: settled(broker))
    (letter,) = await broker.entries("dead")
    assert (letter["reason"], letter["event:id"]) == ("defect", "t")
    assert "WRONGTYPE" in letter["error"]
    assert await broker.status("u") == "accepted"


@pytest.mark.parametrize("kind", repeat_on(*MATRIX))
async def test_a_full_broker_delays_no_cancel_and_no_answer(
    own_server: OwnServer, namespace: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end tasks, and so make room for the submit before them."""
    server = own_server(kind, append=None)
    broker = await open_broker(kind, namespace, server_clients(server.url))
    try:
        bus = await broker.owner()
        await broker.submit(bus, "runs")
        await waits_for_answer_of_second(broker, bus)
        await command(broker, "task.submit", id="new", replyto="answers", data={"agent": "writer", "input": 1})
        await command(broker, "task.submit", id="wrong", replyto="answers", data={"agent": "nobody", "input": 1})
        await command(broker, "task.cancel", data={"task_id": "new"})
        await command(broker, "task.cancel", data={"task_id": "runs"})
        await command(broker, "task.signal", data={"task_id": "asks", "request_id": "r:1", "value": 1})
        await make_group(broker.admin, ingress(namespace), STATE_MANAGER)
        monkeypatch.setattr(admitter, "RETRY_SECONDS", 0.01)
        await broker.call("CONFIG", "RESETSTAT")
        await broker.call("CONFIG", "SET", "maxmemory", "1mb")
        async with admitting(broker, bus):
            await until(lambda: refused_more_than(broker, admitter.TRIES_MAX))
            await until(lambda: reached(broker, "runs", "cancelled"))
            assert await complete(bus, await broker.take(bus))
            await until(lambda: reached(broker, "asks", "completed"))
            assert await left(broker) == 3, "the submits, and the cancel of one of them"
            await broker.call("CONFIG", "SET", "maxmemory", "0")
            await until(lambda: settled(broker))
        assert await broker.status("new") == "cancelled"
        types = [entry[b"type"] for entry in await stream(broker, "answers")]
        assert types == [b"weft.task.accepted", b"weft.task.rejected"]
    finally:
        await close_broker(broker)


async def test_a_full_broker_does_not_restart_the_leader(
    own_valkey: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its periodic work and its schedules wait; whatever makes room continues."""
    broker = await open_broker(VALKEY_9, namespace, server_clients(own_valkey.url))
    manager = await build(
        Settings.from_environment({"WEFT_REDIS_URL": own_valkey.url, "WEFT_NAMESPACE": namespace}),
        Metrics(CollectorRegistry(), "test"),
    )
    try:
        schedules = Schedules(bus := await broker.owner(), Admission([bus]))
        in_a_moment = {"schedule_id": "soon", "agent": "writer", "input": 1, "every_seconds": 1}
        await schedules.set(parse_set(in_a_moment, await bus.time_ms()))
        await manager.start()
        await broker.call("CONFIG", "RESETSTAT")
        await broker.call("CONFIG", "SET", "maxmemory", "1mb")
        await until(lambda: refused_often(broker))
        await until(lambda: told(caplog, "schedules wait for the broker: OOM"))
        assert "restarting" not in caplog.text
        await broker.call("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: submitted(broker))
    finally:
        await manager.stop()
        await close_broker(broker)


async def refused_often(broker: Broker) -> bool:
    """This covers the state-manager's own HSET and the submits of its schedules."""
    said = cast(bytes, await broker.call("INFO", "commandstats")).decode()
    refused = {
        line.partition(":")[0]: int(line.rpartition("rejected_calls=")[2].partition(",")[0])
        for line in said.splitlines()
        if "rejected_calls=" in line
    }
    return refused.get("cmdstat_hset", 0) >= 3


async def refused_more_than(broker: Broker, count: int) -> bool:
    """Submits that lack memory are retried more often than a command that fails for its own reasons."""
    said = cast(bytes, await broker.call("INFO", "commandstats")).decode()
    return any(
        int(part) > count
        for line in said.splitlines()
        if line.startswith("cmdstat_fcall:")
        for name, _, part in (field.partition("=") for field in line.split(","))
        if name in ("rejected_calls", "failed_calls")
    )


async def told(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


async def submitted(broker: Broker) -> bool:
    return bool(await broker.entries("agent"))


# -- answers that cannot be written --------------------------------------------------------------------------------


async def stream(broker: Broker, key: str) -> list[dict[bytes, bytes]]:
    found = cast(list[list[list[bytes]]], await broker.call("XRANGE", key, "-", "+"))
    return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in found]


async def ended(broker: Broker, bus: EventBus, *tasks: tuple[str, str]) -> None:
    for task, reply in tasks:
        await broker.submit(bus, task, replyto=reply)
        assert await complete(bus, await broker.take(bus))


async def answered(broker: Broker, key: str, *tasks: str) -> bool:
    return [entry[b"taskid"].decode() for entry in await stream(broker, key)] == list(tasks)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RESCAN_SECONDS", 0.02)
    monkeypatch.setattr(relay, "BACKOFF_MIN_SECONDS", 0.01)
    monkeypatch.setattr(relay, "BACKOFF_MAX_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said", ["OOM command not allowed", "CLUSTERDOWN Hash slot not served", ""])
async def test_a_waiting_answer_delays_only_its_own_stream(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """This holds whatever the server answers, and also if it does not answer."""
    monkeypatch.setattr(relay, "WRITE_SECONDS", 0.05)
    away, here = f"{broker.keys.namespace}-away", f"{broker.keys.namespace}-here"
    edge = Edge(bus.transport)
    edge.refuses[away] = said
    async with relaying(bus, edge):
        await ended(broker, bus, ("a", away), ("b", here), ("c", away), ("d", here))
        await until(lambda: answered(broker, here, "b", "d"))
        await until(lambda: more_than(edge.tried, away, 2))
        assert len(await broker.entries("replies")) == 2
        edge.refuses.clear()
        await until(lambda: answered(broker, away, "a", "c"))
    assert await broker.entries("dead") == []
    await broker.call("DEL", away, here)


async def more_than(tried: list[str], stream: str, count: int) -> bool:
    return tried.count(stream) > count


async def test_a_stream_that_refuses_writes_is_retried_with_backoff(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is checked repeatedly, but not retried."""
    monkeypatch.setattr(relay, "RESCAN_SECONDS", 0.02)
    monkeypatch.setattr(relay, "BACKOFF_MIN_SECONDS", 3600.0)
    monkeypatch.setattr(relay, "BACKOFF_MAX_SECONDS", 3600.0)
    looks, again = [], relay._StreamPass.restart

    def counted(looking: relay._StreamPass) -> None:
        looks.append("from the start")
        again(looking)

    async def looked(times: int) -> bool:
        return len(looks) >= times

    monkeypatch.setattr(relay._StreamPass, "restart", counted)
    away = f"{broker.keys.namespace}-away"
    edge = Edge(bus.transport)
    edge.refuses[away] = "OOM command not allowed"
    async with relaying(bus, edge):
        await ended(broker, bus, ("a", away))
        await until(lambda: looked(4))
    assert edge.tried.count(away) == 1


async def test_answers_that_wait_are_bounded(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RESCAN_SECONDS", 3600.0)
    monkeypatch.setattr(relay, "WAITING_MAX", 2)
    monkeypatch.setattr(relay, "RELAY_BATCH", 1)
    away = f"{broker.keys.namespace}-away"
    edge = Edge(bus.transport)
    edge.refuses[away] = "OOM command not allowed"
    await ended(broker, bus, *[(f"t{number}", away) for number in range(4)])
    one, looking = Relay(bus, [bus], edge, Metrics(CollectorRegistry(), "test")), relay._StreamPass()
    assert [await one._relay_next(bus.keys.replies, one._reply, looking) for _ in range(4)] == [1, 1, 0, 0]


@pytest.mark.usefixtures("quick")
async def test_a_step_in_another_partition_is_answered_however_long_the_broker_is_full(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task waits for the answer, so the answer is never given up."""
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.0)
    tried = []

    async def full_at_first(task: str, *_: object) -> bool:
        tried.append(task)
        if len(tried) < 4:
            raise ServerError("OOM command not allowed")
        return True

    monkeypatch.setattr(bus, "answer_request", full_at_first)
    final = '{"status":"completed","output":1}'
    await broker.call("XADD", broker.keys.replies, "*", "to", "@0|t|r|1|writer", "type", "x", "t", "there", "d", final)
    async with relaying(bus, Edge(bus.transport)):
        await until(lambda: empty(broker))
    assert tried == ["t"] * 4
    assert await broker.entries("dead") == []


@pytest.mark.usefixtures("quick")
async def test_an_answer_that_cannot_be_written_becomes_a_dead_letter(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.2)
    away = f"{broker.keys.namespace}-away"
    edge = Edge(bus.transport)
    edge.refuses[away] = "CLUSTERDOWN Hash slot not served"
    async with relaying(bus, edge):
        await ended(broker, bus, ("a", away), ("b", away))
        await until(lambda: empty(broker))
    assert edge.tried.count(away) > 2
    letters = await broker.entries("dead")
    assert [(letter["reason"], letter["stream"], letter["taskid"]) for letter in letters] == [
        ("undeliverable", away, "a"), ("undeliverable", away, "b"),
    ]  # fmt: skip
    assert "CLUSTERDOWN" in letters[0]["error"]
    assert json.loads(letters[0]["d"])["status"] == "completed"


async def empty(broker: Broker) -> bool:
    return not await broker.entries("replies")


@pytest.mark.usefixtures("quick")
async def test_an_unreadable_entry_stops_no_answer(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user once used `@…` as an address."""
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.1)
    here = f"{broker.keys.namespace}-here"
    await broker.call("XADD", broker.keys.replies, "*", "to", "@me", "type", "weft.task.completed", "t", "x", "d", "{}")
    await broker.call("XADD", broker.keys.replies, "*", "foreign", "1")
    await ended(broker, bus, ("t", here))
    async with relaying(bus, Edge(bus.transport)):
        await until(lambda: answered(broker, here, "t"))
        await until(lambda: empty(broker))
    assert [letter["reason"] for letter in await broker.entries("dead")] == ["undeliverable"] * 2
    await broker.call("DEL", here)


@pytest.mark.usefixtures("quick")
async def test_the_admitter_leaves_an_answer_to_the_relay(broker: Broker, bus: EventBus) -> None:
    away = f"{broker.keys.namespace}-away"
    edge = Edge(await connected(broker))
    edge.refuses[away] = "OOM command not allowed"
    async with admitting(broker, bus, edge):
        await command(broker, "task.submit", id="t", replyto=away, data={"agent": "writer", "input": 1})
        entry = await command(broker, "task.submit", id="u", replyto=away, data={"agent": "nobody", "input": 1})
        await until(lambda: settled(broker))
    async with relaying(bus, Edge(bus.transport)):
        await until(lambda: empty(broker))
    accepted, rejected = await stream(broker, away)
    fact = facts.accepted("t", at_ms=0)
    assert (accepted[b"type"].decode(), accepted[b"id"].decode()) == (fact.type, fact.id)
    assert rejected[b"type"] == b"weft.task.rejected"
    data = json.loads(rejected[b"data"])
    error = InvalidInput(data["field"], data["message"])
    fact = facts.rejected(entry.decode(), error, at_ms=0, cause=entry.decode())
    assert (data["field"], rejected[b"id"].decode()) == ("data.agent", fact.id)
    await broker.call("DEL", away)


async def test_an_address_of_the_runtime_is_refused(broker: Broker, bus: EventBus) -> None:
    """Otherwise its sender could answer a step of another tenant's task."""
    await command(broker, "task.submit", id="t", replyto="@0|u|r|1|x", data={"agent": "writer", "input": 1})
    async with admitting(broker, bus):
        await until(lambda: settled(broker))
    (letter,) = await broker.entries("dead")
    assert (letter["reason"], letter["field"]) == ("rejected", "replyto")


@pytest.mark.usefixtures("quick")
async def test_a_full_broker_does_not_end_the_relay(
    own_valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that it refuses for too long become dead letters, which are bounded and need no free memory."""
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.05)
    broker = await open_broker(VALKEY_9, namespace, server_clients(own_valkey.url))
    try:
        bus = await broker.owner()
        await ended(broker, bus, ("t", "answers"))
        await broker.call("SET", "wrong", "a string")
        await ended(broker, bus, ("u", "wrong"))
        await broker.call("CONFIG", "SET", "maxmemory", "1mb")
        async with relaying(bus, Edge(await connected(broker))):
            await until(lambda: empty(broker))
        letters = await broker.entries("dead")
        assert sorted((letter["reason"], letter["taskid"]) for letter in letters) == [
            ("undeliverable", "t"),
            ("undeliverable", "u"),
        ]
    finally:
        await close_broker(broker)


@pytest.mark.usefixtures("quick")
async def test_an_answer_stays_while_no_dead_letter_can_be_written(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.0)
    caplog.set_level("INFO")
    wrong = broker.keys.base + "wrong"
    await broker.call("SET", wrong, "a string")
    await broker.call("SET", broker.keys.dead, "of the wrong type")
    await ended(broker, bus, ("t", wrong))

    async def tried_twice() -> bool:
        return sum("cannot write a dead letter" in record.getMessage() for record in caplog.records) > 1

    async with relaying(bus, Edge(await connected(broker))):
        await until(tried_twice)
        assert not await empty(broker)
        await broker.call("DEL", broker.keys.dead)
        await until(lambda: empty(broker))
    assert [letter["reason"] for letter in await broker.entries("dead")] == ["undeliverable"]


async def test_a_stream_without_rights_costs_its_answer_only(own_valkey: Server, namespace: str) -> None:
    broker = await open_broker(VALKEY_9, namespace, server_clients(own_valkey.url))
    try:
        bus = await broker.owner()
        await broker.call("ACL", "SETUSER", "edge", "on", ">secret", "~open", "+@all")
        transport = await connected(broker)
        await transport.call("AUTH", "edge", "secret")
        await ended(broker, bus, ("t", "closed"), ("u", "open"))
        async with relaying(bus, Edge(transport)):
            await until(lambda: empty(broker))
        assert await answered(broker, "open", "u")
        (letter,) = await broker.entries("dead")
        assert (letter["reason"], letter["stream"]) == ("undeliverable", "closed")
        assert "NOPERM" in letter["error"]
    finally:
        await close_broker(broker)


@pytest.mark.usefixtures("quick")
async def test_an_unserved_slot_costs_only_its_own_answer(
    own_server: OwnServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Cluster answers CLUSTERDOWN, and the connection would send the call again forever."""
    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 2.0)  # a busy machine needs longer for the other answer, too
    monkeypatch.setattr(relay, "WRITE_SECONDS", 0.3)
    server = own_server(options=("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"))
    (admin,) = [await server_clients(server.url)()]
    away = cast(int, await admin.call("CLUSTER", "KEYSLOT", "away"))
    await admin.call("CLUSTER", "ADDSLOTSRANGE", 0, away - 1, away + 1, 16383)
    await until(lambda: cluster_is_up(admin))
    await admin.close()
    broker = await open_broker(VALKEY_9, namespace, server_clients(server.url))
    try:
        bus = await broker.owner()
        await ended(broker, bus, ("t", "away"), ("u", "here"))
        async with relaying(bus, Edge(await connected(broker))):
            await until(lambda: empty(broker))
        # At least once: a pipeline that breaks at the slot is sent again.
        assert len({(entry[b"taskid"], entry[b"id"]) for entry in await stream(broker, "here")}) == 1
        (letter,) = await broker.entries("dead")
        assert (letter["reason"], letter["stream"], letter["taskid"]) == ("undeliverable", "away", "t")
    finally:
        await close_broker(broker)


async def cluster_is_up(admin: Transport) -> bool:
    return b"cluster_state:ok" in cast(bytes, await admin.call("CLUSTER", "INFO"))


class Undeletable(Edge):
    """A connection on which the first deletion of a command fails, as on a full disk."""

    failed = False
    error: Exception = ServerError("MISCONF Errors writing to the AOF file: No space left on device")

    async def call(self, *args: Argument) -> Reply:
        if args[0] == "XDEL" and not self.failed:
            self.failed = True
            raise self.error
        return await super().call(*args)


async def test_a_command_whose_deletion_fails_does_not_stay_in_the_ingress(broker: Broker, bus: EventBus) -> None:
    """Acknowledged first, it would stay in the stream forever, with no owner."""
    key = ingress(broker.keys.namespace)
    await make_group(bus.transport, key, STATE_MANAGER)
    data = '{"agent":"writer","input":1}'
    await bus.transport.call("XADD", key, "*", "type", "weft.task.submit", "id", "t-1", "data", data)
    edge = Undeletable(await connected(broker))
    async with admitting(broker, bus, edge):
        await until(lambda: emptied(bus, key))
    assert edge.failed
    assert await broker.status("t-1") == "accepted"


async def test_a_command_whose_deletion_was_cut_off_is_removed_by_the_next_admitter(
    broker: Broker, bus: EventBus
) -> None:
    """The first admitter loses its connection, and perhaps its process, right before the deletion."""
    await command(broker, "task.submit", id="t", data={"agent": "writer", "input": 1})
    edge = Undeletable(await connected(broker))
    edge.error = BusUnavailable("the connection broke")
    epoch = await bus.lead("admit")
    with pytest.raises(BusUnavailable):
        async with asyncio.timeout(SECONDS):
            await make_admitter(bus, edge).run(str(epoch))
    async with admitting(broker, bus):
        await until(lambda: emptied(bus, ingress(broker.keys.namespace)))
    assert await broker.status("t") == "accepted"


async def test_an_admitter_that_has_lost_the_lead_starts_nothing(broker: Broker, bus: EventBus) -> None:
    epoch = await bus.lead("admit")
    assert epoch
    await command(broker, "task.submit", id="t", data={"agent": "writer", "input": 1})
    with pytest.raises(Fenced):
        async with asyncio.timeout(SECONDS):
            await make_admitter(bus, await connected(broker)).run(str(epoch - 1))
    assert await broker.status("t") == ""


@pytest.mark.parametrize("deletes", [True, False])
async def test_an_admitter_that_has_lost_the_lead_changes_no_schedule(
    broker: Broker, bus: EventBus, deletes: bool
) -> None:
    """Its successor has carried out this command, and perhaps later ones."""
    schedules = Schedules(bus, Admission([bus]))
    wanted = {"schedule_id": "s", "agent": "writer", "input": 1, "every_seconds": 60}
    if deletes:
        await schedules.set(parse_set(wanted, 0))
    epoch = await bus.lead("admit")
    data = {"schedule_id": "s"} if deletes else wanted
    await command(broker, f"schedule.{'delete' if deletes else 'set'}", data=data)
    with pytest.raises(Fenced):
        async with asyncio.timeout(SECONDS):
            await make_admitter(bus, await connected(broker)).run(str(epoch - 1))
    assert len(await schedules.all()) == deletes


async def emptied(bus: EventBus, key: str) -> bool:
    pending = cast(list[Reply], await bus.transport.call("XPENDING", key, STATE_MANAGER))
    return await bus.transport.call("XLEN", key) == 0 and pending[0] == 0


async def test_commands_behind_deleted_ones_are_admitted(broker: Broker, bus: EventBus) -> None:
    """An admitter died between the deletion of many commands and their acknowledgement."""
    key = ingress(broker.keys.namespace)
    await make_group(bus.transport, key, STATE_MANAGER)
    for number in range(admitter.READ_BATCH_MAX + 1):
        data = '{"agent":"writer","input":1}'
        await bus.transport.call("XADD", key, "*", "type", "weft.task.submit", "id", f"t-{number}", "data", data)
    dead = ("XREADGROUP", "GROUP", STATE_MANAGER, "dead", "COUNT", 1000, "STREAMS", key, ">")
    taken = cast(list[tuple[bytes, Reply]], await bus.transport.call(*dead))
    entries = [entry for entry, _ in pairs(taken[0][1])]
    await bus.transport.call("XDEL", key, *entries[:-1])
    async with admitting(broker, bus):
        await until(lambda: emptied(bus, key))
    assert await broker.status(f"t-{admitter.READ_BATCH_MAX}") == "accepted"
