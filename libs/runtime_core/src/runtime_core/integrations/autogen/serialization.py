"""Serializers for AutoGen's messages: plain JSON, or tagged JSON if plain JSON would lose classes."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from autogen_core import AgentId, UnknownPayload
from autogen_core._serialization import (
    DataclassJsonMessageSerializer,
    ProtobufMessageSerializer,
    PydanticJsonMessageSerializer,
)
from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from runtime_core.integrations.actors.errors import SerializationError, find_class, name_of
from runtime_core.integrations.actors.serialization import (
    JsonSerializer,
    MessageSerializer,
    SerializationRegistry,
    try_get_known_serializers_for_type,
)
from runtime_core.integrations.actors.serialization import UnknownPayload as Unknown

TYPE = "$type"
PREFIX = b'{"$type":'
"""The beginning of all tagged JSON."""

# Any below: the values of a message may be of any kind, and those of a JSON tree too.
_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class TaggedJson:
    """Writes and reads tagged JSON. Each runtime has its own, which remembers classes that are in no module."""

    def __init__(self) -> None:
        self._seen: WeakValueDictionary[str, type] = WeakValueDictionary()
        self._adapters: dict[type, TypeAdapter[Any]] = {}

    def know(self, cls: type) -> str:
        """Remember the class, and return its name in messages."""
        name = name_of(cls)
        self._seen[name] = cls
        return name

    def write(self, value: Any) -> bytes:
        """Return JSON that begins with `PREFIX`. Raises SerializationError for a value that cannot be rebuilt."""
        tree = self._tree(value, "message")
        if not (isinstance(tree, dict) and TYPE in tree):
            tree = {TYPE: "value", "value": tree}
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()

    def read(self, data: bytes) -> Any:
        """Rebuild a value. Raises SerializationError for an unknown class, and for parts that do not fit it."""
        try:
            return self._value(json.loads(data))
        except SerializationError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, PydanticUserError) as error:
            raise SerializationError("message", f"cannot be read: {error}") from error

    def _tree(self, value: Any, place: str) -> Any:
        cls = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if cls is float:
            return value if math.isfinite(value) else {TYPE: "float", "value": repr(value)}
        if cls is list:
            return self._trees(value, place)
        if cls is dict:
            return self._mapping(value, place)
        if cls is bytes:
            return {TYPE: "bytes", "value": base64.b64encode(value).decode()}
        if cls in (tuple, set, frozenset):
            return {TYPE: cls.__name__, "value": self._trees(value, place)}
        return {TYPE: self._reference(cls), **self._parts(cls, value, place)}

    def _trees(self, values: Any, place: str) -> list[Any]:
        return [self._tree(value, f"{place}[{at}]") for at, value in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], place: str) -> Any:
        if TYPE not in value and all(type(key) is str for key in value):
            return {key: self._tree(part, f"{place}.{key}") for key, part in value.items()}
        pairs = [[self._tree(key, place), self._tree(part, f"{place}[{key!r}]")] for key, part in value.items()]
        return {TYPE: "dict", "value": pairs}

    def _parts(self, cls: type, value: Any, place: str) -> dict[str, Any]:
        if isinstance(value, BaseModel):
            return self._parts_of_model(value, place)
        if dataclasses.is_dataclass(cls):
            there = [field.name for field in dataclasses.fields(cls) if hasattr(value, field.name)]
            return {"fields": {name: self._tree(getattr(value, name), f"{place}.{name}") for name in there}}
        if isinstance(value, enum.Enum):
            return {"value": self._tree(value.value, place)}
        if isinstance(value, tuple) and hasattr(cls, "_make"):
            return {"value": self._trees(value, place)}
        if isinstance(value, BaseException):
            return {"args": self._trees(value.args, f"{place}.args"), "fields": self._mapping(vars(value), place)}
        if isinstance(value, AgentId):
            return {"value": str(value)}
        try:
            return {"value": self._adapter(cls).dump_python(value, mode="json", warnings="error")}
        except (PydanticUserError, PydanticSerializationError) as error:
            raise SerializationError(
                "message",
                f"{place} is a {name_of(cls)}, which cannot be sent: use a dataclass or a pydantic model, or add a "
                "serializer for the message with runtime.add_message_serializer(…)",
            ) from error

    def _parts_of_model(self, value: BaseModel, place: str) -> dict[str, Any]:
        cls = type(value)
        there = [name for name in cls.model_fields if name in value.__dict__]
        parts: dict[str, Any] = {
            "fields": {name: self._tree(value.__dict__[name], f"{place}.{name}") for name in there}
        }
        if value.model_extra:
            parts["extra"] = self._mapping(value.model_extra, place)
        unset = [name for name in there if name not in value.model_fields_set]
        if unset:
            parts["unset"] = unset
        return parts

    def _reference(self, cls: type) -> Any:
        """Return the name of a class; for a generic model, the names of the model and its arguments as a list."""
        generic = getattr(cls, "__pydantic_generic_metadata__", None) or {}
        if generic.get("origin") and all(isinstance(argument, type) for argument in generic["args"]):
            return [self._reference(part) for part in (generic["origin"], *generic["args"])]
        return self.know(cls)

    def _value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self._value(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        if TYPE not in tree:
            return {key: self._value(part) for key, part in tree.items()}
        name = tree[TYPE]
        if name == "value":
            return self._value(tree["value"])
        if name == "float":
            return float(tree["value"])
        if name == "bytes":
            return base64.b64decode(tree["value"], validate=True)
        if name == "dict":
            return {self._value(key): self._value(part) for key, part in tree["value"]}
        if isinstance(name, str) and name in _COLLECTIONS:
            return _COLLECTIONS[name](self._value(tree["value"]))
        return self._made(self._class(name), tree)

    def _class(self, reference: Any) -> Any:
        if isinstance(reference, list):
            origin, *arguments = [self._class(part) for part in reference]
            return origin[tuple(arguments)]
        found = self._seen.get(reference) or find_class(reference)
        if found is None:
            raise SerializationError(
                "message",
                f"has a part of class {reference!r}, which this process has not loaded: import its module here",
            )
        return found

    def _made(self, cls: Any, tree: dict[str, Any]) -> Any:
        if issubclass(cls, BaseModel):
            return self._made_model(cls, tree)
        if dataclasses.is_dataclass(cls):
            return _made_dataclass(cls, self._value(tree["fields"]))
        if issubclass(cls, enum.Enum):
            return cls(self._value(tree["value"]))
        if issubclass(cls, tuple) and hasattr(cls, "_make"):
            return cls._make(self._value(tree["value"]))
        if issubclass(cls, BaseException):
            error = cls.__new__(cls)
            error.args = tuple(self._value(tree["args"]))
            vars(error).update(self._value(tree["fields"]))
            return error
        if issubclass(cls, AgentId):
            return cls.from_str(tree["value"])
        return self._adapter(cls).validate_python(tree["value"])

    def _made_model(self, cls: type[BaseModel], tree: dict[str, Any]) -> BaseModel:
        fields = self._value(tree["fields"])
        given = {
            cls.model_fields[name].alias or name: part for name, part in fields.items() if name in cls.model_fields
        }
        try:
            made = cls.model_validate({**given, **self._value(tree.get("extra", {}))}, by_alias=True, by_name=True)
        except ValidationError as error:
            raise SerializationError("message", f"is not a {name_of(cls)}: {error}") from error
        for name in tree.get("unset", ()):
            made.__pydantic_fields_set__.discard(name)
        return made

    def _adapter(self, cls: type) -> TypeAdapter[Any]:
        if cls not in self._adapters:
            self._adapters[cls] = TypeAdapter(cls)
        return self._adapters[cls]


def _made_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    # Restore the fields without the constructor: it may take different arguments, and it has already run.
    made = cls.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in fields:
            object.__setattr__(made, field.name, fields[field.name])
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(made, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(made, field.name, field.default_factory())
    return made


_OWN = (DataclassJsonMessageSerializer, ProtobufMessageSerializer, PydanticJsonMessageSerializer)


class FaithfulSerializer(JsonSerializer[Any]):  # Any: the user's message types
    """Messages of one class, as plain JSON that any program can read, or as tagged JSON if that would lose classes.

    AgentChat's team messages need tags: their fields are declared with base classes and hold objects of subclasses.
    """

    def __init__(self, cls: type, tagged: TaggedJson) -> None:
        self._tagged = tagged
        self._plain = True
        tagged.know(cls)
        try:
            super().__init__(cls)
        except SerializationError:
            # pydantic has no schema for one of the fields, but tagged JSON may still write its values.
            self.type_name = name_of(cls)
            self._plain = False

    def serialize(self, message: Any) -> bytes:
        """Raises SerializationError."""
        if self._plain:
            try:
                data = super().serialize(message)
                if not data.startswith(PREFIX):
                    return data
            except Exception:  # a field of an abstract class, for example, may raise anything
                # Use tagged JSON from now on; the reader accepts both.
                self._plain = False
        return self._tagged.write(message)

    def deserialize(self, payload: bytes) -> Any:
        """Raises SerializationError."""
        return self._tagged.read(payload) if payload.startswith(PREFIX) else super().deserialize(payload)


class FaithfulRegistry(SerializationRegistry):
    """The serializers of one runtime. Any: as above."""

    def __init__(self) -> None:
        self._tagged = TaggedJson()
        super().__init__(self._serializers)

    def add_serializer(self, serializer: Any) -> None:
        """Use these serializers, except AutoGen's own: they name classes without their modules, and lose classes."""
        for each in serializer if isinstance(serializer, Sequence) else [serializer]:
            if isinstance(each, _OWN):
                self.add_class(each.cls)
            else:
                super().add_serializer(each)

    def deserialize(self, payload: bytes, *, type_name: str, data_content_type: str) -> Any:
        """Return the message, or UnknownPayload if this process does not know its type. Raises SerializationError."""
        message = super().deserialize(payload, type_name=type_name, data_content_type=data_content_type)
        if not isinstance(message, Unknown):
            return message
        if payload.startswith(PREFIX):
            return self._tagged.read(payload)  # the name of a generic model is not that of a class in a module
        return UnknownPayload(type_name, data_content_type, payload)

    def _serializers(self, cls: type) -> list[MessageSerializer[Any]]:
        usual = try_get_known_serializers_for_type(cls)
        if usual and not isinstance(usual[0], JsonSerializer):
            return usual  # protobuf has its own serializer
        return [FaithfulSerializer(cls, self._tagged)]
