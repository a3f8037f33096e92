"""The services, as processes, serve clients in any language."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from runtime_core.client.client import Client
from runtime_core.wire.events import StreamingMode
from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.servers.matrix import repeat_on
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

KINDS = repeat_on("redis-7.0", "valkey-9")
ANSWER_SECONDS = 50.0
"""Below the timeout of a connection, one minute."""


class Plain:
    """A client that only uses XADD and XREAD, as `redis-cli` does."""

    def __init__(self, redis: PlainRedis, namespace: str) -> None:
        self.redis = redis
        self.namespace = namespace
        self.answers = f"answers-of-{namespace}"
        self._cursor = "0"

    async def send(self, type: str, data: object, **attributes: str) -> None:
        """Append one event in binary mode; `data` is JSON or raw bytes."""
        body = data if isinstance(data, bytes) else json.dumps(data)
        fields: list[str | bytes] = ["type", type, "replyto", self.answers]
        for name, value in attributes.items():
            fields += [name, value]
        await self.redis.execute_command("XADD", f"{self.namespace}:tasks", "*", *fields, "data", body)

    async def next(self) -> tuple[str, dict[str, object]]:
        """Return the next answer: its type and data."""
        found = await self.redis.execute_command(
            "XREAD", "COUNT", 1, "BLOCK", int(ANSWER_SECONDS * 1000), "STREAMS", self.answers, self._cursor
        )
        assert found, f"no answer within {ANSWER_SECONDS:g} s"
        entries = found[self.answers.encode()][0] if isinstance(found, dict) else found[0][1]
        entry, fields = entries[0]
        self._cursor = entry.decode()
        named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
        return named[b"type"].decode(), json.loads(named[b"data"])

    async def answer(self, type: str, task: str = "") -> dict[str, object]:
        """Return the data of the next answer of this type for this task. Answers may repeat."""
        while True:
            found, data = await self.next()
            if found == type and task in ("", data.get("task_id")):
                return data


@asynccontextmanager
async def plain(server: Server, namespace: str) -> AsyncIterator[Plain]:
    async with plain_redis(server.port) as redis:
        yield Plain(redis, namespace)


async def have_ended(client: Plain, agent: str, count: int) -> bool:
    """Return whether exactly this many tasks of an agent have ended."""
    base = f"{client.namespace}:{{0}}:task:"
    found = 0
    async for key in client.redis.scan_iter(match=f"{base}*", count=1000):
        head, out = await client.redis.hmget(key, "h", "out")
        found += head is not None and out is not None and head.split(b"\n")[1].decode() == agent
    return found == count


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_needs_nothing_but_xadd_and_xread(
    kind: str, shared_server: Callable[[str], Server], namespace: str, tmp_path: Path
) -> None:
    server = shared_server(kind)
    async with Fleet(server.url, namespace, tmp_path), plain(server, namespace) as client:
        await client.send("weft.task.submit", {"agent": "echo", "input": "Redis Streams"}, id="t-1")
        assert await client.answer("weft.task.accepted", "t-1") == {"task_id": "t-1"}
        final = await client.answer("weft.task.completed", "t-1")
        assert (final["task_id"], final["status"], final["output"]) == ("t-1", "completed", "Redis Streams")
        assert final["steps"] == 1

        # The same id again: the first one's state, and no second task.
        await client.send("weft.task.submit", {"input": "Redis Streams", "agent": "echo"}, id="t-1")
        assert await client.answer("weft.task.completed", "t-1") == final

        # Structured mode: one field.
        event = {
            "specversion": "1.0", "id": "s-1", "type": "weft.task.submit", "source": "/shop",
            "replyto": client.answers, "data": {"agent": "echo", "input": {"x": 1}, "task_id": "from-shop"},
        }  # fmt: skip
        await client.redis.execute_command("XADD", f"{namespace}:tasks", "*", "data", json.dumps(event))
        assert (await client.answer("weft.task.completed", "from-shop"))["output"] == {"x": 1}

        # MessagePack.
        packed = msgspec.msgpack.encode({"agent": "echo", "input": [1, "ü", None]})
        await client.send("weft.task.submit", packed, id="m-1", datacontenttype="application/msgpack")
        assert (await client.answer("weft.task.completed", "m-1"))["output"] == [1, "ü", None]

        # A message to all who have subscribed, sent twice and heard once.
        for _ in range(2):
            message = {"topic": "ledger.add", "source": "k", "data": {"type": "str", "data": "?"}}
            await client.send("weft.topic.publish", message, id="p-1")
        await until(lambda: have_ended(client, "ledger", 1), 60, "the message is handled")

        # Cancel.
        await client.send("weft.task.submit", {"agent": "naps", "input": 600}, id="c-1")
        assert await client.answer("weft.task.accepted", "c-1") == {"task_id": "c-1"}
        await client.send("weft.task.cancel", {"task_id": "c-1", "reason": "enough"})
        ended = await client.answer("weft.task.cancelled")
        assert ended["task_id"] == "c-1"
        error = ended["error"]
        assert isinstance(error, dict)
        assert "enough" in error["message"]


async def test_steps_and_the_end_are_streamed_to_another_process(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    """Also if the reader starts late or continues in the middle."""
    async with Fleet(valkey.url, namespace, tmp_path):
        async with Client.connect(valkey.url, namespace=namespace) as client:
            task = await client.submit("naps", 0.01, stream=StreamingMode.ALL)
            events = [event async for event in task.stream()]
        assert [event.type for event in events[-2:]] == ["weft.step.recorded", "weft.task.completed"]
        async with Client.connect(valkey.url, namespace=namespace) as client:
            again = await client.task(task.task_id)
            assert [event async for event in again.stream()] == events
            assert [event async for event in again.stream(events[0].entry_id)] == events[1:]


async def test_a_question_is_answered_after_all_services_were_restarted(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with Fleet(valkey.url, namespace, tmp_path) as fleet, plain(valkey, namespace) as client:
        await client.send("weft.task.submit", {"agent": "asks", "input": "Publish?"}, id="q-1")
        out = f"{namespace}:{{0}}:out:q-1"
        question: dict[str, object] = {}

        async def asked() -> bool:
            for _, fields in await client.redis.xrange(out):
                if fields[b"type"] == b"weft.human.requested":
                    question.update(json.loads(fields[b"data"]))
            return bool(question)

        await until(asked, 60, "the question on the task's stream")
        assert (question["task_id"], question["prompt"], question["data"]) == ("q-1", "Publish?", {"n": 1})
        await fleet.restart()
        request = question["request_id"]
        await client.send("weft.task.signal", {"task_id": "q-1", "request_id": request, "value": "yes"})
        final = await client.answer("weft.task.completed")
        assert final["output"] == {"answer": "yes"}

        # A second answer comes too late, and is told so.
        await client.send("weft.task.signal", {"task_id": "q-1", "request_id": request, "value": "no"})
        rejected = await client.answer("weft.task.rejected")
        assert rejected["field"] == "data.task_id"


async def test_a_task_goes_through_all_services_and_its_trajectory_is_complete(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    from runtime_core.trajectory.store import TrajectoryStore

    async with (
        Fleet(valkey.url, namespace, tmp_path) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("journey", str(tmp_path / "effects"), task_id="j-1")
        response = await task.result(timeout=60)
        assert response.value() == ["part0", "part1", "part2", "sub"]
        store = await TrajectoryStore.open(fleet.trajectory_url)

        async def recorded() -> bool:
            found = await store.task(namespace, "j-1")
            return found is not None and found.complete

        try:
            await until(recorded, 60, "the whole trajectory in the store")
            found = await store.task(namespace, "j-1")
        finally:
            await store.close()
        assert found is not None
        assert len(found.steps) == response.steps
        assert sorted(step.kind for step in found.steps) == ["agent", "agent", "tool", "tool", "tool", "tool"]
