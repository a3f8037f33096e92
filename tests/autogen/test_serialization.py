"""Messages of AutoGen's programs arrive unchanged, with the same classes."""

from __future__ import annotations

import datetime
import decimal
import enum
import socket
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pytest
from autogen_agentchat.base import Response
from autogen_agentchat.messages import MultiModalMessage, StructuredMessage, TextMessage, ToolCallRequestEvent
from autogen_agentchat.teams._group_chat._events import GroupChatAgentResponse, GroupChatStart
from autogen_core import AgentId, FunctionCall, Image, TopicId
from PIL import Image as Picture
from pydantic import BaseModel, Field

from runtime_core.integrations.actors.errors import SerializationError
from runtime_core.integrations.autogen.serialization import PREFIX, FaithfulSerializer, TaggedJson

ContentT = TypeVar("ContentT")


class Colour(enum.Enum):
    RED = "red"


class Shade(enum.IntEnum):
    DARK = 1


class Base(BaseModel):
    name: str


class Sub(Base):
    number: int = 3
    other: str = Field(default="x", alias="otherName")


class Box(BaseModel, Generic[ContentT]):
    content: ContentT


class Open(BaseModel, extra="allow"):
    known: int


@dataclass
class Inner:
    values: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Inner
    union: Inner | Base | None = None


@dataclass
class Anything:
    value: Any


Pair = namedtuple("Pair", "left right")  # without types: that is what is tested


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, 2**80, 1.5, float("inf"), "größe", b"\x00\xff", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}),
        {"a": 1}, {1: "a", (1, 2): "b"}, {"$type": "str"}, Colour.RED, Shade.DARK, Pair(1, [2]),
        Base(name="b"), Sub(name="s", otherName="y"), Box[Sub](content=Sub(name="in a box")),
        Open.model_validate({"known": 1, "more": [2]}),
        Inner([1]), Frozen(Inner([1]), Base(name="u")), AgentId("type", "key/with slash"), TopicId("type", "source"),
        datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.timedelta(seconds=1), decimal.Decimal("1.10"),
        FunctionCall(id="1", arguments="{}", name="f"),
        TextMessage(content="t", source="s"),
        StructuredMessage[Sub](content=Sub(name="x"), source="s"),
        ToolCallRequestEvent(content=[FunctionCall(id="1", arguments="{}", name="f")], source="s"),
        GroupChatStart(messages=[TextMessage(content="t", source="s")]),
        GroupChatAgentResponse(
            response=Response(chat_message=TextMessage(content="t", source="s"), inner_messages=[]), name="n"
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_survives_a_round_trip(value: object) -> None:
    for sent in (Anything(value), value):
        serializer = FaithfulSerializer(type(sent), TaggedJson())
        data = serializer.serialize(sent)
        # Another process has not seen what this one wrote.
        back = FaithfulSerializer(type(sent), TaggedJson()).deserialize(data)
        assert back == sent
        assert type(back) is type(sent)
    assert type(TaggedJson().read(TaggedJson().write(value))) is type(value)


def test_an_image_survives_a_round_trip() -> None:
    picture = Image(Picture.new("RGB", (2, 2), "red"))
    sent = MultiModalMessage(content=["look", picture], source="s")
    back = TaggedJson().read(TaggedJson().write(sent))
    assert isinstance(back, MultiModalMessage)
    assert isinstance(back.content[1], Image)
    assert back.content[1].to_base64() == picture.to_base64()


def test_an_error_comes_back_as_its_class() -> None:
    error = KeyError("k", 1)
    error.__dict__["note"] = "kept"
    back = TaggedJson().read(TaggedJson().write(error))
    assert type(back) is KeyError
    assert back.args == ("k", 1)
    assert vars(back) == {"note": "kept"}


def test_a_class_of_a_function_comes_back_in_the_process_that_made_it() -> None:
    @dataclass
    class Local:
        value: tuple[int, ...]

    tagged = TaggedJson()
    data = FaithfulSerializer(Local, tagged).serialize(Local((1, 2)))
    assert FaithfulSerializer(Local, tagged).deserialize(data) == Local((1, 2))
    with pytest.raises(SerializationError, match="has not loaded"):
        TaggedJson().read(TaggedJson().write([Local((1,))]))


def test_unset_fields_stay_unset() -> None:
    back = TaggedJson().read(TaggedJson().write(Sub(name="s")))
    assert back.model_fields_set == {"name"}


def test_flat_messages_are_plain_json() -> None:
    assert FaithfulSerializer(Base, TaggedJson()).serialize(Base(name="b")) == b'{"name":"b"}'
    assert FaithfulSerializer(Inner, TaggedJson()).serialize(Inner([1])) == b'{"values":[1]}'


def test_an_object_that_cannot_be_sent_is_named_with_its_place() -> None:
    serializer = FaithfulSerializer(Anything, TaggedJson())
    with socket.socket() as open_socket, pytest.raises(SerializationError) as refused:
        serializer.serialize(Anything([open_socket]))
    assert "message.value[0] is a socket.socket, which cannot be sent" in str(refused.value)
    assert "add_message_serializer" in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"$type":"no.such.Class"}',
        b'{"$type":"subprocess.Popen","value":["true"]}',
        b'{"$type":"decimal.Decimal"}',
        b'{"$type":"float","value":"x"}',
        b'{"$type":["tests.autogen.test_serialization.Base","tests.autogen.test_serialization.Sub"],"fields":{}}',
        b'{"$type":3}',
        b'{"$type":',
    ],
)
def test_an_invalid_message_is_refused_in_one_way(data: bytes) -> None:
    assert data.startswith(PREFIX)
    with pytest.raises(SerializationError):
        TaggedJson().read(data)
