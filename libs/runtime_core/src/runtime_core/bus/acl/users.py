"""The broker's users: one table, the source of `weft acl`, the cluster's Secret and the documents.

Keys are named by the part after `<namespace>:{<partition>}:`. A name that ends with `:` is followed by ids, and a work
stream stands for its pools too.

The rights of a function are read from its Lua source. A server checks the caller's rights inside a function too, and a
function that lacks one stops halfway without a rollback. So the rights err on the high side: they cover every command
and key in the function and in all helpers that it can call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from runtime_core.bus.library import FUNCTIONS, SHARED, source_of

STREAMS = ("agent", "tool", "ray", "spark")
"""Work streams; each may have pools, as in `tool:gpu`."""
READING = frozenset(
    (
        "EXISTS", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN", "HVALS", "LLEN", "LRANGE", "XINFO",
        "XLEN", "XPENDING", "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE",
    )
)  # fmt: skip
"""Commands of functions that change nothing."""

_COMMENT = re.compile(r"--[^\n]*")
_FUNCTION = re.compile(r"^(?:local )?function ([\w.]+)\((?:[^\n]*\bend$|.*?^end$)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^do$.*?^end$", re.MULTILINE | re.DOTALL)
_IN_BLOCK = re.compile(r"^  function ([\w.]+)\(", re.MULTILINE)
_WORD = re.compile(r"\w+(?:\.\w+)?")
_USE = re.compile(r"(?<![\w.])(\w+)\(")
_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
_KEY = re.compile(r"(?:base|keys\[1\]) \.\. '([\w:]+)'")
_READ = re.compile(r"redis\.p?call\('(\w+)', (?:'[A-Z]+', )?(?:base|keys\[1\]) \.\. '([\w:]+)'")
_OTHER_KEY = re.compile(r"(?:base|keys\[1\]) \.\. (?!')")
_SUBCOMMANDS = ("MEMORY", "XGROUP", "XINFO")

_UNNAMED = {
    "idle": ("agents", "tools", "engines", "asks", "replies"),
    "start_first": ("mail:", "nest:"),
    "stream_by_manifest": ("agents", "tools"),
}
"""Keys that a function or helper builds from variables."""
OWN_STREAMS = ("adopt", "leave", "mark_started")
"""Functions whose only such keys are the streams that their caller serves."""


@dataclass(frozen=True, slots=True)
class FunctionRights:
    """The least rights that a caller needs. A key is named by the part after the partition's base, as in `task:`."""

    commands: frozenset[str]
    """Commands as in ACL rules, such as `hget` and `xgroup|create`."""
    reads: frozenset[str]
    """Keys that it only reads."""
    writes: frozenset[str]
    """Keys that it may write."""


def key_family(name: str) -> str:
    """Return a key's name in the rights, by the part after the partition's base: `letters:` for `letters:bytes`."""
    head, colon, _ = name.partition(":")
    if head in STREAMS:
        return head
    return name if head == "leader" else head + colon


@cache
def function_rights(name: str) -> FunctionRights:
    """Return the rights that the function `name` and its helpers need."""
    reached = _within_reach(name)
    text = "\n".join(reached.values())
    commands = frozenset(
        f"{command}|{sub}".lower() if command in _SUBCOMMANDS else command.lower()
        for command, sub in _CALL.findall(text)
    )
    mentions = [key_family(key) for key in _KEY.findall(text)]
    read_only = [key_family(key) for command, key in _READ.findall(text) if command in READING]
    reads = {key for key in mentions if mentions.count(key) == read_only.count(key)}
    writes = set(mentions) - reads
    if name not in OWN_STREAMS and _OTHER_KEY.search(text):
        writes.update(STREAMS)
    for helper in reached.keys() & _UNNAMED.keys():
        writes.update(_UNNAMED[helper])
    reads -= writes
    return FunctionRights(commands, frozenset(reads), frozenset(writes))


def _within_reach(name: str) -> dict[str, str]:
    """Return the source of a function's file and of all helpers that it uses, even indirectly, by name."""
    helpers = _helpers()
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        reached = waiting.pop()
        if reached in found:
            continue
        found[reached] = text = helpers.get(reached) or _source(reached)
        waiting += _used_in(text)
    return found


