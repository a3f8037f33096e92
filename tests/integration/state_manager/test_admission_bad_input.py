"""Every invalid entry of the ingress stream is answered with its wrong field and kept, and blocks nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

SUBMIT = "weft.task.submit"


def body(**changes: object) -> bytes:
    """Return a submit's data with these members changed or added."""
    return json.dumps({"agent": "echo", "input": 1, **changes}).encode()


BAD: dict[str, tuple[dict[str, bytes | str], str]] = {
    "no data": ({"type": SUBMIT}, "data"),
    "no type": ({"id": "x", "data": body()}, "type"),
    "no such type": ({"type": "weft.task.sbumit", "data": body()}, "type"),
    "unreadable bytes": ({"type": SUBMIT, "data": b"\xff\xfe\x00\x01"}, "data"),
    "half a document": ({"type": SUBMIT, "data": b'{"agent": "echo"'}, "data"),
    "wrong msgpack": (
        {"type": SUBMIT, "datacontenttype": "application/msgpack", "data": b"\xc1\xc1"},
        "data",
    ),
    "unknown content type": ({"type": SUBMIT, "datacontenttype": "text/csv", "data": body()}, "datacontenttype"),
    "deep nesting": ({"type": SUBMIT, "data": b'{"agent":"echo","input":' + b"[" * 200_000}, "data"),
    "deep and closed": (
        {"type": SUBMIT, "data": b'{"agent":"echo","input":' + b"[" * 100_000 + b"]" * 100_000 + b"}"},
        "data",
    ),
    "two MiB": ({"type": SUBMIT, "data": body(input="x" * (2 << 20))}, "data"),
    "not an object": ({"type": SUBMIT, "data": b"[1, 2]"}, "data"),
    "unknown agent": ({"type": SUBMIT, "data": body(agent="ehco")}, "data.agent"),
    "agent is a number": ({"type": SUBMIT, "data": body(agent=7)}, "data.agent"),
    "no input": ({"type": SUBMIT, "data": b'{"agent": "echo"}'}, "data.input"),
    "input against the schema": ({"type": SUBMIT, "data": body(agent="strict", input="seven")}, "data.input"),
    "wrong type in conf": ({"type": SUBMIT, "data": body(conf={"max_steps": "ten"})}, "data.conf.max_steps"),
    "no steps at all": ({"type": SUBMIT, "data": body(conf={"max_steps": 0})}, "data.conf.max_steps"),
    "a negative limit": (
        {"type": SUBMIT, "data": body(conf={"timeout_seconds": -1})},
        "data.conf.timeout_seconds",
    ),
    "unknown member": ({"type": SUBMIT, "data": body(agnet="echo")}, "data.agnet"),
    "NUL in the key": ({"type": SUBMIT, "data": body(key="a\0b")}, "data.key"),
    "NUL in the id": ({"type": SUBMIT, "id": b"a\0b", "data": body()}, "id"),
    "NUL in the agent": ({"type": SUBMIT, "data": body(agent="ec\0ho")}, "data.agent"),
    "a line break in the source": ({"type": SUBMIT, "source": "a\nb", "data": body()}, "source"),
    "a key of the runtime": ({"type": SUBMIT, "data": body(key="~mine")}, "data.key"),
    "another version": ({"type": SUBMIT, "specversion": "0.3", "data": body()}, "specversion"),
    "a deadline that is no time": ({"type": SUBMIT, "deadline": "soon", "data": body()}, "deadline"),
    "a deadline that has passed": ({"type": SUBMIT, "deadline": "2001-01-01T00:00:00Z", "data": body()}, "deadline"),
    "a signal to nobody": (
        {"type": "weft.task.signal", "data": b'{"task_id":"none","request_id":"r:1","value":1}'},
        "data.task_id",
    ),
    "a cancel without a task": ({"type": "weft.task.cancel", "data": b"{}"}, "data.task_id"),
}


class Sender:
    """Writes raw entries and reads the answers."""

    def __init__(self, redis: PlainRedis, namespace: str) -> None:
        self.redis = redis
        self.namespace = namespace
        self._count = 0

    async def send(self, fields: dict[str, bytes | str], *, reply: bool = True) -> str:
        """Append an entry and return the stream for its answer."""
        self._count += 1
        answers = f"{self.namespace}-answers-{self._count}"
        flat: list[bytes | str] = [part for pair in fields.items() for part in pair]
        if reply:
            flat += ["replyto", answers]
        await self.redis.execute_command("XADD", f"{self.namespace}:tasks", "*", *flat)
        return answers

    async def answers(self, stream: str, count: int) -> list[tuple[str, dict[str, object]]]:
        """Wait for this many answers on a stream."""

        async def there() -> bool:
            return int(await self.redis.xlen(stream)) >= count

        await until(there, 60, f"{count} answers on {stream}")
        return [
            (fields[b"type"].decode(), json.loads(fields[b"data"])) for _, fields in await self.redis.xrange(stream)
        ]

    async def letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.redis.xrange(f"{self.namespace}:{{0}}:dead")]


@pytest.fixture
async def sender(valkey: Server, namespace: str, tmp_path: Path) -> AsyncIterator[Sender]:
    async with Fleet(valkey.url, namespace, tmp_path), plain_redis(valkey.port) as redis:
        yield Sender(redis, namespace)


