"""Each user of `weft acl` may do what the table allows and nothing else, for every command that the server knows."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import MovedError, NoPermissionError, ReadOnlyError, ResponseError

from runtime_core.bus import partition
from runtime_core.bus.acl.rules import LATER, Target, find_users, rules
from runtime_core.bus.acl.users import KEYS, USERS, User
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.library import library
from runtime_core.bus.namespace import connect
from runtime_core.errors import ServerError
from tests.conftest import OwnServer
from tests.servers.cluster import CLUSTER_OPTIONS, follow, join
from tests.servers.matrix import MATRIX, only_in_matrix, repeat_on
from tests.servers.process import HOST, Server

pytestmark = pytest.mark.timeout(300)

ALWAYS = frozenset({"auth", "hello", "quit", "reset"})
"""What a server lets everybody do, signed in or not."""
SHOP = find_users((), ["shop"])[0]
EVERYBODY = {**{name: user for name, user in USERS.items() if not user.everything}, "shop": SHOP}
DANGEROUS = (
    ("CLIENT", "PAUSE", "4000", "ALL"),
    ("CLIENT", "KILL", "USER", "state-manager"),
    ("CLIENT", "LIST"),
    ("CLIENT", "NO-EVICT", "ON"),
    ("CLIENT", "TRACKING", "ON"),
    ("CLIENT", "UNBLOCK", "1"),
    ("ACL", "LIST"),
    ("ACL", "WHOAMI"),
    ("ACL", "SETUSER", "intruder", "on", "nopass", "~*", "+@all"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CONFIG", "GET", "*"),
    ("DEBUG", "SLEEP", "0"),
    ("EVAL", "return 1", "0"),
    ("FLUSHALL",),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "RESTORE", "x"),
    ("KEYS", "*"),
    ("MONITOR",),
    ("MIGRATE", "h", "1", "k", "0", "1"),
    ("MODULE", "LIST"),
    ("PUBLISH", "channel", "x"),
    ("SUBSCRIBE", "channel"),
    ("REPLICAOF", "NO", "ONE"),
    ("RENAME", "weft:tasks", "weft:stolen"),
    ("RESTORE", "weft:tasks", "0", "x"),
    ("SAVE",),
    ("SCRIPT", "KILL"),
    ("SHUTDOWN", "NOSAVE"),
    ("SORT", "weft:tasks"),
    ("SWAPDB", "0", "1"),
    ("XSETID", "weft:tasks", "18446744073709551615-18446744073709551615"),
)
"""What none of them may do, whatever else the table says."""


class Broker:
    """A server with all users of the table, whose passwords are their names."""

    def __init__(self, server: Server, partitions: int = 1) -> None:
        self.admin = _plain(Redis(host=HOST, port=server.port, protocol=2))
        self.port = server.port
        known = self.admin.execute_command("COMMAND", "INFO", *sorted(LATER))
        lacks = frozenset(name for name, about in zip(sorted(LATER), known, strict=True) if not about)
        self.target = Target(partitions=partitions, lacks=lacks)
        for user in [*USERS.values(), SHOP]:
            digest = hashlib.sha256(user.name.encode()).hexdigest()
            self.admin.execute_command("ACL", "SETUSER", user.name, *rules(user, self.target, [digest]))

    def as_user(self, name: str) -> Any:
        return _plain(Redis(host=HOST, port=self.port, username=name, password=name, protocol=2))

    def commands(self) -> list[str]:
        """Every command that the server knows, with its subcommands."""
        names = [name.decode() for name in self.admin.execute_command("COMMAND", "LIST")]
        return sorted(set(names))

    def may(self, user: str, *command: str) -> bool:
        """Whether the server would run this for the user."""
        return bool(self.admin.execute_command("ACL", "DRYRUN", user, *command) == b"OK")

    def granted(self, user: str) -> set[str]:
        """Every command that one of the user's selectors names, as the server keeps it."""
        said = self.admin.execute_command("ACL", "GETUSER", user)
        about = dict(zip(said[::2], said[1::2], strict=True))
        selectors = [dict(zip(one[::2], one[1::2], strict=True)) for one in about[b"selectors"]]
        return {command for one in (about, *selectors) for command in self._named(one[b"commands"].decode())}

    def _named(self, words: str) -> set[str]:
        """Return rules of commands, in order; Redis 7.0 stores many as a category with exceptions."""
        known, found = set(self.commands()), set[str]()
        for word in words.split():
            name = word[1:]
            if name.startswith("@"):
                listed = self.admin.execute_command("ACL", "CAT", name[1:]) if name != "@all" else []
                named = {one.decode() for one in listed} or known
            else:
                named = {name}
            meant = {one for one in known if one in named or one.partition("|")[0] in named}
            found = found | meant if word.startswith("+") else found - meant
        return found