@cache
def _used_in(text: str) -> frozenset[str]:
    """Return the helpers and functions that a source names. Most helpers are within reach of many functions."""
    helpers = frozenset(_WORD.findall(text)) & _helpers().keys()
    # A function may call another one.
    return helpers | (frozenset(_USE.findall(text)) & FUNCTIONS.keys())


@cache
def _helpers() -> dict[str, str]:
    """Return the declarations that all functions share, by name. Helpers in one block share its needs."""
    found = {match[1]: match[0] for shared in SHARED for match in _FUNCTION.finditer(_source(shared))}
    for shared in SHARED:
        for block in _BLOCK.findall(_source(shared)):
            found.update(dict.fromkeys(_IN_BLOCK.findall(block), block))
    return found


@cache
def _source(name: str) -> str:
    return _COMMENT.sub("", source_of(name))


CONNECTION = ("ping", "client|id", "client|setname", "client|setinfo", "cluster|slots")
ROUTING = ("command", "cluster|shards", "cluster|slots")
"""Requests that client libraries of a Cluster send first: static tables, and the location of slots."""

_OWN_STREAM = (
    "xack", "xclaim", "xdel", "xgroup|create", "xgroup|createconsumer", "xgroup|delconsumer", "xinfo|consumers",
    "xinfo|groups", "xpending", "xrange", "xreadgroup",
)  # fmt: skip
"""The commands that a consumer may use on the streams that it serves, and on no others."""


