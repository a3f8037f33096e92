"""Serializers of AutoGen's messages: plain JSON where it is enough, tagged JSON where it would lose a class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autogen_core import UnknownPayload
from autogen_core._serialization import (
    DataclassJsonMessageSerializer,
    ProtobufMessageSerializer,
    PydanticJsonMessageSerializer,
)

from runtime_core.integrations.autogen.tagged import PREFIX, TaggedJson
from runtime_core.runtime.classes import name_of
from runtime_core.runtime.errors import SerializationError
from runtime_core.runtime.serialization import (
    JsonSerializer,
    MessageSerializer,
    SerializationRegistry,
    try_get_known_serializers_for_type,
)
from runtime_core.runtime.serialization import UnknownPayload as Unknown

_OWN = (DataclassJsonMessageSerializer, ProtobufMessageSerializer, PydanticJsonMessageSerializer)


class FaithfulSerializer(JsonSerializer[Any]):  # Any: the user's message types
    """Messages of one class, as plain JSON that every program reads, or tagged where that would come back different.

    AgentChat's team messages need the tags: their fields name base classes, and hold objects of many subclasses.
    """

    def __init__(self, cls: type, tagged: TaggedJson) -> None:
        self._tagged = tagged
        self._plain = True
        tagged.know(cls)
        try:
            super().__init__(cls)
        except SerializationError:
            # Pydantic has no schema for one of its fields, yet each value may be one that can be written.
            self.type_name = name_of(cls)
            self._plain = False

    def serialize(self, message: Any) -> bytes:
        """Raises SerializationError."""
        if self._plain:
            try:
                data = super().serialize(message)
                if not data.startswith(PREFIX):
                    return data
            except Exception:  # among others, a field of an abstract class fails in any way that Python has
                # Not tried again: its reader takes both.
                self._plain = False
        return self._tagged.write(message)

    def deserialize(self, payload: bytes) -> Any:
        """Raises SerializationError."""
        return self._tagged.read(payload) if payload.startswith(PREFIX) else super().deserialize(payload)


class FaithfulRegistry(SerializationRegistry):
    """Serializers of one runtime. Any: as above."""

    def __init__(self) -> None:
        self._tagged = TaggedJson()
        super().__init__(self._serializers)

    def add_serializer(self, serializer: Any) -> None:
        """Use these from now on. AutoGen's own are not used: they name a class without its module, and lose classes."""
        for each in serializer if isinstance(serializer, Sequence) else [serializer]:
            if isinstance(each, _OWN):
                self.add_class(each.cls)
            else:
                super().add_serializer(each)

    def deserialize(self, payload: bytes, *, type_name: str, data_content_type: str) -> Any:
        """The message; UnknownPayload where this process does not know its type. Raises SerializationError."""
        message = super().deserialize(payload, type_name=type_name, data_content_type=data_content_type)
        if not isinstance(message, Unknown):
            return message
        if payload.startswith(PREFIX):
            return self._tagged.read(payload)  # a generic model's name is not that of a class of a module
        return UnknownPayload(type_name, data_content_type, payload)

    def _serializers(self, cls: type) -> list[MessageSerializer[Any]]:
        usual = try_get_known_serializers_for_type(cls)
        if usual and not isinstance(usual[0], JsonSerializer):
            return usual  # protobuf has its own
        return [FaithfulSerializer(cls, self._tagged)]
