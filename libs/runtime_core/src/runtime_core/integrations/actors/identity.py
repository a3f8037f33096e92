"""Identities: an agent by type and key, a topic by type and source; and their names on the broker.

The mapping is one to one. Weft's agent names contain only letters, digits and `_.-`, so other characters of a type are
escaped after the prefix `x--`. Keys contain anything but control characters, so only those are percent-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from runtime_core.declare.declaration import NAME
from runtime_core.integrations.actors.errors import InvalidName
from runtime_core.wire.ids import MAX_NAME_CHARACTERS, fingerprint

_AGENT_TYPE = re.compile(r"[\w\-.]+")
_TOPIC_TYPE = re.compile(r"[\w\-.:=]+")

_ESCAPED = "x--"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")
_POOL_CHARACTERS = 64

_NO_KEY = "%-"
"""The empty key on the broker: an empty instance key would mean no instance."""
_KEY_ESCAPES = re.compile("[%\x00-\x1f\x7f-\x9f]")


class Address(Protocol):
    """An agent's type and key, of any class."""

    @property
    def type(self) -> str: ...

    @property
    def key(self) -> str: ...


class Topic(Protocol):
    """A topic's type and source, of any class."""

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
    """One agent: `type` is its registered type, `key` its instance. Raises InvalidName."""

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
        """Parse `type/key`. Raises InvalidName if there is no slash."""
        return cls(*_split("agent_id", agent_id))


@dataclass(frozen=True, slots=True, init=False)
class TopicId:
    """One topic: subscriptions match its `type`; `source` is the key of the receiving agent. Raises InvalidName."""

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
        """Parse `type/source`. Raises InvalidName if there is no slash."""
        return cls(*_split("topic_id", topic_id))


def checked_agent_type(type: object) -> str:
    """Return the type if it is valid. Raises InvalidName."""
    if not isinstance(type, str) or not _AGENT_TYPE.fullmatch(type):
        raise InvalidName("type", f"{type!r} cannot be an agent's type: write letters, digits, and _ - .")
    return type


def agent_name(type: str) -> str:
    """Return the agent name on the broker. Raises InvalidName if the type is too long."""
    if NAME.fullmatch(type) and not type.startswith(_ESCAPED):
        return type
    name = _ESCAPED + "".join(
        character if character in _PLAIN else "".join(f"_{byte:02x}" for byte in character.encode())
        for character in type
    )
    if not NAME.fullmatch(name):
        raise InvalidName("type", f"{type!r} is too long: at most 128 characters; other scripts take several each")
    return name


def type_of(name: str) -> str:
    """Return the type with this agent name."""
    if not name.startswith(_ESCAPED):
        return name
    escaped = name[len(_ESCAPED) :]
    return re.sub(r"(?:_[0-9a-f]{2})+", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(), escaped)


def instance_key(key: str) -> str:
    """Return the instance key on the broker. Raises InvalidName if the key is too long."""
    if not key:
        return _NO_KEY
    written = _KEY_ESCAPES.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), key)
    if written.startswith("~"):  # such keys are Weft's own
        written = "%7E" + written[1:]
    if len(written) > MAX_NAME_CHARACTERS:
        raise InvalidName("key", f"is {len(written)} characters long when escaped: at most {MAX_NAME_CHARACTERS}")
    return written


def key_of(written: str) -> str:
    """Return the key with this instance key."""
    if written == _NO_KEY:
        return ""
    return re.sub(r"(?:%[0-9A-F]{2})+", lambda found: bytes.fromhex(found[0].replace("%", "")).decode(), written)


def pool_of(name: str) -> str:
    """Return the pool of a type. Each type has its own work stream, so a process reads only what it can run."""
    return name if len(name) <= _POOL_CHARACTERS else f"{name[:40]}.{fingerprint(name)}"


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidName(field, f"{value!r} is not a string")
    return value


def split(address: str) -> tuple[str, str]:
    """Split `type/rest`."""
    type, _, rest = address.partition("/")
    return type, rest


def _split(field: str, text: str) -> tuple[str, str]:
    type, slash, rest = text.partition("/")
    if not slash:
        raise InvalidName(field, f"{text!r} has no slash: write it as type/key")
    return type, rest
