"""Converts messages to bytes and back, by the message's type and a content type."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from runtime_core.declare.declaration import one_line
from runtime_core.integrations.actors.errors import SerializationError, find_class, name_of

JSON_DATA_CONTENT_TYPE = "application/json"
PROTOBUF_DATA_CONTENT_TYPE = "application/x-protobuf"

T = TypeVar("T")

_PLAIN = (str, int, bool, bytes, type(None))
"""Without float: JSON has no NaN and no infinities, which only a round trip reveals."""
_BUILTIN = (str, int, float, bool, bytes, list, dict, tuple, set, frozenset)


@runtime_checkable
class MessageSerializer(Protocol[T]):
    """Writes and reads messages of one type."""

    @property
    def data_content_type(self) -> str: ...

    @property
    def type_name(self) -> str: ...

    def deserialize(self, payload: bytes) -> T: ...

    def serialize(self, message: T) -> bytes: ...


@dataclass(frozen=True, slots=True)
class UnknownPayload:
    """A message of a type that this process does not know, with its bytes."""

    type_name: str
    data_content_type: str
    payload: bytes


class JsonSerializer(Generic[T]):
    """Dataclasses (also nested ones and unions), pydantic models, TypedDicts and built-in types, as JSON.

    It refuses to write a message that would change in a round trip, since the reader could not tell.
    """

    data_content_type = JSON_DATA_CONTENT_TYPE

    def __init__(self, cls: type[T]) -> None:
        self.type_name = name_of(cls)
        self._cls = cls
        config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
        plain = cls in _BUILTIN
        try:
            self._adapter: TypeAdapter[T] = TypeAdapter(cls, config=config) if plain else TypeAdapter(cls)
        except (PydanticUserError, NameError, TypeError) as error:
            raise SerializationError(
                "message", f"{self.type_name} cannot be written as JSON, {one_line(error)}: add a serializer for it"
            ) from error
        self._exact = _is_flat(cls)

    def serialize(self, message: T) -> bytes:
        """Raises SerializationError."""
        try:
            data = self._adapter.dump_json(message, warnings="error")
            back = None if self._exact else self._read(data)
        except (PydanticSerializationError, ValidationError, ValueError) as error:
            raise SerializationError(
                "message", f"this {self.type_name} cannot be written as JSON, {one_line(error)}: add a serializer"
            ) from error
        if not self._exact and not _equal(back, message):
            raise SerializationError(
                "message",
                f"this {self.type_name} would change in JSON (a subclass in a field of its "
                "base, a value in a field of any type, or a union whose members look alike): give the members a "
                "Literal field that tells them apart, or add a serializer",
            )
        return data

    def deserialize(self, payload: bytes) -> T:
        """Raises SerializationError."""
        try:
            return self._read(payload)
        except ValidationError as error:
            raise SerializationError("message", f"is not a {self.type_name}: {one_line(error)}") from error

    def _read(self, data: bytes) -> T:
        # By field names: a field with an alias would otherwise silently get its default.
        return self._adapter.validate_json(data, by_alias=True, by_name=True)


class ProtobufSerializer:
    """Messages of protobuf in their own encoding, with the names of their schema in any language."""

    data_content_type = PROTOBUF_DATA_CONTENT_TYPE

    def __init__(self, cls: type) -> None:
        generated: Any = cls  # Any: protobuf generates its classes at run time
        self._cls = generated
        self.type_name: str = generated.DESCRIPTOR.full_name

    def serialize(self, message: Any) -> bytes:  # Any: see above
        data: bytes = message.SerializeToString(deterministic=True)
        return data

    def deserialize(self, payload: bytes) -> Any:  # Any: see above
        return self._cls.FromString(payload)


def try_get_known_serializers_for_type(cls: type[Any]) -> list[MessageSerializer[Any]]:  # Any: all message types
    """Return the built-in serializers of a class; empty if you have to add one for it."""
    if _is_protobuf(cls):
        return [ProtobufSerializer(cls)]
    known = (
        cls in _BUILTIN
        or typing.is_typeddict(cls)
        or dataclasses.is_dataclass(cls)
        or (isinstance(cls, type) and issubclass(cls, BaseModel))
    )
    return [JsonSerializer(cls)] if known else []


class SerializationRegistry:
    """Serializers by type name and content type. Any: the user's message types.

    `known` returns the serializers of a class for which the user has added none.
    """

    def __init__(
        self, known: Callable[[type], list[MessageSerializer[Any]]] = try_get_known_serializers_for_type
    ) -> None:
        self._known = known
        self._by_name: dict[tuple[str, str], MessageSerializer[Any]] = {}
        self._by_class: dict[type, MessageSerializer[Any]] = {}

    def add_serializer(self, serializer: MessageSerializer[Any] | Sequence[MessageSerializer[Any]]) -> None:
        """Add serializers, which replace earlier ones for the same type and content type."""
        for each in serializer if isinstance(serializer, Sequence) else [serializer]:
            self._by_name[each.type_name, each.data_content_type] = each
            self._by_class.clear()

    def add_class(self, cls: type) -> None:
        """Register the class for messages that arrive. A class without a known serializer is left out."""
        for serializer in self._known(cls):
            self._by_name.setdefault((serializer.type_name, serializer.data_content_type), serializer)

    def type_name(self, message: Any) -> str:
        """Return the message's type name. Raises SerializationError."""
        return self._writer(type(message)).type_name

    def write(self, message: Any) -> tuple[str, str, bytes]:
        """Return type name, content type and bytes. Raises SerializationError."""
        serializer = self._writer(type(message))
        return serializer.type_name, serializer.data_content_type, self._written(serializer, message)

    def serialize(self, message: Any, *, type_name: str, data_content_type: str) -> bytes:
        """Serialize a message with the named serializer. Raises SerializationError."""
        return self._written(self._named(type_name, data_content_type), message)

    def deserialize(self, payload: bytes, *, type_name: str, data_content_type: str) -> Any:
        """Return the message, or UnknownPayload if this process does not know its type. Raises SerializationError."""
        serializer = self._by_name.get((type_name, data_content_type))
        if serializer is None:
            found = find_class(type_name)
            if found is not None:
                self.add_class(found)
                serializer = self._by_name.get((type_name, data_content_type))
        if serializer is None:
            return UnknownPayload(type_name, data_content_type, payload)
        try:
            return serializer.deserialize(payload)
        except SerializationError:
            raise
        except Exception as error:  # a serializer of the user's may raise anything
            raise SerializationError("message", f"is not a {type_name}: {one_line(error)}") from error

    def _written(self, serializer: MessageSerializer[Any], message: Any) -> bytes:
        try:
            return serializer.serialize(message)
        except SerializationError:
            raise
        except Exception as error:  # a serializer of the user's may raise anything
            raise SerializationError(
                "message", f"this {name_of(type(message))} cannot be written: {one_line(error)}"
            ) from error

    def _named(self, type_name: str, data_content_type: str) -> MessageSerializer[Any]:
        found = self._by_name.get((type_name, data_content_type))
        if found is None:
            raise SerializationError("message", f"no serializer for {type_name!r} as {data_content_type} was added")
        return found

    def _writer(self, cls: type) -> MessageSerializer[Any]:
        found = self._by_class.get(cls)
        if found is None:
            found = self._by_class[cls] = self._find_writer(cls)
        return found

    def _find_writer(self, cls: type) -> MessageSerializer[Any]:
        for name in (name_of(cls), cls.__name__):
            for (type_name, _), serializer in self._by_name.items():
                if type_name == name and not isinstance(serializer, JsonSerializer):
                    return serializer
        known = self._known(cls)
        if not known:
            raise SerializationError(
                "message",
                f"{name_of(cls)} has no serializer: make it a dataclass or a pydantic model, or add one with "
                "runtime.add_message_serializer(…)",
            )
        # Another class of this name (defined again inside a function) gives way to the class that is in use.
        self._by_name[known[0].type_name, known[0].data_content_type] = known[0]
        return known[0]


def _is_protobuf(cls: object) -> bool:
    """Checked without importing protobuf: a program with such a message has imported it."""
    if "google.protobuf.message" not in sys.modules or not isinstance(cls, type):
        return False
    base: type = importlib.import_module("google.protobuf.message").Message
    return issubclass(cls, base)


def _is_flat(cls: type) -> bool:
    """Whether all fields are plain values or containers of them, which JSON preserves."""
    if cls in _PLAIN:
        return True
    if dataclasses.is_dataclass(cls):
        if any(not field.init for field in dataclasses.fields(cls)):
            return False
    elif not (isinstance(cls, type) and issubclass(cls, BaseModel)):
        return False
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a name local to a function: pydantic resolves it or reports it
        return False
    return all(_is_plain_hint(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar)


def _is_plain_hint(hint: object) -> bool:
    if hint in _PLAIN:
        return True
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return True
    if origin in (list, dict, typing.Union, types.UnionType):
        return all(_is_plain_hint(part) for part in typing.get_args(hint))
    return False


def _equal(one: object, other: object) -> bool:
    """Whether both are equal and of one class. Classes without `==` are trusted."""
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or type(one).__eq__ is object.__eq__
    except Exception:  # arrays and the like compare element by element
        return True