async def test_every_bad_entry_is_rejected_with_its_field_and_kept(sender: Sender) -> None:
    streams = {what: await sender.send(fields) for what, (fields, _) in BAD.items()}
    for what, (_, field) in BAD.items():
        [(type, data)] = await sender.answers(streams[what], 1)
        assert (what, type) == (what, "weft.task.rejected")
        assert (what, data["field"]) == (what, field)
        assert data["message"]
        assert len(str(data["message"])) < 2000
    letters = await sender.letters()
    assert [letter[b"field"].decode() for letter in letters] == [field for _, field in BAD.values()]
    assert {letter[b"reason"] for letter in letters} == {b"rejected"}
    # The bytes are kept as they came, so that the entry can be mended and sent again.
    assert letters[list(BAD).index("unreadable bytes")][b"event:data"] == b"\xff\xfe\x00\x01"
    oversized = letters[list(BAD).index("two MiB")]
    assert len(oversized[b"event:data"]) == 4096
    assert json.loads(oversized[b"cut"])["fields"]["event:data"]["bytes"] > 2 << 20

    # And the admitter goes on.
    [_, (type, final)] = await sender.answers(await sender.send({"type": SUBMIT, "data": body(input="well")}), 2)
    assert (type, final["output"]) == ("weft.task.completed", "well")
    assert await sender.redis.xlen(f"{sender.namespace}:tasks") == 0


async def test_an_entry_without_replyto_is_also_kept(sender: Sender) -> None:
    await sender.send({"junk": b"\x00\x01"}, reply=False)
    await sender.send({"type": SUBMIT, "data": body(agent="nobody")}, reply=False)

    async def kept() -> bool:
        return len(await sender.letters()) == 2

    await until(kept, 60, "two dead letters")


async def test_a_replyto_that_cannot_be_written_costs_that_answer_only(sender: Sender) -> None:
    taken = f"{sender.namespace}-text"
    await sender.redis.set(taken, "no stream")
    await sender.send({"type": SUBMIT, "id": "deaf", "replyto": taken, "data": body()}, reply=False)
    [_, (type, _)] = await sender.answers(await sender.send({"type": SUBMIT, "data": body()}), 2)
    assert type == "weft.task.completed"

    async def kept() -> bool:
        return {letter[b"reason"] for letter in await sender.letters()} == {b"undeliverable"}

    await until(kept, 60, "the answers that could not be written, as dead letters")
    assert await sender.redis.get(taken) == b"no stream"


@pytest.mark.parametrize("address", ["weft:tasks", "{namespace}:tasks", "{namespace}:{{0}}:agent"])
async def test_a_replyto_inside_the_namespace_is_refused(sender: Sender, address: str) -> None:
    target = address.format(namespace=sender.namespace)
    await sender.send({"type": SUBMIT, "replyto": target, "data": body()}, reply=False)

    async def kept() -> bool:
        return [letter.get(b"field") for letter in await sender.letters()] == [b"replyto"]

    await until(kept, 60, "a dead letter for the field replyto")


async def test_unknown_attributes_are_kept_without_harm(sender: Sender) -> None:
    fields: dict[str, bytes | str] = {"type": SUBMIT, "data": body(), "shop": "7", "weather": "fair"}
    [_, (type, _)] = await sender.answers(await sender.send(fields), 2)
    assert type == "weft.task.completed"
    fields["data"] = body(agent="nobody")
    [(type, _)] = await sender.answers(await sender.send(fields), 1)
    assert type == "weft.task.rejected"
    [letter] = await sender.letters()
    assert (letter[b"event:shop"], letter[b"event:weather"]) == (b"7", b"fair")


async def test_a_repeated_id_answers_with_the_first_ones_state(sender: Sender) -> None:
    fields: dict[str, bytes | str] = {"type": SUBMIT, "id": "once", "data": body(input="first")}
    [_, first] = await sender.answers(await sender.send(fields), 2)
    [again] = await sender.answers(await sender.send(fields), 1)
    assert again == first
    fields["data"] = body(input="other")
    [(type, data)] = await sender.answers(await sender.send(fields), 1)
    assert (type, data["field"]) == ("weft.task.rejected", "id")


async def test_foreign_entries_on_a_work_stream_are_kept_without_harm(sender: Sender) -> None:
    for stream in ("agent", "tool"):
        await sender.redis.xadd(f"{sender.namespace}:{{0}}:{stream}", {"hello": "world"})
        await sender.redis.xadd(f"{sender.namespace}:{{0}}:{stream}", {"h": b"\xff\n\xff", "d": "{"})
        await sender.redis.xadd(f"{sender.namespace}:{{0}}:{stream}", {"h": "1\nstart\n\n\n\n\n\n", "d": "1"})
    wanted: dict[str, bytes | str] = {
        "type": SUBMIT,
        "data": body(agent="use", input={"tool": "slow", "arguments": {"seconds": 0}}),
    }
    [_, (type, _)] = await sender.answers(await sender.send(wanted), 2)
    assert type == "weft.task.completed"

    async def kept() -> bool:
        return len(await sender.letters()) == 6

    await until(kept, 60, "a dead letter for each foreign entry")
    assert {letter[b"reason"] for letter in await sender.letters()} == {b"malformed"}
    for stream in ("agent", "tool"):
        assert await sender.redis.xlen(f"{sender.namespace}:{{0}}:{stream}") == 0