@dataclass(frozen=True)
class Grant:
    """Commands, with the keys outside or inside partitions on which they may be used.

    Keys are written as in ACL rules, with `{namespace}` and `{base}` (a partition's) in them.
    """

    commands: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class User:
    name: str
    can: str
    """Its purpose, in one sentence."""
    cannot: str
    """What an attacker with its password still cannot do."""
    functions: tuple[str, ...] = ()
    across_partitions: tuple[str, ...] = ()
    """Functions that it calls if a namespace has several partitions."""
    commands: tuple[str, ...] = ()
    """Commands that it sends itself."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    """Commands that it may not use on all of its keys: its functions run them only on keys that a grant names, or only
    with arguments that it never passes."""
    serves: tuple[str, ...] = ()
    """Work streams that it reads. It may append to other streams if its functions do."""
    leads: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()
    loads_functions: bool = False
    """Whether it may load functions, which others then run with their own rights."""
    waits_for_durability: bool = False
    connection: tuple[str, ...] = CONNECTION
    """Commands about its own connection."""
    everything: bool = False
    """Whether it has every right."""
    public_password: str = ""
    """A password that is not secret."""

    def called(self, partitions: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.functions + (self.across_partitions if partitions > 1 else ())))

    def root_commands(self, partitions: int) -> list[str]:
        """Commands that it may use on all of its keys."""
        found = set(self.commands)
        for name in self.called(partitions):
            found |= function_rights(name).commands
        if self.functions:
            found |= {"fcall", "function|list", "info", "time", "hget", "hmget"}
        if self.loads_functions:
            found.add("function|load")
        if self.waits_for_durability:
            found |= {"wait", "waitaof"}
        found -= {*(_OWN_STREAM if self.serves else ()), *self.never}
        return sorted(found | set(self.connection))

    def keys(self, partitions: int) -> tuple[list[str], list[str]]:
        """Keys of a partition that it only reads, and those that it also writes: the most used first."""
        reads, writes = set(self.reads), set(self.writes)
        for name in self.called(partitions):
            rights = function_rights(name)
            reads |= rights.reads
            writes |= rights.writes
        if "leader:" in writes:
            writes -= {"leader:", "leader:admit"}
            writes |= {f"leader:{role}" for role in self.leads}
        elif "leader:admit" in writes:
            # Only an admitter names the epoch under which a submit is checked against this key.
            writes.discard("leader:admit")
        writes |= set(self.serves)
        return sorted(reads - writes, key=_often_used), sorted(writes, key=_often_used)

    def selectors(self) -> list[Grant]:
        """Commands that it may use on some keys only."""
        found = []
        if self.serves:
            own = tuple(pattern for stream in self.serves for pattern in (f"~{{base}}{stream}", f"~{{base}}{stream}:*"))
            found += [Grant(_OWN_STREAM, own), Grant(("xrange",), ("%R~{base}undelivered",))]
        if self.functions:
            # Every process recreates a missing group of the record stream, and the namespace's settings.
            if self.serves:
                found.append(Grant(("xgroup|create", "xinfo|groups"), ("~{base}record",)))
            found.append(Grant(("hsetnx",), ("~{namespace}:settings",)))
        return found + list(self.grants)


KEYS = tuple(
    sorted(
        {
            "answers",
            "answers:",
            "api-keys",
            "functions",
            "leader:admit",
            "leader:keep",
            "leader:record",
            "manifests",
            "publishers",
            "served",
        }
        | {key for name in FUNCTIONS for key in function_rights(name).reads | function_rights(name).writes}
        - {"leader:"}
    )
)
"""Every key of a partition."""

_USED_OFTEN = ("task:", "alive", "agent", "tool", "meta", "run:", "record", "out:", "inst:", "timers", "interleaved")


def _often_used(key: str) -> tuple[int, str]:
    """Return the sort key of patterns, most used first: a server compares a key with one pattern after another."""
    return (_USED_OFTEN.index(key) if key in _USED_OFTEN else len(_USED_OFTEN), key)


_CONSUMER = ("adopt", "beat", "dead_letter", "leave", "promote", "retry", "subscribe")
_CALLED = ("commit_call", "progress")
_SUBMITS = ("claim", "refuse", "submit", "unclaim")
_CLIENT = (
    *_SUBMITS, "cancel", "create_node", "erase", "fork", "idle", "keep_letter", "node", "publish", "put_state",
    "schedule", "send_message", "signal", "subscribe", "write_marker", "unsubscribe", "watch", "withdraw_request",
)  # fmt: skip
_TURNS = (
    "ask", "begin_call", "begin_turn", "commit_turn", "emit", "load", "record", "refill", "restart_output",
    "settle_call", "stream", "take_slots",
)  # fmt: skip
_ANNOUNCED = ("agents", "end_hooks", "functions", "interleaved", "manifests", "served", "tools", "topics")
_HANDLER_COMMANDS = (
    "hdel", "hexists", "hgetall", "hkeys", "hset", "hsetnx", "hvals", "xadd", "xlen", "zrange",
)  # fmt: skip
_HANDLER_READS = ("places", "run:", "stopped", "task:", "undelivered")
_HANDLER_WRITES = (*_ANNOUNCED, "dead", "quarantine", "started")
_NO_HANDLER_CAN = (
    "take or read the work of another service, read dead letters or the record, change settings or schedules, lead, "
    "load functions, list keys"
)
_ADMITS = Grant(
    ("del", "exists", "fcall", "xack", "xadd", "xautoclaim", "xclaim", "xdel", "xgroup|create", "xinfo|groups",
     "xinfo|stream", "xlen", "xpending", "xrange", "xreadgroup"),
    ("~{namespace}:tasks", "~{namespace}:tasks:*"),
)  # fmt: skip
_CLIENT_COMMANDS = (
    "del", "exists", "expire", "hexists", "hgetall", "hkeys", "hvals", "xadd", "xgroup|create", "xinfo|groups",
    "xinfo|stream", "xlen", "xpending", "xrange", "xread", "xrevrange", "xtrim", "zcard", "zcount", "zrange",
    "zrangebyscore", "zscore",
)  # fmt: skip
_CLIENT_READS = (
    *_ANNOUNCED, "alive", "engines", "group:", "index", "index:", "inst:", "leader:admit", "node:", "nodes:", "open",
    "open:", "out:", "places", "run:", "scheduled", "schedules", "states", "stopped", "task:", "topics", "undelivered",
)  # fmt: skip


_OUTPUT = Grant(("dump", "memory|usage", "restore"), ("~{base}out:*",))
"""What a turn that asks a person does with the task's output stream."""


def _handler(name: str, can: str, stream: str, functions: tuple[str, ...], grants: tuple[Grant, ...] = ()) -> User:
    return User(
        name,
        can,
        _NO_HANDLER_CAN,
        functions=(*_CONSUMER, *functions),
        across_partitions=(*_SUBMITS, "keep_letter"),
        commands=_HANDLER_COMMANDS,
        reads=_HANDLER_READS,
        writes=_HANDLER_WRITES,
        never=tuple(command for grant in grants for command in grant.commands),
        serves=(stream,),
        grants=grants,
    )


