"""Thousands of mutated commands: each is executed or refused, and none blocks others."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

ENTRIES = 3000
CHUNK = 200

COMMANDS: dict[str, dict[str, Any]] = {  # Any: JSON
    "weft.task.submit": {
        "agent": "echo",
        "input": {"a": [1, "two"]},
        "key": "k",
        "task_id": "t",
        "session_id": "s",
        "conf": {"max_steps": 5, "timeout_seconds": 9, "max_cost": 1, "streaming_mode": "all"},
        "hooks": {"before_task": ["h"]},
        "metadata": {"m": 1},
    },
    "weft.task.cancel": {"task_id": "t", "reason": "why not"},
    "weft.task.signal": {"task_id": "t", "request_id": "r:1", "value": {"yes": True}},
    "weft.topic.publish": {"topic": "done.work", "data": {"n": 1}, "source": "there"},
    "weft.schedule.set": {
        "schedule_id": "nightly",
        "agent": "echo",
        "input": 1,
        "cron": "0 0 1 1 *",
        "timezone": "UTC",
    },
    "weft.schedule.delete": {"schedule_id": "nightly"},
}
ATTRIBUTES = (
    "specversion", "id", "source", "type", "subject", "time", "datacontenttype", "partitionkey", "traceparent",
    "tracestate", "taskid", "runid", "causationid", "deadline", "tenant", "dataschema",
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (  # Any: JSON
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e308),
    *(
        "",
        " ",
        "\0",
        "\n",
        "\x7f",
        "\u202e",
        "\ufeff",
        "a\nb",
        "~",
        "@0|t|r|1|x",
        "r:1",
        "../../etc/passwd",
        "{0}",
        "{}",
    ),
    *(
        "echo",
        "t",
        "k",
        "weft",
        "*",
        "?",
        "[",
        "\\",
        "'; --",
        "%s%n",
        "${x}",
        "é" * 300,
        "x" * 5000,
        "9" * 400,
        "sk-" * 2000,
    ),
    *(
        "2001-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-00",
        "* * * * *",
        "NaN",
        "1e999",
    ),
    *(
        [],
        {},
        [[]],
        {"": ""},
        {"~chain": "0:t|r"},
        {"a": {"b": {"c": None}}},
        [None] * 500,
        {str(n): n for n in range(300)},
    ),
)
RAW = (
    b"",
    b"\xff\xfe",
    b"null",
    b"{",
    b"[" * 3000,
    b"NaN",
    b'{"a":1,"a":2}',
    b'"\\ud800"',
    b"\xef\xbb\xbf{}",
    b"1" * 5000,
)


def spoiled(chance: random.Random, value: Any) -> Any:  # Any: JSON
    """Return the value with one part changed, removed or added."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        match chance.randrange(5):
            case 0:
                del value[name]
            case 1:
                value[str(chance.choice(HOSTILE))[:3000]] = value[name]
            case _:
                value[name] = spoiled(chance, value[name])
        return value
    if isinstance(value, list) and value and chance.random() < 0.5:
        value[chance.randrange(len(value))] = chance.choice(HOSTILE)
        return value
    return copy.deepcopy(chance.choice(HOSTILE))


def cut(chance: random.Random, data: bytes) -> bytes:
    """Return the bytes with some lost, changed or repeated."""
    at = chance.randrange(len(data) + 1)
    match chance.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + chance.randbytes(chance.randrange(1, 5)) + data[at + 1 :]
        case 2:
            return data[:at] * 2 + data[at:]
        case _:
            return chance.choice(RAW)


def entry(chance: random.Random, number: int) -> list[bytes]:
    """Return the fields of one entry. Most are almost valid, so that they get far."""
    kind = chance.choice(list(COMMANDS))
    command: Any = copy.deepcopy(COMMANDS[kind])  # Any: JSON
    if "task_id" in command and chance.random() < 0.7:
        command["task_id"] = f"t{chance.randrange(number + 1)}"
    for _ in range(chance.choice((0, 1, 1, 1, 2, 5))):
        command = spoiled(chance, command)
    data = json.dumps(command).encode()
    if chance.random() < 0.15:
        data = cut(chance, data)
    fields: list[tuple[bytes, bytes]] = [(b"type", kind.encode()), (b"data", data)]
    if chance.random() < 0.5:
        fields.append((b"replyto", b"fuzz-answers"))
    for _ in range(chance.choice((0, 0, 1, 2))):
        value = chance.choice(HOSTILE)
        raw = value.encode() if isinstance(value, str) else chance.choice(RAW)
        fields.append((chance.choice(ATTRIBUTES).encode(), raw))
    if chance.random() < 0.05:
        structured = {"specversion": "1.0", "id": f"e{number}", "source": "/s", "type": kind, "data": command}
        fields = [(b"data", json.dumps(spoiled(chance, structured)).encode())]
    if chance.random() < 0.05:
        fields.append((chance.randbytes(chance.randrange(9)), chance.randbytes(chance.randrange(9))))
    return [part for pair in fields for part in pair]


async def pour(redis: PlainRedis, key: str, chance: random.Random) -> None:
    for start in range(0, ENTRIES, CHUNK):
        async with redis.pipeline(transaction=False) as pipe:
            for number in range(start, start + CHUNK):
                pipe.execute_command("XADD", key, "*", *entry(chance, number))
            await pipe.execute()


async def test_hostile_commands_stop_no_service(valkey: Server, namespace: str, tmp_path: Path) -> None:
    # The same commands each time; another seed tries others.
    seed = int(os.environ.get("WEFT_FUZZ_SEED", "1"))
    ingress, base = f"{namespace}:tasks", f"{namespace}:{{0}}:"
    async with Fleet(valkey.url, namespace, tmp_path) as fleet, plain_redis(valkey.port) as redis:
        pids = {name: fleet.members[name].pid for name in fleet.names()}
        await pour(redis, ingress, random.Random(seed))
        honest = ("type", "weft.task.submit", "id", "honest", "replyto", "honest-answers")
        await redis.execute_command("XADD", ingress, "*", *honest, "data", '{"agent":"echo","input":"well"}')

        async def all_read() -> bool:
            return int(await redis.xlen(ingress)) == 0

        async def all_ended() -> bool:
            return int(await redis.zcard(f"{base}open")) == 0

        async def answered() -> bool:
            return int(await redis.xlen("honest-answers")) == 2

        await until(all_read, 120, "every command is carried out or refused")
        await until(all_ended, 60, "every task that was started has ended")
        await until(answered, 60, "an honest sender is told that its task was accepted, and how it ended")
        final = (await redis.xrange("honest-answers"))[-1][1]
        assert (final[b"type"], json.loads(final[b"data"])["output"]) == (b"weft.task.completed", "well")
        assert {name: fleet.members[name].pid for name in fleet.names()} == pids, "a service was ended"
        letters = [fields for _, fields in await redis.xrange(f"{base}dead")]
        odd = [letter for letter in letters if letter[b"reason"] != b"rejected"]
        assert not odd, odd[0]
        assert all(len(letter[b"error"]) < 4000 for letter in letters)
        assert ENTRIES // 4 < len(letters) < ENTRIES, "most were as they should be, or nearly none was"
