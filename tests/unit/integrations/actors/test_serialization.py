"""Messages as bytes and back, by their types: what changes is refused, and no module is imported for a name."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from runtime_core.integrations.actors.message import content_of, message_of
from runtime_core.integrations.actors.serialization import JsonSerializer, SerializationRegistry
from weft.runtime import (
    SerializationError,
    UnknownPayload,
)


@dataclass
class Inner:
    number: int


@dataclass
class Outer:
    inner: Inner
    more: list[Inner] = field(default_factory=list)
    raw: bytes = b""
    choice: Inner | str | None = None


class Model(BaseModel):
    inner: Inner
    name: str = ""


@dataclass
class Left:
    number: int


@dataclass
class Right:
    number: int


@dataclass
class Either:
    side: Left | Right


@dataclass
class Loose:
    anything: Any


@dataclass
class Measure:
    value: float


@dataclass
class Deeper(Inner):
    extra: str = "kept?"


@pytest.mark.parametrize(
    "message",
    [
        Outer(Inner(1), [Inner(2), Inner(3)], b"\x00text", Inner(4)),
        Outer(Inner(1), choice="text"),
        Model(inner=Inner(5), name="ü\n"),
        Either(Left(1)),
        Loose({"plain": [1, None, "x"]}),
        "text",
        7,
        1.5,
        math.inf,
        True,
        b"\xff\x00",
        [1, "two", None],
        {"a": [1]},
    ],
)
def test_a_message_survives_a_round_trip(message: object) -> None:
    writer, reader = SerializationRegistry(), SerializationRegistry()
    back = message_of(content_of(message, writer), reader)
    assert back == message
    assert type(back) is type(message)


@pytest.mark.parametrize(
    "message", [Either(Right(1)), Loose(Inner(1)), Outer(Deeper(1)), Loose((1, 2)), Measure(math.nan)]
)
def test_a_message_that_would_change_its_type_is_refused(message: object) -> None:
    with pytest.raises(SerializationError, match=type(message).__name__):
        content_of(message, SerializationRegistry())


def test_a_class_without_a_serializer_is_named_with_the_remedy() -> None:
    with pytest.raises(SerializationError, match=r"object has no serializer: .*add_message_serializer"):
        content_of(object(), SerializationRegistry())


def test_classes_of_one_name_in_two_modules_do_not_mix() -> None:
    other = type("Inner", (Inner,), {"__module__": "elsewhere", "__qualname__": "Inner"})
    registry = SerializationRegistry()
    registry.add_class(Inner)
    registry.add_class(other)
    back = message_of(content_of(Inner(1), registry), registry)
    assert type(back) is Inner


def test_a_message_of_an_unknown_type_arrives_as_it_is() -> None:
    content = content_of(Inner(1), SerializationRegistry())
    content.message_type = "a.module.that.nobody.has"
    assert message_of(content, SerializationRegistry()) == UnknownPayload(
        "a.module.that.nobody.has", "application/json", b'{"number":1}'
    )


def test_no_module_is_imported_for_a_name_in_a_message() -> None:
    content = content_of(Inner(1), SerializationRegistry())
    content.message_type = "this.s"
    sys.modules.pop("this", None)
    assert isinstance(message_of(content, SerializationRegistry()), UnknownPayload)
    assert "this" not in sys.modules


class _Upper:
    """A custom serializer with its own content type."""

    data_content_type = "text/plain"
    type_name = f"{__name__}.Inner"

    def serialize(self, message: Inner) -> bytes:
        return f"number {message.number}".encode()

    def deserialize(self, payload: bytes) -> Inner:
        return Inner(int(payload.split()[1]))


def test_a_users_serializer_has_precedence() -> None:
    registry = SerializationRegistry()
    registry.add_serializer(_Upper())
    content = content_of(Inner(7), registry)
    assert content.content_type == "text/plain"
    assert message_of(content, registry) == Inner(7)
    content.payload_base64 = "bm8="
    with pytest.raises(SerializationError, match="Inner"):
        message_of(content, registry)


def test_a_wrong_payload_names_the_type() -> None:
    with pytest.raises(SerializationError, match="Inner"):
        JsonSerializer(Inner).deserialize(b'{"number":"no"}')