SERVICES = (
    _handler(
        "agent-handler",
        "runs turns of agents: takes work from `agent` streams and commits it",
        "agent",
        _TURNS,
        (_OUTPUT,),
    ),
    _handler(
        "tool-handler",
        "runs tools: takes calls from `tool` streams and commits their results",
        "tool",
        (*_CALLED, "mark_started", "refill", "take_slots"),
    ),
    *(
        _handler(
            f"{engine}-gateway",
            f"runs engine steps: takes them from `{engine}` streams and commits their results",
            engine,
            (*_CALLED, "announce_engine"),
        )
        for engine in ("ray", "spark")
    ),
    User(
        "state-manager",
        "admits commands, relays answers, keeps timers, sweeps and measures",
        "take work, read or write other namespaces (other than writing and deleting answers in `…:answers…`), "
        "change the server",
        functions=(
            "answer_request", "beat", "cancel", "claim", "due_requests", "expire_call", "gateways", "keep_letter",
            "lead", "leave", "measure_backlog", "publish", "read_ingress", "recount_letters", "refill", "refuse",
            "repeat_request", "schedule", "signal", "submit", "subscribe", "trim", "trim_letters", "unclaim",
            "unsubscribe", "write_marker",
        ),
        commands=(
            "exists", "hdel", "hexists", "hgetall", "hincrby", "hkeys", "hset", "hvals", "lrange", "lrem", "xadd",
            "xdel", "xgroup|create", "xgroup|setid", "xinfo|consumers", "xinfo|groups", "xinfo|stream", "xlen",
            "xpending", "xrange", "xread", "xrevrange", "zadd", "zcard", "zcount", "zmscore", "zrange",
            "zrangebyscore", "zrem", "zscan", "zscore",
        ),
        reads=(*_ANNOUNCED, "gateways", "leader:record", "places", "publishers", "run:"),
        writes=(
            "answers", "answers:", "asks", "dead", "engines", "index", "index:", "indexes", "meta", "quarantine",
            "record", "replies", "requests", "scheduled", "schedules", "seen", "seen_order", "served", "timers",
            *STREAMS,
        ),
        never=("xclaim",),  # of `leave`: it holds no work
        leads=("admit", "keep"),
        grants=(_ADMITS, Grant(("expire", "xadd", "xdel"), ("%W~*:answers*",))),
        loads_functions=True,
        waits_for_durability=True,
    ),
    User(
        "trajectory-recorder",
        "copies the record stream into the trajectory store",
        "read or write tasks, take work, append to any stream",
        functions=("beat", "lead", "leave", "trim"),
        commands=("xgroup|create", "xgroup|setid", "xinfo|groups", "xinfo|stream", "xrange", "xread", "xrevrange"),
        writes=("record",),
        never=("xclaim", "xpending"),  # of `leave`: it holds no work
        leads=("record",),
        loads_functions=True,
    ),
)  # fmt: skip
"""The services: each has a user with its own name."""

