"""Who is meant: an agent by type and key, a topic by type and source; and how they are written on the broker.

Any type and key has one name there, and each name one type and key. Weft's agent names hold letters, digits and
`_.-` only, so other characters of a type are escaped behind the prefix `x--`; keys hold anything but control
characters, so only those are percent-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from runtime_core.actors.errors import InvalidName
from runtime_core.declare.declaration import NAME
from runtime_core.ids import MAX_NAME_CHARACTERS, fingerprint

_AGENT_TYPE = re.compile(r"[\w\-.]+")
_TOPIC_TYPE = re.compile(r"[\w\-.:=]+")

_ESCAPED = "x--"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")
_POOL_CHARACTERS = 64

_NO_KEY = "%-"
"""How the empty key is written: the core reads an empty key as "no instance"."""
_KEY_ESCAPES = re.compile("[%\x00-\x1f\x7f-\x9f]")


class Address(Protocol):
    """An agent's type and key, whatever the class that holds them."""

    @property
    def type(self) -> str: ...

    @property
    def key(self) -> str: ...


class Topic(Protocol):
    """A topic's type and source, whatever the class that holds them."""

    @property
    def type(self) -> str: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class AgentType:
    """A registered type of agents."""

    type: str


@dataclass(frozen=True, slots=True, init=False)
class AgentId:
    """One agent: `type` names what was registered, `key` the instance. Raises InvalidName."""

    type: str
    key: str

    def __init__(self, type: str | AgentType, key: str) -> None:
        name = type.type if isinstance(type, AgentType) else type
        object.__setattr__(self, "type", checked_agent_type(name))
        object.__setattr__(self, "key", _text("key", key))

    def __str__(self) -> str:
        return f"{self.type}/{self.key}"

    @classmethod
    def from_str(cls, agent_id: str) -> AgentId:
        """From `type/key`. Raises InvalidName where there is no slash."""
        return cls(*_split("agent_id", agent_id))


@dataclass(frozen=True, slots=True, init=False)
class TopicId:
    """One topic: `type` is what subscriptions match, `source` becomes the key of who gets it. Raises InvalidName."""

    type: str
    source: str

    def __init__(self, type: str, source: str) -> None:
        if not isinstance(type, str) or not _TOPIC_TYPE.fullmatch(type):
            raise InvalidName("topic.type", f"{type!r} cannot be used: write letters, digits, and _ - . : =")
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "source", _text("topic.source", source))

    def __str__(self) -> str:
        return f"{self.type}/{self.source}"

    @classmethod
    def from_str(cls, topic_id: str) -> TopicId:
        """From `type/source`. Raises InvalidName where there is no slash."""
        return cls(*_split("topic_id", topic_id))


def checked_agent_type(type: object) -> str:
    """The type, if it may be one. Raises InvalidName."""
    if not isinstance(type, str) or not _AGENT_TYPE.fullmatch(type):
        raise InvalidName("type", f"{type!r} cannot be an agent's type: write letters, digits, and _ - .")
    return type


def agent_name(type: str) -> str:
    """The agent name on the broker. Raises InvalidName for a type too long for one."""
    if NAME.fullmatch(type) and not type.startswith(_ESCAPED):
        return type
    name = _ESCAPED + "".join(
        character if character in _PLAIN else "".join(f"_{byte:02x}" for byte in character.encode())
        for character in type
    )
    if not NAME.fullmatch(name):
        raise InvalidName("type", f"{type!r} is too long: at most 128 characters, other scripts count several times")
    return name


def type_of(name: str) -> str:
    """The type whose agent name this is."""
    if not name.startswith(_ESCAPED):
        return name
    escaped = name[len(_ESCAPED) :]
    return re.sub(r"(?:_[0-9a-f]{2})+", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(), escaped)


def instance_key(key: str) -> str:
    """The instance key on the broker. Raises InvalidName for a key too long for one."""
    if not key:
        return _NO_KEY
    written = _KEY_ESCAPES.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), key)
    if written.startswith("~"):  # keys that begin so are the core's own
        written = "%7E" + written[1:]
    if len(written) > MAX_NAME_CHARACTERS:
        raise InvalidName("key", f"is {len(written)} characters long as it is written: at most {MAX_NAME_CHARACTERS}")
    return written


def key_of(written: str) -> str:
    """The key whose instance key this is."""
    if written == _NO_KEY:
        return ""
    return re.sub(r"(?:%[0-9A-F]{2})+", lambda found: bytes.fromhex(found[0].replace("%", "")).decode(), written)


def pool_of(name: str) -> str:
    """The pool of a type: each has a work stream of its own, so that a process reads only what it can run."""
    return name if len(name) <= _POOL_CHARACTERS else f"{name[:40]}.{fingerprint(name)}"


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidName(field, f"{value!r} is not a text")
    return value


def _split(field: str, text: str) -> tuple[str, str]:
    type, slash, rest = text.partition("/")
    if not slash:
        raise InvalidName(field, f"{text!r} has no slash: write it as type/key")
    return type, rest
