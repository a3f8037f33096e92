"""The commands and keys that each function of the bus may use, read from its Lua source.

A server checks the caller's rights inside a function too. A function that lacks one right stops halfway, and nothing is
rolled back. So the rights err on the high side: they cover every command and key in the function and in all helpers
that it can call.
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
_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
_KEY = re.compile(r"(?:base|keys\[1\]) \.\. '([\w:]+)'")
_READ = re.compile(r"redis\.p?call\('(\w+)', (?:'[A-Z]+', )?(?:base|keys\[1\]) \.\. '([\w:]+)'")
_OTHER_KEY = re.compile(r"(?:base|keys\[1\]) \.\. (?!')")
_SUBCOMMANDS = ("XGROUP", "XINFO")

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
    """Return the source of a function's file and of all helpers that it uses, also indirectly, by name."""
    helpers = _helpers()
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        reached = waiting.pop()
        if reached in found:
            continue
        found[reached] = text = helpers.get(reached) or _source(reached)
        # A function may call another one.
        waiting += [
            word for word in _WORD.findall(text) if word in helpers or (word in FUNCTIONS and f"{word}(" in text)
        ]
    return found


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