def _plain(connection: Any) -> Any:  # Any: redis-py types no `execute_command`
    """A connection whose replies are as the server sends them."""
    connection.response_callbacks.clear()
    return connection


@pytest.fixture(params=repeat_on(*MATRIX))
def broker(request: pytest.FixtureRequest, own_server: OwnServer) -> Iterator[Broker]:
    broker = Broker(own_server(request.param))
    yield broker
    broker.admin.close()


@pytest.fixture
async def cluster(own_server: OwnServer) -> AsyncIterator[list[Broker]]:
    servers = [own_server("valkey-9", append=None, options=CLUSTER_OPTIONS) for _ in range(2)]
    await join(servers)
    brokers = [Broker(server, partitions=2) for server in servers]
    yield brokers
    for broker in brokers:
        broker.admin.close()


def table_of(user: User, target: Target, known: set[str]) -> set[str]:
    """The commands that the table gives a user, with the subcommands that they imply."""
    given = set(user.root_commands(target.partitions))
    for grant in user.selectors():
        given |= set(grant.commands)
    given -= target.lacks
    return {one for one in known if one in given or one.partition("|")[0] in given}


def test_commands_outside_the_table_are_refused(broker: Broker) -> None:
    _check_commands(broker)


@only_in_matrix("on a Cluster")
def test_every_server_of_a_cluster_grants_the_rights_of_the_table(cluster: list[Broker]) -> None:
    for broker in cluster:
        _check_commands(broker)
        _check_keys(broker)


def _check_commands(broker: Broker) -> None:
    known = set(broker.commands())
    assert len(known) > 200
    for user in EVERYBODY.values():
        assert broker.granted(user.name) - ALWAYS == table_of(user, broker.target, known) - ALWAYS, user.name
        given = table_of(user, broker.target, known)
        for command in sorted(known - given - ALWAYS):
            # As the server itself judges: by the command alone where it has no arguments to look at.
            assert not _dry(broker, user.name, command), f"{user.name} may {command}"


def _dry(broker: Broker, user: str, command: str) -> bool:
    """Whether the server lets a user run a command with its minimum number of arguments."""
    words = command.split("|")
    [about] = broker.admin.execute_command("COMMAND", "INFO", command)
    words += ["0"] * (abs(about[1]) - len(words))
    try:
        return broker.may(user, *words)
    except ResponseError:  # a container of subcommands, or arguments in which it cannot find its keys
        return False


def test_attacks_are_refused(broker: Broker) -> None:
    broker.admin.xadd("weft:tasks", {"type": "weft.task.submit", "data": "{}"})
    broker.admin.xadd("weft:tasks:other", {"type": "weft.task.submit", "data": "{}"})
    for name, user in EVERYBODY.items():
        with broker.as_user(name) as connection:
            assert connection.execute_command("PING")
            for command in DANGEROUS:
                with pytest.raises(ResponseError) as refused:
                    connection.execute_command(*command)
                known = isinstance(refused.value, NoPermissionError) or any(
                    # Renamed away, or off unless the server's file says otherwise.
                    reason in str(refused.value).lower()
                    for reason in ("unknown", "command not allowed")
                )
                assert known, f"{name}: {command}: {refused.value}"
            if not user.functions:
                with pytest.raises(NoPermissionError):
                    connection.execute_command("FCALL", "any", "1", "weft:{0}:", "x")
    assert "intruder" not in [name.decode() for name in broker.admin.execute_command("ACL", "USERS")]
    assert broker.admin.xlen("weft:tasks") == broker.admin.xlen("weft:tasks:other") == 1


