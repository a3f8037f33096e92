"""Turns the table of users into ACL rules for one kind of server, with the digests of a file of passwords."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime_core.bus.acl.users import KEYS, USERS, Grant, User, own_publisher
from runtime_core.errors import ConfigurationError

_LINE = re.compile(r"(?:([A-Z0-9_]+)_PASSWORD=(\S+)|[A-Z0-9_]+=.*)")


def digests(files: Sequence[Path], users: Iterable[str]) -> dict[str, list[str]]:
    """Return the SHA-256 of each user's password in every file; add a missing password to the first file.

    With two files both passwords are valid, while one replaces the other. Raises ConfigurationError.
    """
    if not files:
        return {}
    kept = [_read(file, may_be_missing=file == files[0]) for file in files]
    missing = [user for user in users if _name(user) not in kept[0]]
    if missing:
        kept[0] |= _add(files[0], missing)
    return {
        user: [hashlib.sha256(found[_name(user)].encode()).hexdigest() for found in kept if _name(user) in found]
        for user in users
    }


def _name(user: str) -> str:
    return user.replace("-", "_").upper()


def _read(file: Path, *, may_be_missing: bool) -> dict[str, str]:
    if may_be_missing and not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigurationError(
                f"{file}, line {number}: write AGENT_HANDLER_PASSWORD=… for the user agent-handler"
            )
        if match[1]:
            found[match[1]] = match[2]
    return found


def _add(file: Path, users: Iterable[str]) -> dict[str, str]:
    made = {_name(user): secrets.token_hex(24) for user in users}
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
        opened.writelines(f"{name}_PASSWORD={password}\n" for name, password in made.items())
    return made


LATER = {"client|setinfo": 7.2, "waitaof": 7.2}
"""Commands that Redis 7.0 does not know: it refuses a whole ACL file that contains one."""
SERVERS = {
    "redis-7.0": 7.0,
    "redis-7.2": 7.2,
    "redis-7.4": 7.4,
    "redis-8": 8.0,
    "valkey-7.2": 7.2,
    "valkey-8": 8.0,
    "valkey-9": 9.0,
}
DEFAULT_OFF = "user default off resetpass sanitize-payload ~* &* +@all"
"""Servers replay their append-only file as this user and drop forbidden commands, so it is off but keeps its rights."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_WORDS = re.compile(r"\([^)]*\)|\S+")
_GLOB = re.compile(r"([*?\[\]\\])")


@dataclass(frozen=True)
class Target:
    """The server and namespace for the rules."""

    namespace: str = "weft"
    partitions: int = 1
    database: int = 0
    lacks: frozenset[str] = frozenset()
    """Commands that the server does not know."""
    reads_config: bool = False
    """Whether services that wait for fsync must read `appendfsync`, as on Valkey."""


def lacking(server: str) -> frozenset[str]:
    """Return the commands of the table that this kind of server, such as `redis-7.0`, does not know."""
    return frozenset(command for command, since in LATER.items() if since > SERVERS[server])


def find_users(names: Iterable[str], publishers: Iterable[str]) -> list[User]:
    """Return users by name, and publishers with their own streams. Raises ConfigurationError."""
    found = []
    for name in names:
        if name not in USERS:
            raise ConfigurationError(f"there is no user {name!r}; there are {', '.join(USERS)}")
        found.append(USERS[name])
    for name in publishers:
        if not _NAME.fullmatch(name) or name in USERS or name == "default":
            raise ConfigurationError(
                f"a publisher cannot be named {name!r}: use small letters, digits, - and _, and none of"
                f" {', '.join(USERS)}"
            )
        found.append(own_publisher(name))
    return found


def user_line(user: User, target: Target, digests: Iterable[str]) -> str:
    """Return a user's line for an ACL file. `digests` are SHA-256 of passwords, in hexadecimal."""
    return f"user {user.name} {' '.join(rules(user, target, digests))}"


def as_command(line: str) -> str:
    """Return a line of an ACL file as a command for redis-cli."""
    _, name, *words = _WORDS.findall(line)
    return " ".join(["ACL SETUSER", name, *(f'"{word}"' if word.startswith("(") else word for word in words)])


def rules(user: User, target: Target, digests: Iterable[str]) -> list[str]:
    """Return a user's rules as arguments of ACL SETUSER; they begin with `reset`."""
    passwords = [f">{user.public_password}"] if user.public_password else [f"#{digest}" for digest in digests]
    words = ["reset", "on", *passwords]
    if user.everything:
        return [*words, "~*", "&*", "+@all"]
    commands = user.root_commands(target.partitions)
    if target.database:
        commands.append("select")
    if user.waits_for_durability and target.reads_config:
        commands.append("config|get")
    words += [*_key_rules(user, target), *_command_rules(commands, target)]
    for grant in user.selectors():
        words.append(f"({' '.join([*_grant_keys(grant, target), *_command_rules(grant.commands, target)])})")
    return words


def _key_rules(user: User, target: Target) -> list[str]:
    if not user.functions:
        return []
    reads, writes = user.keys(target.partitions)
    # A server compares each key of each command with one pattern after another, on the path of every task. So if all
    # keys with one first letter are granted, they share a pattern.
    letters = sorted({key[0] for key in KEYS} - {key[0] for key in KEYS if key not in writes})
    if len(letters) == 1:
        letters = []
    several = [f"[{''.join(letters)}]*"] if letters else []
    found = [f"~{base}{pattern}" for base in _bases(target) for pattern in ("", *several)]
    for base in _bases(target):
        found += [f"~{base}{pattern}" for key in writes if key[0] not in letters for pattern in _patterns(key)]
        found += [f"%R~{base}{pattern}" for key in reads for pattern in _patterns(key)]
    return [*found, f"%R~{_literal(target.namespace)}:settings"]


def _grant_keys(grant: Grant, target: Target) -> list[str]:
    found = []
    for key in grant.keys:
        named = key.replace("{namespace}", _literal(target.namespace))
        found += [named.replace("{base}", base) for base in _bases(target)] if "{base}" in named else [named]
    return found


def _command_rules(commands: Iterable[str], target: Target) -> list[str]:
    return [f"+{command}" for command in dict.fromkeys(commands) if command not in target.lacks]


def _patterns(key: str) -> tuple[str, ...]:
    if key.endswith(":"):
        return (f"{key}*",)
    return (key, f"{key}:*") if key in ("agent", "tool", "ray", "spark") else (key,)


def _bases(target: Target) -> list[str]:
    """Return the key prefixes of partitions as patterns with `?` per digit: `*` would cost the server more for every
    key."""
    digits = len(str(target.partitions - 1))
    return [f"{_literal(target.namespace)}:{{{'?' * count}}}:" for count in range(1, digits + 1)]


def _literal(text: str) -> str:
    """Return text as a pattern that matches only this text."""
    return _GLOB.sub(r"\\\1", text)
