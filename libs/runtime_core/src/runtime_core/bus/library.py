"""Assembles the functions of the bus into one library: a file each, after the helpers in `functions/shared/`.

The names of the library and its functions contain a digest of the source, so that two versions of Weft, or two
programs, on one server never replace each other's functions.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_FOLDER = files("runtime_core.bus") / "functions"
_REFUSED_WHEN_FULL = frozenset(
    {"claim", "create_node", "fork", "publish", "put_state", "redrive", "submit", "subscribe"}
)
"""Functions that may not run at `maxmemory`: they start work. Those that finish it must run, since it frees memory."""
FUNCTIONS = {
    name: name not in _REFUSED_WHEN_FULL
    for name in sorted(file.name.removesuffix(".lua") for file in _FOLDER.iterdir() if file.name.endswith(".lua"))
}
"""The functions, one in each file, and whether they may run at `maxmemory`."""

FIELDS = "fields"
"""The file that names fields. The library contains their values instead, so a name costs nothing at run time."""
SHARED = (
    FIELDS,
    "text",
    "hashes",
    "clock",
    "owners",
    "ids",
    "streams",
    "tasks",
    "turns",
    "slots",
    "circles",
    "journal",
    "output",
    "rows",
    "mailbox",
    "inbox",
    "requests",
    "limits",
    "hooks",
    "reopening",
    "ends",
    "letters",
    "messages",
    "engines",
    "calls",
    "checks",
    "deliveries",
    "withdrawals",
    "parts",
    "nodes",
    "claims",
    "queues",
)
"""Files in `functions/shared/`, in the order of assembly: a file uses only names of earlier files."""


@dataclass(frozen=True, slots=True)
class Library:
    """One library: its source, and the names of its functions on the server by their short names."""

    name: str
    source: bytes
    functions: dict[str, bytes]


@cache
def library() -> Library:
    """Read and assemble the source once per process."""
    sources = {name: source_of(name) for name in (*SHARED, *FUNCTIONS)}
    digest = hashlib.sha256("\n".join(sources.values()).encode()).hexdigest()[:8]
    functions = {name: f"weft_{digest}_{name}" for name in FUNCTIONS}
    fields = named_fields(sources.pop(FIELDS))
    sources = {name: _with_values(source, fields) for name, source in sources.items()}
    used = {name: frozenset(re.findall(r"\w+", source)) for name, source in sources.items()}
    files_with = Counter(word for words in used.values() for word in words)
    several = frozenset(word for word, count in files_with.items() if count > 1)
    shared = {name: _shared(sources[name], several) for name in SHARED if name != FIELDS}
    calls = {name: _calls(sources[name]) for name in FUNCTIONS}
    called = [name for name in FUNCTIONS if any(name in names for other, names in calls.items() if other != name)]
    scoped = {}
    for name, allow_oom in FUNCTIONS.items():
        flags = ", flags = {'allow-oom'}" if allow_oom else ""
        register = f"redis.register_function{{function_name = '{functions[name]}', callback = {name}{flags}}}"
        scoped[name] = _scoped(name, sources[name], register, name in called)
    groups = _groups({name: names for name, (names, _) in shared.items()}, used)
    body = [f"local {name}" for name in called]
    body += [_declared(*shared[name]) for name in shared if name not in groups]
    for name, users in groups.items():
        body += ["do", _declared(*shared[name]), *(scoped.pop(user) for user in users), "end"]
    body += scoped.values()
    source = f"#!lua name=weft_{digest}\n" + "\n".join(body) + "\n"
    return Library(f"weft_{digest}", source.encode(), {name: full.encode() for name, full in functions.items()})


def source_of(name: str) -> str:
    """Return the text of a Lua file, of a function or shared."""
    return ((_FOLDER / "shared" if name in SHARED else _FOLDER) / f"{name}.lua").read_text("utf-8")


def named_fields(source: str) -> dict[str, dict[str, str]]:
    """Return the values in `fields.lua`, by table and name."""
    tables = re.findall(r"^local ([A-Z]+) = \{(.*?)\}$", source, re.MULTILINE | re.DOTALL)
    return {table: dict(re.findall(r"\b(\w+) = '([^']*)'", entries)) for table, entries in tables}


def _with_values(source: str, fields: dict[str, dict[str, str]]) -> str:
    """Put values in place of names such as `RUN.current`. Raises KeyError for a name that does not exist."""
    return re.sub(rf"\b({'|'.join(fields)})\.(\w+)", lambda found: f"'{fields[found[1]][found[2]]}'", source)


def _calls(source: str) -> set[str]:
    """Return the names that a file calls, without what its comments mention."""
    code = "\n".join(re.findall(r"^[^-\n]*", source, re.MULTILINE))
    return set(re.findall(r"(?<![\w.])(\w+)\(", code))


def _groups(exported: dict[str, list[str]], used: dict[str, frozenset[str]]) -> dict[str, list[str]]:
    """Return shared files that only functions use, each with these functions. A function is in at most one group.

    Each group gets its own block, since Lua allows 200 local names at a time at the top of a script.
    """
    groups: dict[str, list[str]] = {}
    grouped: set[str] = set()
    # First the largest, which save most.
    for name in sorted(exported, key=lambda name: -len(exported[name])):
        users = [other for other, words in used.items() if other != name and not words.isdisjoint(exported[name])]
        if users and grouped.isdisjoint(users) and all(user in FUNCTIONS for user in users):
            groups[name] = users
            grouped.update(users)
    return groups


def _shared(source: str, several: frozenset[str]) -> tuple[list[str], str]:
    """Return the names that several files use, and the source in a block, which keeps all other names."""
    outside: list[str] = []

    def declared(found: re.Match[str]) -> str:
        names = found[2].split(", ")
        if several.isdisjoint(names):
            return found[0]
        outside.extend(names)
        return f"{found[1] or ''}{found[2]}{found[3]}"

    source = re.sub(r"^local (function )?(\w+(?:, \w+)*)(\(| =)", declared, source, flags=re.MULTILINE)
    return outside, f"do\n{source}\nend"


def _declared(names: list[str], block: str) -> str:
    return f"local {', '.join(names)}\n{block}" if names else block


def _scoped(name: str, source: str, register: str, called: bool) -> str:
    """Keep a function's names to its file. Only a function that another one calls has its name outside."""
    if called:
        source = source.replace(f"local function {name}(", f"function {name}(", 1)
    return f"do\n{source}\n{register}\nend"