GREATEST = "18446744073709551615-18446744073709551615"


def test_a_publisher_reaches_its_own_stream_and_answers_only(broker: Broker) -> None:
    for key in ("weft:tasks", "weft:tasks:other", "weft:tasks:shop2", "other:answers", "weft:{0}:agent"):
        broker.admin.xadd(key, {"a": "b"})
    broker.admin.xadd("shop:answers:1", {"a": "b"})
    with broker.as_user("shop") as shop:
        for words in (("*",), ("MAXLEN", "1", "*"), (GREATEST,)):
            assert shop.execute_command("XADD", "weft:tasks:shop", *words, "type", "weft.task.submit")
        for key in ("weft:tasks", "weft:tasks:other", "weft:tasks:shop2", "weft:{0}:agent", "other:answers"):
            for command in (
                ("XADD", key, "*", "a", "b"),
                ("XADD", key, "MAXLEN", "1", "*", "a", "b"),
                ("XADD", key, GREATEST, "a", "b"),
                ("XREAD", "STREAMS", key, "0"),
                ("XREAD", "STREAMS", "shop:answers:1", key, "0", "0"),
                ("XRANGE", key, "-", "+"),
                ("XTRIM", key, "MAXLEN", "0"),
                ("DEL", key),
                ("DEL", "shop:answers:1", key),
                ("XDEL", key, "1-1"),
            ):
                with pytest.raises(NoPermissionError):
                    shop.execute_command(*command)
        # What it may read it may not write, and the other way round: rights do not combine over selectors.
        for command in (
            ("XADD", "shop:answers:1", "*", "a", "b"),
            ("XRANGE", "weft:tasks:shop", "-", "+"),
            ("XREAD", "STREAMS", "weft:tasks:shop", "0"),
            ("DEL", "weft:tasks:shop"),
            ("XTRIM", "weft:tasks:shop", "MAXLEN", "0"),
        ):
            with pytest.raises(NoPermissionError):
                shop.execute_command(*command)
        [[_, [[entry, _]]]] = shop.xread({"shop:answers:1": "0"})
        assert shop.xrange("shop:answers:1")
        assert shop.xdel("shop:answers:1", entry) == 1
        assert shop.delete("shop:answers:1") == 1
    for key in ("weft:tasks", "weft:tasks:other", "weft:tasks:shop2", "other:answers", "weft:{0}:agent"):
        assert broker.admin.xlen(key) == 1


def test_keys_outside_the_table_are_refused(broker: Broker) -> None:
    _check_keys(broker)


