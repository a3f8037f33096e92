"""What a process refuses before it works in a namespace, and the namespaces of ended programs."""

from __future__ import annotations

import pytest

from runtime_core.bus import namespace as namespace_module
from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.keys import OWN_NAMESPACES
from runtime_core.bus.namespace import erase_own, is_cluster, note_own, open_namespace, server_info
from runtime_core.errors import ConfigurationError, ServerError
from tests.unit.bus.scripted import ScriptedTransport

META = ("weft:{0}:meta", "weft:{1}:meta")
HEALTHY = {
    "server": "# Server\r\nredis_version:7.2.4\r\nredis_mode:standalone",
    "replication": "role:master",
    "memory": "maxmemory_policy:noeviction",
}


class Broker(ScriptedTransport):
    """A server with these sections of INFO and these settings of the namespace."""

    def __init__(self, stored: tuple[bytes | None, bytes | None] = (b"2", b"1"), **info: str) -> None:
        super().__init__(self._answer)
        self.info = HEALTHY | info
        self.stored = list(stored)
        self.refusals: dict[str, str] = {}

    def _answer(self, *args: Argument) -> Reply:
        if (command := str(args[0])) in self.refusals:
            raise ServerError(self.refusals[command])
        match args:
            case ("INFO", *sections):
                return "\r\n".join(self.info[str(section)] for section in sections).encode()
            case ("HMGET", "weft:settings", "partitions", "format"):
                return list(self.stored)
            case ("HSETNX", "weft:settings", field, value):
                self.stored[("partitions", "format").index(str(field))] = str(value).encode()
        return None

    def written(self) -> list[tuple[Argument, ...]]:
        return [command for command in self.commands if str(command[0]).startswith("HSET")]


async def test_a_new_namespace_gets_its_settings_and_limits() -> None:
    broker = Broker((None, None))
    keys = await open_namespace(broker, "weft", 2, {"ready_max": 8, "dead_max": 9})
    assert [each.base for each in keys] == ["weft:{0}:", "weft:{1}:"]
    assert broker.stored == [b"2", b"1"]
    assert broker.written()[2:] == [
        ("HSET", key, "ready_max", 8, "dead_max", 9) for key in ("weft:{0}:meta", "weft:{1}:meta")
    ]


async def test_an_existing_namespace_is_opened_without_a_write() -> None:
    """A server at its memory limit refuses writes, and the processes that free memory must start."""
    broker = Broker()
    await open_namespace(broker, "weft", 2)
    assert broker.written() == []
    broker.refusals["HSET"] = "OOM command not allowed"
    assert len(await open_namespace(broker, "weft", 2, {"ready_max": 8})) == 2


@pytest.mark.parametrize(
    ("broker", "message"),
    [
        (Broker(memory="maxmemory_policy:allkeys-lru"), "the server's maxmemory-policy is allkeys-lru"),
        (Broker(server="redis_version:6.2.7"), "WEFT_REDIS_URL: the server is Redis 6.2.7, which has no functions"),
        (Broker(replication="role:slave"), "WEFT_REDIS_URL: the server is a replica"),
        (Broker((b"3", b"1")), "WEFT_PARTITIONS=2: the namespace 'weft' was created with 3, which cannot change"),
        (Broker((b"2", b"99")), "the namespace 'weft' has format 99, this release reads up to 1"),
    ],
)
async def test_an_unusable_server_or_namespace_is_refused(
    broker: Broker, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_module, "CONNECT_SECONDS", 0.02)
    monkeypatch.setattr(namespace_module, "ROLE_POLL_SECONDS", 0.01)
    with pytest.raises(ConfigurationError) as refused:
        await open_namespace(broker, "weft", 2)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert broker.written() == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("OOM command not allowed", "WEFT_REDIS_URL: the broker's memory is full"),
        ("NOPERM no permissions", "WEFT_REDIS_URL: the broker's user may not work in the namespace 'weft'"),
    ],
)
async def test_a_refused_write_names_its_cause(error: str, message: str) -> None:
    broker = Broker((None, None))
    broker.refusals["HSETNX"] = error
    with pytest.raises(ConfigurationError) as refused:
        await open_namespace(broker, "weft", 2)
    assert str(refused.value).startswith(message)
    broker.refusals["HSETNX"] = "ERR something else"
    with pytest.raises(ServerError, match="something else"):
        await open_namespace(broker, "weft", 2)


async def test_a_server_of_a_cluster_may_be_a_replica() -> None:
    """Calls go to the server of their keys, whichever server the URL names."""
    for mode in ("redis_mode:cluster", "server_mode:cluster"):
        broker = Broker(server=f"redis_version:7.2.4\r\n{mode}", replication="role:slave")
        assert is_cluster(await server_info(broker, "server"))
        assert len(await open_namespace(broker, "weft", 2)) == 2


async def test_a_user_without_info_may_work() -> None:
    broker = Broker()
    broker.refusals["INFO"] = "NOPERM this user has no permissions"
    assert await server_info(broker) == {}
    assert len(await open_namespace(broker, "weft", 2)) == 2


async def test_only_namespaces_of_ended_programs_are_erased() -> None:
    day = namespace_module.OWN_NAMESPACE_SILENT_MS
    pages: dict[object, list[Reply]] = {
        b"0": [b"7", [b"weft-own-a:{0}:meta", b"weft-own-b:{0}:meta"]],
        b"7": [b"0", [b"weft-own-a:settings"]],
    }

    def answer(*args: Argument) -> Reply:
        match args:
            case ("ZRANGEBYSCORE", key, "-inf", most):
                assert (key, most) == (OWN_NAMESPACES, f"({5}")
                return [b"weft-own-a"]
            case ("SCAN", cursor, "MATCH", "weft-own-*", "COUNT", _):
                return pages[cursor]
        return None

    broker = ScriptedTransport(answer)
    await note_own(broker, "weft-own-me", day + 5)
    assert broker.commands[0] == ("ZADD", OWN_NAMESPACES, day + 5, "weft-own-me")
    assert [command[1] for command in broker.commands if command[0] == "UNLINK"] == [
        b"weft-own-a:{0}:meta",
        b"weft-own-a:settings",
    ]
    assert broker.commands[-1] == ("ZREM", OWN_NAMESPACES, "weft-own-a")
    broker.commands.clear()
    await erase_own(broker, "weft-own-b")
    assert [command[1] for command in broker.commands if command[0] == "UNLINK"] == [b"weft-own-b:{0}:meta"]
