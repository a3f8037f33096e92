"""CloudEvents 1.0 events on entries of Redis Streams.

`parse` reads an entry in both content modes. `to_fields` writes the binary mode. `reply_address` finds the stream for a
rejection, even if the rest of the entry is unreadable.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from runtime_core.errors import InvalidInput
from runtime_core.wire.codec import JSON, MAX_DATA_BYTES, MAX_DEPTH, decode, decode_object, quoted
from runtime_core.wire.ids import has_control

Fields = Sequence[bytes] | Mapping[bytes, bytes]
"""An entry's fields as a flat list (name, value, name, …) or a mapping; if names repeat, the last one counts."""

SPEC_VERSION = "1.0"
ANONYMOUS = "anonymous"
"""The source of an event without one."""
MAX_ATTRIBUTE_BYTES = 4096
MAX_ATTRIBUTE_NAME_BYTES = 256
MAX_ATTRIBUTES = 128
"""How many attributes one event may have, including unknown ones."""
MAX_STRUCTURED_BYTES = 2 * MAX_DATA_BYTES
"""The largest `application/cloudevents+json`: data as base64, and the attributes."""

# Dapr adds `metadata`: settings of its component, not part of the event.
_STRUCTURED_FIELDS = frozenset({b"data", b"metadata"})
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}:,]', re.DOTALL)
_RFC3339 = re.compile(r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(\.\d{1,6})?\d*([Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One event at the edge. An attribute that is absent is an empty string."""

    id: str
    source: str = ANONYMOUS
    type: str
    specversion: str = SPEC_VERSION
    subject: str = ""
    time: str = ""
    """RFC 3339."""
    datacontenttype: str = JSON
    partitionkey: str = ""
    """The text that determines the partition, if it is not the task id."""
    traceparent: str = ""
    tracestate: str = ""
    taskid: str = ""
    runid: str = ""
    causationid: str = ""
    """Id of the event that led to this one."""
    replyto: str = ""
    """The stream that gets the answers."""
    deadline: str = ""
    """RFC 3339: after it, nobody needs the work."""
    tenant: str = ""
    data: bytes
    extensions: dict[str, str] = {}
    """Attributes that Weft does not know, unchanged."""


ATTRIBUTES = tuple(name for name in Envelope.__struct_fields__ if name not in ("data", "extensions"))
"""The attributes that Weft knows, in the order of `to_fields`."""
_KNOWN = frozenset(ATTRIBUTES)


def parse(entry_id: str, fields: Fields, namespace: str = "weft") -> Envelope:
    """Return the event on the stream entry `entry_id` with these fields, in binary or structured mode.

    Fills in `specversion` (1.0), `id` (the entry id) and `source` (`anonymous`). The data is not decoded.
    Raises only InvalidInput; its field is the attribute's name.
    """
    entry = _as_mapping(fields)
    data = entry.get(b"data")
    if data is not None and b"type" not in entry and entry.keys() <= _STRUCTURED_FIELDS:
        attributes, data = _read_structured(data)
    else:
        attributes = _read_binary(entry)
    if not attributes.get("type"):
        raise InvalidInput("type", "is missing; name what the event is, as in `weft.task.submit`")
    if data is None:
        raise InvalidInput("data", "is missing; send the event's data in the field `data`")
    if len(data) > MAX_DATA_BYTES:
        raise InvalidInput(
            "data",
            f"is {len(data)} bytes, over the limit of {MAX_DATA_BYTES}; store it and send a reference",
        )
    return _checked(entry_id, attributes, data, namespace)


def to_fields(envelope: Envelope) -> list[bytes]:
    """Return the entry's fields in binary mode, as a flat list without absent attributes."""
    fields: list[bytes] = []
    for name in ATTRIBUTES:
        value: str = getattr(envelope, name)
        if value:
            fields += (name.encode(), value.encode())
    for name, value in envelope.extensions.items():
        fields += (name.encode(), value.encode())
    fields += (b"data", envelope.data)
    return fields


def reply_address(fields: Fields, namespace: str = "weft") -> str:
    """Return the stream that gets the answer to this entry, or an empty string; never raises.

    Works even if other attributes, the data or the end of a structured event are unreadable.
    """
    entry = dict(_pairs(fields))
    found = entry.get(b"replyto")
    if found is None and b"type" not in entry and entry.keys() <= _STRUCTURED_FIELDS:
        found = _top_level_text(entry.get(b"data", b"")[:MAX_STRUCTURED_BYTES], b'"replyto"')
    if not found or len(found) > MAX_ATTRIBUTE_BYTES:
        return ""
    try:
        address = found.decode()
        _check_reply_address(address, namespace)
    except (UnicodeDecodeError, InvalidInput):
        return ""
    return address


def rfc3339(epoch_ms: float) -> str:
    """Return milliseconds since 1970 as a CloudEvents timestamp in UTC, as in `2026-11-21T02:00:00.000Z`."""
    moment = _EPOCH + timedelta(milliseconds=int(epoch_ms))
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch_ms(attribute: str, text: str) -> int:
    """Return an RFC 3339 timestamp with offset as milliseconds since 1970.

    Raises InvalidInput, whose field is `attribute`.
    """
    match = _RFC3339.fullmatch(text)
    if match:
        day, clock, fraction, offset = match.groups()
        try:
            moment = datetime.fromisoformat(
                f"{day}T{clock}{(fraction or '.0').ljust(7, '0')}{'+00:00' if offset in 'Zz' else offset}"
            )
            return (moment - _EPOCH) // timedelta(milliseconds=1)
        except (ValueError, OverflowError):
            pass
    raise InvalidInput(attribute, f"{quoted(text)} is not an RFC 3339 time with offset, as in 2026-11-21T02:00:00Z")


def _pairs(fields: Fields) -> Iterator[tuple[bytes, bytes]]:
    if isinstance(fields, Mapping):
        return iter(fields.items())
    return zip(fields[::2], fields[1::2], strict=False)


def _as_mapping(fields: Fields) -> dict[bytes, bytes]:
    if not isinstance(fields, Mapping) and len(fields) % 2:
        raise InvalidInput("entry", f"has {len(fields)} names and values; send them in pairs")
    entry = dict(_pairs(fields))
    if len(entry) > MAX_ATTRIBUTES + 1:
        raise InvalidInput("entry", f"has {len(entry)} fields, over the limit of {MAX_ATTRIBUTES} attributes")
    return entry


def _read_binary(entry: Mapping[bytes, bytes]) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for raw_name, raw in entry.items():
        if raw_name == b"data":
            continue
        name = _attribute_name(raw_name)
        if len(raw) > MAX_ATTRIBUTE_BYTES:
            raise _too_long(name, len(raw))
        try:
            attributes[name] = raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(name, f"is not UTF-8: {error.reason} at byte {error.start}") from None
    return attributes


def _attribute_name(raw: bytes) -> str:
    """Return a field's name in a form that errors can show."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        shown = quoted(raw.decode(errors="replace"))
        raise InvalidInput("entry", f"has the field {shown}, whose name is not UTF-8") from None
    if not name or len(raw) > MAX_ATTRIBUTE_NAME_BYTES or has_control(name):
        raise InvalidInput(
            "entry",
            f"has the field {quoted(name)}; a name is 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes of plain text",
        )
    return name


def _read_structured(document: bytes) -> tuple[dict[str, str], bytes]:
    """Return the attributes and the data of an `application/cloudevents+json`."""
    if len(document) > MAX_STRUCTURED_BYTES:
        raise InvalidInput("data", f"is {len(document)} bytes, over the limit of {MAX_STRUCTURED_BYTES}")
    if not document.lstrip().startswith(b"{"):
        raise InvalidInput("type", "is missing; name what the event is, as in `weft.task.submit`")
    # The data is one level inside the event.
    members = decode_object(document, MAX_DEPTH + 1)
    if "type" not in members or "specversion" not in members:
        absent = "type" if "type" not in members else "specversion"
        raise InvalidInput(
            absent,
            "is missing; an entry without the field `type` holds a whole CloudEvents JSON event in `data`",
        )
    if len(members) > MAX_ATTRIBUTES + 1:
        raise InvalidInput("entry", f"has {len(members)} members, over the limit of {MAX_ATTRIBUTES} attributes")
    attributes: dict[str, str] = {}
    for name, raw in members.items():
        if name not in ("data", "data_base64"):
            text = _attribute_text(_attribute_name(name.encode()), bytes(raw))
            if text is not None:
                attributes[name] = text
    return attributes, _structured_data(members, attributes.get("datacontenttype", ""))


def _attribute_text(name: str, raw: bytes) -> str | None:
    """Return an attribute's JSON value (text, a whole number or a boolean) as text; None for null."""
    try:
        value = decode(raw)
    except InvalidInput as error:
        raise InvalidInput(name, error.message) from error
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int)):
        raise InvalidInput(name, f"{quoted(value)} is not an attribute; send text")
    text = str(value)
    size = len(text.encode())
    if size > MAX_ATTRIBUTE_BYTES:
        raise _too_long(name, size)
    return text


def _structured_data(members: Mapping[str, msgspec.Raw], content_type: str) -> bytes:
    plain, encoded = members.get("data"), members.get("data_base64")
    if plain is not None and encoded is not None:
        raise InvalidInput("data", "is given twice; send either `data` or `data_base64`")
    if encoded is not None:
        text = decode(bytes(encoded), limit=MAX_STRUCTURED_BYTES)
        if not isinstance(text, str):
            raise InvalidInput("data", f"`data_base64` is {quoted(text)}; send base64 text")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInput("data", f"`data_base64` is not base64: {error}") from error
    if plain is None:
        raise InvalidInput("data", "is missing; send `data` or `data_base64` in the event")
    if content_type and "json" not in content_type.lower():
        raise InvalidInput("data", f"is JSON, but `datacontenttype` is {quoted(content_type)}; send `data_base64`")
    return bytes(plain)


def _checked(entry_id: str, attributes: dict[str, str], data: bytes, namespace: str) -> Envelope:
    # An empty attribute counts as absent: some writers send every attribute that they know.
    known = {name: value for name, value in attributes.items() if value and name in _KNOWN}
    for name, value in known.items():
        if has_control(value):
            raise InvalidInput(name, f"{quoted(value)} holds a control character; send plain text")
    if known.setdefault("specversion", SPEC_VERSION) != SPEC_VERSION:
        raise InvalidInput("specversion", f"{quoted(known['specversion'])} is not supported; send `1.0`")
    if "replyto" in known:
        _check_reply_address(known["replyto"], namespace)
    known.setdefault("id", entry_id)
    extensions = {name: value for name, value in attributes.items() if name not in _KNOWN}
    return Envelope(data=data, extensions=extensions, **known)


def _check_reply_address(address: str, namespace: str) -> None:
    """Refuse an address inside the namespace: a reply there could be taken for a command."""
    if has_control(address):
        raise InvalidInput("replyto", f"{quoted(address)} holds a control character; send a plain key")
    if address.startswith("@"):
        raise InvalidInput("replyto", f"{quoted(address)} begins with `@`, which is reserved for the runtime")
    if address.startswith(("weft:", f"{namespace}:")):
        raise InvalidInput("replyto", f"{quoted(address)} is inside Weft's namespace; name a key outside it")


def _too_long(name: str, size: int) -> InvalidInput:
    return InvalidInput(name, f"is {size} bytes, over the limit of {MAX_ATTRIBUTE_BYTES} for an attribute")


def _top_level_text(document: bytes, wanted: bytes) -> bytes:
    """Return the text of a top-level member of a possibly malformed JSON object; `wanted` is its name in quotes."""
    found = b""
    depth = 0
    before = last = b""
    for match in _JSON_TOKEN.finditer(document):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and last == b":" and before == wanted and token.startswith(b'"'):
            try:
                value = decode(token)
            except InvalidInput:
                value = None
            found = value.encode() if isinstance(value, str) else b""
        before, last = last, token
    return found