OPERATOR = User(
    "operator",
    "runs the command `weft`: reads everything in the namespace, cancels, answers, repairs, redrives",
    "change the server or its users, disconnect or pause clients, write outside the namespace",
    functions=(
        *_CLIENT, "drop_agent", "drop_letter", "free_instance", "gateways", "read_ingress", "redrive", "repair",
        "measure_backlog",
    ),
    commands=(
        *_CLIENT_COMMANDS, "command|info", "function|delete", "llen", "lrange", "scan", "type", "xinfo|consumers",
        "zrevrange",
    ),
    reads=KEYS,
    writes=("api-keys", "publishers", "reply:", "tenants"),
    grants=(
        Grant(("del", "exists", "fcall", "xadd", "xinfo|groups", "xinfo|consumers", "xinfo|stream", "xlen", "xpending",
               "xrange"),
              ("~{namespace}:tasks", "~{namespace}:tasks:*")),
        Grant(("xgroup|create",), ("~{base}record",)),
    ),
    loads_functions=True,
    waits_for_durability=True,
)  # fmt: skip
CLIENT = User(
    "client",
    "is a trusted program with the Python client: submits, reads results and streams, cancels, answers, schedules",
    "take work, load functions, list keys, change the server or its users",
    functions=_CLIENT,
    commands=_CLIENT_COMMANDS,
    reads=_CLIENT_READS,
    writes=("reply:",),
    grants=(Grant(("xgroup|create", "xrange"), ("~{base}record",)),),
    waits_for_durability=True,
)
GATEWAY = User(
    "gateway",
    "offers tasks over HTTP: submits, forks, reads tasks and their streams, cancels, answers, schedules, redrives and "
    "drops dead letters, reads the digests of API keys, measures streams",
    "create keys, register publishers, take work, load functions, list keys, change the server or its users",
    functions=(
        *_SUBMITS,
        "cancel",
        "drop_letter",
        "fork",
        "gateways",
        "idle",
        "redrive",
        "schedule",
        "send_message",
        "signal",
        "watch",
    ),
    commands=(*_CLIENT_COMMANDS, "xinfo|consumers"),
    # What the console's page of the system shows, too.
    reads=(
        *_CLIENT_READS,
        "api-keys",
        "asks",
        "dead",
        "leader:keep",
        "leader:record",
        "limited",
        "meta",
        "publishers",
        "quarantine",
        "queues",
        "record",
        "replies",
        "timers",
        *STREAMS,
    ),
    writes=("reply:",),
    grants=(
        *CLIENT.grants,
        Grant(
            ("xadd", "xinfo|groups", "xinfo|stream", "xlen", "xpending", "xrange"),
            ("~{namespace}:tasks", "~{namespace}:tasks:*"),
        ),
    ),
    waits_for_durability=True,
)
RUNTIME = User(
    "runtime",
    "is a trusted program that also hosts agents itself: `Runtime`, AutoGen, runners on Ray",
    "write outside the namespace, change the server or its users",
    functions=(*_CLIENT, *_CONSUMER, *_TURNS, *_CALLED, "expire_call", "gateways", "lead", "mark_started", "trim"),
    commands=(
        *_CLIENT_COMMANDS, "hdel", "hset", "hsetnx", "lrange", "lrem", "scan", "xack", "xgroup|createconsumer",
        "xgroup|setid", "xreadgroup", "zadd", "zrem", "zscan",
    ),
    reads=_CLIENT_READS,
    writes=(*_ANNOUNCED, "dead", "index", "quarantine", "record", "reply:", "seen", "seen_order", "started", *STREAMS),
    leads=("admit", "keep"),
    loads_functions=True,
    waits_for_durability=True,
)  # fmt: skip
PUBLISHER = User(
    "publisher",
    "is a trusted program in any language that appends commands to `{namespace}:tasks`, for one trust domain",
    "read anything, delete keys or entries, pause or disconnect clients. It can trim the commands of others with "
    "`MAXLEN` and end the stream with the largest id: do not give it to tenants",
    commands=ROUTING,
    grants=(Grant(("xadd",), ("%W~{namespace}:tasks",)),),
)
SCALER = User(
    "scaler",
    "reads the lengths and lags of streams, for KEDA",
    "read an entry or any other key, write anything, pause or disconnect clients",
    commands=(*ROUTING, "info"),
    grants=(
        Grant(
            ("xinfo|groups", "xlen", "xpending"),
            ("%R~{namespace}:tasks", *(f"%R~{{base}}{stream}{end}" for stream in STREAMS for end in ("", ":*"))),
        ),
    ),
)
METRICS = User(
    "metrics",
    "reads the server's own statistics, for an exporter of Redis metrics",
    "touch any key, see what clients send, change anything",
    commands=("cluster|info", "info", "latency|histogram", "latency|latest", "slowlog|len"),
)
PROBE = User(
    "probe",
    "checks whether the server is up; its password is not secret",
    "do anything else",
    connection=("ping",),
    public_password="probe",  # noqa: S106 - it is not secret
)
ADMIN = User("admin", "is for people and for Redis Cluster's own joins", "", everything=True)

USERS = {
    user.name: user
    for user in (*SERVICES, OPERATOR, CLIENT, GATEWAY, RUNTIME, PUBLISHER, SCALER, METRICS, PROBE, ADMIN)
}
"""All users by name, except `default`: see rules.py."""


def own_publisher(name: str) -> User:
    """Return the user of an untrusted publisher: its own ingress stream, and streams for its answers."""
    return User(
        name,
        f"appends commands to `{{namespace}}:tasks:{name}`, and reads and deletes its answers in `{name}:answers…`",
        "touch commands, answers or tasks of others. It can harm only its own stream",
        commands=ROUTING,
        grants=(
            Grant(("xadd",), (f"%W~{{namespace}}:tasks:{name}",)),
            Grant(("del", "xdel", "xlen", "xrange", "xread", "xrevrange", "xtrim"), (f"~{name}:answers*",)),
        ),
    )