def _check_keys(broker: Broker) -> None:
    """Try writes by XADD, HSET and the like, and the user's own reads; also in other namespaces."""
    for user in EVERYBODY.values():
        reads, writes = user.keys(broker.target.partitions) if user.functions else ([], [])
        for key in (*KEYS, "agent:gpu", "tool:gpu"):
            full = f"weft:{{0}}:{key}" + ("x" if key.endswith(":") else "")
            family = key.removesuffix(":gpu")
            commands = [("HGETALL", full), ("HGET", full, "f"), ("ZRANGE", full, "0", "1"), ("XRANGE", full, "-", "+")]
            if family in reads:
                commands = []
            if family not in writes:
                commands += [("HSET", full, "f", "v"), ("XADD", full, "*", "f", "v"), ("ZADD", full, "1", "m")]
            else:
                commands = []
            if user.serves and family not in user.serves:
                commands += [
                    ("XREADGROUP", "GROUP", "g", "c", "STREAMS", full, ">"),
                    ("XREAD", "STREAMS", full, "0"),
                    ("XCLAIM", full, "g", "c", "0", "1-1"),
                    ("XACK", full, "g", "1-1"),
                    ("XDEL", full, "1-1"),
                    ("XTRIM", full, "MAXLEN", "0"),
                ]
                if key != "undelivered":
                    commands.append(("XRANGE", full, "-", "+"))
            for command in commands:
                assert not broker.may(user.name, *command), f"{user.name} may {command}"
        for foreign in ("other:{0}:task:x", "weft:{0:task:x", "weft2:{0}:task:x", "weft:{x0}:task:x", "elsewhere"):
            for command in (
                ("HGETALL", foreign),
                ("HSET", foreign, "f", "v"),
                ("DEL", foreign),
                ("XADD", foreign, "*", "a", "b"),
            ):
                assert not broker.may(user.name, *command), f"{user.name} may {command}"
        if user.name != "shop":
            assert not broker.may(user.name, "XREAD", "STREAMS", "shop:answers", "0")
        assert not broker.may(user.name, "HSET", "weft:settings", "partitions", "9")


def test_no_function_reaches_another_namespace(broker: Broker) -> None:
    _check_functions([broker])


@only_in_matrix("on a Cluster")
def test_no_function_reaches_another_namespace_of_a_cluster(cluster: list[Broker]) -> None:
    _check_functions(cluster)


def _check_functions(brokers: list[Broker]) -> None:
    """Call every function as every user, even with keys that only look like the user's."""
    for broker in brokers:
        broker.admin.execute_command("FUNCTION", "LOAD", library().source)
        names = library().functions.values()
        for name, user in EVERYBODY.items():
            own = ["weft:{0}:"] if not user.functions else []
            foreign = ["other:{0}:", "weft2:{0}:", "weft:{x0}:", "weft:{00}:", "weft", "own:{0}:"]
            with broker.as_user(name) as connection:
                for function in names:
                    for key in (*own, *foreign):
                        with pytest.raises(NoPermissionError):
                            connection.execute_command("FCALL", function, "1", key, *["1"] * 20)
                    with pytest.raises(NoPermissionError):
                        connection.execute_command("FCALL", function, "2", "weft:{0}:", "other:{0}:", *["1"] * 20)
                    with pytest.raises(NoPermissionError):
                        connection.execute_command("FCALL_RO", function, "1", "weft:{0}:", *["1"] * 20)
        assert broker.admin.execute_command("DBSIZE") == 0, "nothing was written"


BASE = "weft:{0}:"
CLAIMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "take": tuple(
        command
        for stream in ("agent", "tool")
        for command in (
            ("XREADGROUP", "GROUP", "g", "c", "STREAMS", BASE + stream, ">"),
            ("XCLAIM", BASE + stream, "g", "c", "0", "1-1"),
            ("XAUTOCLAIM", BASE + stream, "g", "c", "0", "0"),
        )
    ),
    "read the work": tuple(("XREAD", "STREAMS", BASE + stream, "0") for stream in ("agent", "tool")),
    "dead letters": (("XRANGE", BASE + "dead", "-", "+"), ("FCALL", "redrive", "1", BASE, "1-1", "0", "")),
    "the record": (("XRANGE", BASE + "record", "-", "+"), ("XREAD", "STREAMS", BASE + "record", "0")),
    "settings": (("HSET", "weft:settings", "partitions", "9"),),
    "schedules": (
        ("HSET", BASE + "schedules", "s", "{}"),
        ("ZADD", BASE + "scheduled", "1", "s"),
        ("FCALL", "schedule", "1", BASE, "s", "*", "{}", "1", "9", ""),
        ("FCALL", "schedule", "1", BASE, "known", "*", "", "", "9", ""),
    ),
    "lead": (("FCALL", "lead", "1", BASE, "keep", "one", "0"), ("HSET", BASE + "leader:keep", "owner", "x")),
    "load functions": (("FUNCTION", "LOAD", "REPLACE", "#!lua name=x"), ("FUNCTION", "DELETE", "x")),
    "list keys": (("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",)),
    "create keys": (("HSET", BASE + "api-keys", "k", "{}"), ("HDEL", BASE + "api-keys", "known")),
    "register publishers": (("HSET", BASE + "publishers", "p", "{}"), ("HDEL", BASE + "publishers", "p")),
    "other namespaces": (("HGETALL", "other:{0}:task:t"), ("HSET", "other:{0}:task:t", "a", "b")),
    "outside the namespace": (("SET", "elsewhere", "x"), ("HSET", "other:{0}:task:t", "a", "b"), ("DEL", "weft2")),
    "the server": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "RESETSTAT"), ("REPLICAOF", "NO", "ONE")),
    "users": (("ACL", "SETUSER", "intruder", "on"), ("ACL", "DELUSER", "admin")),
    "pause": (("CLIENT", "PAUSE", "1"),),
    "disconnect": (("CLIENT", "KILL", "USER", "admin"),),
    "read or write tasks": (
        ("HGETALL", BASE + "task:t"),
        ("HSET", BASE + "task:t", "a", "b"),
        ("DEL", BASE + "task:t"),
    ),
    "append to any stream": tuple(("XADD", BASE + stream, "*", "a", "b") for stream in ("agent", "record", "dead")),
    "read anything": (("XRANGE", "weft:tasks", "-", "+"), ("XREAD", "STREAMS", "weft:tasks", "0"), ("GET", "x")),
    "delete keys or entries": (
        ("DEL", "weft:tasks"),
        ("XDEL", "weft:tasks", "1-1"),
        ("XTRIM", "weft:tasks", "MAXLEN", "0"),
    ),
    "read an entry": (("XRANGE", "weft:tasks", "-", "+"), ("XREAD", "STREAMS", BASE + "agent", "0")),
    "write anything": (("XADD", "weft:tasks", "*", "a", "b"), ("XADD", BASE + "agent", "*", "a", "b")),
    "touch any key": (("EXISTS", "weft:tasks"), ("XLEN", BASE + "agent"), ("TYPE", BASE + "meta")),
    "see what clients send": (("MONITOR",), ("CLIENT", "LIST"), ("SLOWLOG", "GET")),
    "do anything else": (("INFO",), ("TIME",), ("EXISTS", "x")),
    "touch commands": (
        ("XRANGE", "weft:tasks", "-", "+"),
        ("XADD", "weft:tasks", "*", "a", "b"),
        ("DEL", "weft:tasks:other"),
    ),
}
"""Attacks on what the table says that a user cannot do, by its words."""


async def test_a_replica_of_a_cluster_runs_no_function_for_anybody(own_server: OwnServer) -> None:
    """Every function is one that may write, so a replica refuses it whatever the user may do at the master."""
    master, copy = (own_server("valkey-9", append=None, options=CLUSTER_OPTIONS) for _ in range(2))
    await join([master])
    with Redis(host=HOST, port=master.port) as admin:
        admin.execute_command("FUNCTION", "LOAD", library().source)
    await follow(master, copy)
    replica = Broker(copy)
    assert replica.admin.execute_command("FUNCTION", "LIST"), "it has the functions"
    for name in EVERYBODY:
        with replica.as_user(name) as user:
            for function in library().functions.values():
                _refuses(user, "FCALL", function)
            if replica.may(name, "READONLY"):
                user.execute_command("READONLY")
                for function in library().functions.values():
                    _refuses(user, "FCALL", function)
                    _refuses(user, "FCALL_RO", function)
    replica.admin.close()


def _refuses(user: Any, command: str, function: bytes) -> None:
    with pytest.raises(ResponseError) as refused:
        user.execute_command(command, function, 1, "weft:{0}:", "x")
    words = ("MOVED", "NOPERM", "READONLY", "Can not execute a script with write flag")
    assert isinstance(refused.value, MovedError | NoPermissionError | ReadOnlyError) or any(
        word in str(refused.value) for word in words
    ), f"{command} {function!r}: {refused.value}"


def test_nobody_can_do_what_the_table_rules_out(broker: Broker) -> None:
    _check_claims([broker])


@only_in_matrix("on a Cluster")
def test_nobody_can_do_what_the_table_rules_out_on_a_cluster(cluster: list[Broker]) -> None:
    _check_claims(cluster)


DENIED = re.compile(
    # Redis 7.0 does not say that a function was denied something by the ACL.
    "no permissions|acl failure|unknown command|user executing the script can't (access|run)",
    re.IGNORECASE,
)


def _check_claims(brokers: list[Broker]) -> None:
    attacks = {
        name: [command for words, commands in CLAIMS.items() if words in user.cannot for command in commands]
        for name, user in EVERYBODY.items()
    }
    refused: set[tuple[str, tuple[str, ...]]] = set()
    for broker in brokers:
        broker.admin.execute_command("FUNCTION", "LOAD", library().source)
        with suppress(MovedError):
            broker.admin.zadd(BASE + "alive", {"one": 1e15})
            broker.admin.xadd(BASE + "dead", {"a": "b"}, id="1-1")
            broker.admin.hset(BASE + "schedules", "known", "{}")
        for name, user in EVERYBODY.items():
            with broker.as_user(name) as connection:
                for command in attacks[name]:
                    if {BASE + stream for stream in user.serves} & set(command):
                        refused.add((name, command))  # its own work
                        continue
                    words: tuple[str | bytes, ...] = command
                    if command[0] == "FCALL":
                        words = ("FCALL", library().functions[command[1]], *command[2:])
                    try:
                        answer = connection.execute_command(*words)
                    except MovedError:
                        continue  # the other server of the Cluster judges
                    except ResponseError as error:
                        if not DENIED.search(str(error)):
                            raise
                        refused.add((name, command))
                    else:
                        raise AssertionError(f"{name} may {command}: {answer}")
    for name, commands in attacks.items():
        assert len(commands) > 2, f"{name} cannot {EVERYBODY[name].cannot}"
        assert {(name, command) for command in commands} <= refused


def test_only_services_that_run_no_code_of_apps_load_functions(broker: Broker) -> None:
    """Others call these functions with their own rights, so whoever may load functions may do all that callers may."""
    code = "#!lua name=intruder\nredis.register_function('intruder', function() return 1 end)"
    for name, user in EVERYBODY.items():
        assert broker.may(name, "FUNCTION", "LOAD", code) == user.loads_functions
        assert broker.may(name, "FUNCTION", "LOAD", "REPLACE", code) == user.loads_functions
    assert {name for name, user in EVERYBODY.items() if user.loads_functions} == {
        "state-manager", "trajectory-recorder", "operator", "runtime",
    }  # fmt: skip


def test_a_service_that_may_not_load_functions_waits_for_one_that_may(broker: Broker) -> None:
    async def work() -> None:
        handler = await connect(_url(broker, "agent-handler"))
        manager = await connect(_url(broker, "state-manager"))
        keys = Keys("weft", 0)
        waiting = asyncio.create_task(EventBus(handler, keys, "someone").beat(1000, first=True, since_ms="0"))
        while not broker.admin.execute_command("ACL", "LOG"):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await EventBus(manager, keys).load_library()
        await asyncio.wait_for(waiting, 10)
        await handler.close()
        await manager.close()

    asyncio.run(work())


def test_a_service_names_the_services_that_load_its_functions(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "LIBRARY_SECONDS", 0.0)

    async def work() -> None:
        handler = await connect(_url(broker, "tool-handler"))
        try:
            with pytest.raises(ServerError, match="start a state-manager or a trajectory-recorder of this release"):
                await EventBus(handler, Keys("weft", 0), "someone").load_library()
        finally:
            await handler.close()

    asyncio.run(work())


def _url(broker: Broker, user: str) -> str:
    return f"redis://{user}:{user}@{HOST}:{broker.port}"
