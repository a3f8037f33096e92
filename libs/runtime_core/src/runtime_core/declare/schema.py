"""Typed JSON: reads arguments and inputs by their declared types, encodes results, and builds JSON schemas."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin
from uuid import UUID

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

# pydantic reads the TypedDict of the standard library only from Python 3.12 on.
from typing_extensions import TypedDict

from runtime_core.base.text import shortened
from runtime_core.declare.declaration import NO_DEFAULT, Argument, Limit, Place, one_line, resolved
from runtime_core.errors import ConfigurationError, InvalidInput, InvalidResult
from runtime_core.telemetry.logs import ends_users_code
from runtime_core.telemetry.redaction import redactor
from runtime_core.wire import codec

_SCALARS = frozenset({str, int, bool, type(None)})
_COUNTED = frozenset({int, bool, float, type(None)})
"""Types whose size is counted with their container."""
MAX_MEASURED_FACTOR = 4
"""A value up to this many times its limit is encoded, so that the error can name its size."""
_LEAVES = (datetime, date, time, timedelta, UUID, Decimal, Enum, PurePath)


def encode(value: object, field: str, limit: int = codec.MAX_DATA_BYTES) -> bytes:
    """Encode a value as JSON of at most `limit` bytes.

    Supports plain types, dataclasses, TypedDicts, pydantic models, msgspec Structs, sets, dates, UUIDs, decimals, enums
    and paths. Raises InvalidInput(field) for anything else, for NaN, cycles and bytes, and over the limit.
    """
    data = _encoded(value, field, limit)
    if len(data) > limit:
        raise _over_limit(data, field, limit)
    return data


@ends_users_code
def users_code_ended() -> None:
    """Let other threads run where users' code returns: Python changes threads at calls. If that code kept the global
    lock in C code to its end, the loop's watch finds the thread here, and so its delivery.
    """


def encode_result(value: object) -> bytes:
    """Encode a tool's result as `encode` does. Raises InvalidResult for a value that JSON cannot represent."""
    try:
        data = _encoded(value, "result", codec.MAX_DATA_BYTES)
    except InvalidInput as error:
        raise InvalidResult("result", error.message) from error
    if len(data) > codec.MAX_DATA_BYTES:
        raise _over_limit(data, "result", codec.MAX_DATA_BYTES)
    return data


def _over_limit(data: bytes, field: str, limit: int) -> InvalidInput:
    return InvalidInput(field, _too_large(f"{len(data):,}", limit))


def _encoded(value: object, field: str, limit: int) -> bytes:
    try:
        # Encode a value slightly over the limit, to name its size, but not a huge one.
        left = _left(value, MAX_MEASURED_FACTOR * limit)
        if left is not None and left < 0:
            raise _TooLarge(MAX_MEASURED_FACTOR * limit)
        data = codec.encode(value) if left is not None else _plainly_encoded(value, limit)
    except RecursionError:
        message = f"is a {type(value).__name__} that contains itself or is nested too deeply"
        raise InvalidInput(field, message) from None
    except UnicodeEncodeError:
        raise InvalidInput(field, "contains an unpaired surrogate, which UTF-8 cannot encode") from None
    except _TooLarge as error:
        raise InvalidInput(field, _too_large(f"more than {error.size:,}", limit)) from None
    except _NotJson as error:
        raise InvalidInput(field, str(error)) from None
    except InvalidInput as error:
        raise InvalidInput(field, error.message) from None
    except (TypeError, ValueError) as error:
        if codec.has_too_many_digits(error):
            raise InvalidInput(field, codec.HUGE_INTEGER) from error
        raise InvalidInput(field, f"cannot be written as JSON, {one_line(error)}") from error
    return data


def _plainly_encoded(value: object, limit: int) -> bytes:
    """Encode a value that the fast encoder would change. This encoder passes every unknown type to the hook, even
    bytes."""
    if sys.get_int_max_str_digits() != sys.int_info.default_max_str_digits:
        codec.refuse_huge_integers(value)
    plainer = _Plainer(limit)
    plainer.count(value)
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plainer)
    data = writer.encode(value).encode()
    codec.decode(data, limit=len(data))  # reject what other readers would reject
    return data


def _too_large(size: str, limit: int) -> str:
    return f"is {size} bytes of JSON, over the limit of {limit:,}: store it as a blob and return a reference"


class _NotJson(Exception):
    """Raised for a part of a value that cannot be encoded."""


class _TooLarge(Exception):
    """Raised for a value with more than `size` bytes of JSON, before it is encoded."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _left(value: object, left: int) -> int | None:
    """Return `left` minus the least number of bytes that a value takes as JSON; any negative number if that is more.

    None: the fast encoder would change the value, since it turns NaN into null and bytes into text.
    """
    kind = type(value)
    if kind is str:
        return left - len(value)  # type: ignore[arg-type]  # `kind is str` implies it
    if kind in _SCALARS:
        return left
    if kind is float:
        return left if math.isfinite(value) else None  # type: ignore[arg-type]  # `kind is float` implies it
    # Loops and not `sum(…)`: a generator per small dict costs more than the check itself.
    if kind is dict:
        left -= 5 * len(value)  # type: ignore[arg-type]  # `kind is dict` implies it; `"":1,` is the minimum
        for name, part in value.items():  # type: ignore[attr-defined]  # see above
            if type(name) is not str:
                return None
            left -= len(name)
            kind = type(part)
            if kind is str:
                left -= len(part)
            elif kind not in _SCALARS:
                rest = _left(part, left)
                if rest is None:
                    return None
                left = rest
            if left < 0:
                return left
        return left
    if kind is list or kind is tuple:
        left -= 2 * len(value)  # type: ignore[arg-type]  # `kind` implies it; `1,` is the minimum
        for part in value:  # type: ignore[attr-defined]  # see above
            kind = type(part)
            if kind is str:
                left -= len(part)
            elif kind not in _SCALARS:
                rest = _left(part, left)
                if rest is None:
                    return None
                left = rest
            if left < 0:
                return left
        return left
    return None


class _Plainer:
    """The hook of the slow encoder: converts one level of a value, and stops once the total is too large."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def __call__(self, value: object) -> object:
        if isinstance(value, Collection) and not isinstance(value, bytes | bytearray | memoryview):
            self._spend(2 * len(value))  # before copying it
        plain = _plainer(value)
        self.count(plain)
        return plain

    def count(self, value: object) -> None:
        """Count what the encoder writes of a value itself; the hook gets the other parts."""
        if isinstance(value, str):
            self._spend(len(value))
        elif isinstance(value, dict):
            self._spend(5 * len(value))
            for name, part in value.items():
                self._spend(len(name) if isinstance(name, str) else 1)
                if type(part) not in _COUNTED:
                    self.count(part)
        elif isinstance(value, list | tuple):
            self._spend(2 * len(value))
            for part in value:
                if type(part) not in _COUNTED:
                    self.count(part)

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _TooLarge(self._limit)


def _plainer(value: object) -> object:
    """Convert one level of a value; the encoder passes the parts that need it back here."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {written: getattr(value, name) for written, name in names}
    if isinstance(value, bytes | bytearray | memoryview):
        raise _NotJson(
            f"{type(value).__name__} cannot be written as JSON: encode it as text, or store it and return a reference"
        )
    if isinstance(value, _LEAVES):
        return to_jsonable_python(value)
    if isinstance(value, Set):
        # A set of strings has a different order in each process, and a replay compares bytes.
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if inspect.iscoroutine(value) or inspect.isawaitable(value):
        raise _NotJson(f"{type(value).__name__} was not awaited: await it and return its result")
    if isinstance(value, Iterator):
        raise _NotJson(f"{type(value).__name__} can be read only once: return a list")
    try:
        return to_jsonable_python(value)
    except Exception:  # a user's serializer may raise anything
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise _NotJson(
            f"{name} cannot be written as JSON: return plain types, dataclasses or models, or a reference"
        ) from None


Schema = dict[str, object]


def _no_boolean(value: object) -> object:
    # JSON's true is not a number, but pydantic reads it as 1, like Python.
    if value is True or value is False:
        raise PydanticCustomError("number_type", "Input should be a number, not a boolean")
    return value


def numbers_only(hint: object) -> object:
    """Return the type with `int` and `float` that reject booleans.

    Covers unions, collections and `Annotated`. Classes (models, dataclasses, TypedDicts) keep their own rules.
    """
    if hint is int or hint is float:
        return Annotated[hint, BeforeValidator(_no_boolean)]
    origin = get_origin(hint)
    if origin is None or origin is Literal or origin is type:
        return hint
    arguments = get_args(hint)
    if origin is Annotated:
        inner, *metadata = arguments
        if inner is int or inner is float:
            # The last one runs first. Elsewhere it would hide bounds such as `ge` from the JSON schema.
            return Annotated[(inner, *metadata, BeforeValidator(_no_boolean))]
        return Annotated[(numbers_only(inner), *metadata)]
    parts = tuple(numbers_only(argument) for argument in arguments)
    if all(part is argument for part, argument in zip(parts, arguments, strict=True)):
        return hint
    if origin is Union or origin is types.UnionType:
        return functools.reduce(operator.or_, parts)
    rebuilt: object = origin[parts]
    return rebuilt


class Reader:
    """Reads one JSON value of a given type."""

    __slots__ = ("_known", "_validate")

    def __init__(self, adapter: TypeAdapter[object], known: Sequence[str] = (), *, strict: bool = False) -> None:
        """`strict`: do not convert, as from text to a number."""
        validate = adapter.validator.validate_json
        self._validate = functools.partial(validate, strict=True) if strict else validate
        self._known = known

    def decode(self, data: bytes, field: str) -> object:
        """Return the value of JSON. Raises InvalidInput with the path of the wrong part, as in `arguments.query`."""
        try:
            return self._validate(data)
        except ValidationError as error:
            raise self._refusal(error, data, field) from None

    def _refusal(self, error: ValidationError, data: bytes, name: str) -> InvalidInput:
        errors = error.errors(include_url=False, include_context=False)
        first = errors[0]
        kind, location = first["type"], first["loc"]
        if kind == "json_invalid":
            return InvalidInput(name, _line(first["msg"]))
        field = ".".join((name, *_path(location, data, absent=kind == "missing")))
        if kind == "missing":
            text = f"is missing{_close_to(str(location[-1]), first['input'])}"
        elif kind == "extra_forbidden":
            known = f"; choose from {', '.join(self._known)}" if self._known and len(location) == 1 else ""
            text = f"is not known{known}"
        else:
            text = f"{_line(first['msg'])}, got {_quoted(first['input'])}"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return InvalidInput(field, text + more)


class Arguments:
    """Reads a JSON object as the keyword arguments of one function."""

    __slots__ = ("_reader", "_schema")

    def __init__(self, what: str, hints: Mapping[str, object], defaults: Mapping[str, object], place: Place) -> None:
        """`hints` maps names to types, `defaults` maps names of optional arguments to values."""
        fields: dict[str, object] = {}
        for name, hint in hints.items():
            if isinstance(defaults.get(name), FieldInfo):
                raise ConfigurationError(
                    f"{what} ({place}): argument {name!r} has Field(…) as its default: write "
                    f"{name}: Annotated[…, Field(…)] = default"
                )
            exact = numbers_only(hint)
            fields[name] = NotRequired[exact] if name in defaults else exact
        # A TypedDict and not a model: it allows any argument name, and the call needs a dict anyway.
        # mypy requires literal fields; these are known only at run time.
        keyed = TypedDict("Arguments", fields)  # type: ignore[misc]
        settings = ConfigDict(extra="forbid", allow_inf_nan=False)
        keyed.__pydantic_config__ = settings  # type: ignore[attr-defined]  # pydantic's documented hook
        adapter = _adapter(what, keyed, place, hints)
        self._reader = Reader(adapter, tuple(hints))
        self._schema = _schema_of(what, adapter, place)
        self._schema.pop("title", None)
        properties = self._schema.get("properties")
        if isinstance(properties, dict):
            for name, default in defaults.items():
                with_default = _json_or_none(default)
                if with_default is not None:
                    properties[name]["default"] = with_default

    def decode(self, data: bytes) -> dict[str, object]:
        """Return the keyword arguments of a JSON object. Raises InvalidInput that names the argument."""
        found = self._reader.decode(data, "arguments")
        assert isinstance(found, dict)  # a TypedDict validates to a dict
        return found

    def schema(self) -> Schema:
        """Return the JSON schema of the arguments, an object."""
        return self._schema


class ValueReader:
    """Reads an input of a declared type."""

    __slots__ = ("_default", "_reader", "_schema", "adapter")

    def __init__(self, what: str, hint: object, place: Place, *, default: object = NO_DEFAULT) -> None:
        """`default` replaces an input of null."""
        self.adapter = _adapter(what, numbers_only(hint), place, {})
        self._reader = Reader(self.adapter)
        self._default = default
        self._schema = _schema_of(what, self.adapter, place)
        if default is not NO_DEFAULT:
            definitions = self._schema.pop("$defs", None)
            self._schema = {"anyOf": [self._schema, {"type": "null"}]}
            if definitions is not None:
                self._schema["$defs"] = definitions

    def decode(self, data: bytes, field: str = "input") -> object:
        """Return the value of JSON. Raises InvalidInput with the path of the wrong part, as in `input.topic`."""
        if self._default is not NO_DEFAULT and data.strip() == b"null":
            return self._default
        return self._reader.decode(data, field)

    def schema(self) -> Schema:
        """Return the JSON schema of the input."""
        return self._schema


class NoInput:
    """Reads the input of an agent without one: null."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def decode(self, data: bytes) -> None:
        """Return None. Raises InvalidInput for anything but null."""
        if data.strip() not in (b"null", b""):
            raise InvalidInput("input", f"{self._what} takes no input: remove it")

    def schema(self) -> Schema:
        """Return the JSON schema of null."""
        return {"type": "null"}


def arguments_reader(
    what: str, function: Callable[..., object], arguments: Sequence[Argument], place: Place
) -> Arguments:
    """Return the reader of these arguments. Raises ConfigurationError for types that JSON cannot represent."""
    hints = {
        argument.name: resolved(what, argument.name, argument.annotation, function, place) for argument in arguments
    }
    defaults = {a.name: a.default for a in arguments if a.default is not NO_DEFAULT}
    return Arguments(what, hints, defaults, place)


def result_schema(what: str, function: Callable[..., object], place: Place) -> Schema | None:
    """Return the JSON schema of a function's return type; None if it has no annotation or no schema.

    The schema is only informative: results are checked when they are encoded.
    """
    returned = inspect.signature(function).return_annotation
    if returned is NO_DEFAULT:
        return None
    try:
        hint = resolved(what, "return", returned, function, place)
        adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]  # a type known only at run time
        return adapter.json_schema(mode="serialization")
    except (ConfigurationError, PydanticUserError, TypeError, NameError):
        return None


def result_reader(what: str, function: Callable[..., object], place: Place) -> Reader | None:
    """Return the reader of a function's results, which turns their JSON into its return type.

    None: the JSON itself has that type, or the type is unknown or cannot be read from JSON.
    """
    returned = inspect.signature(function).return_annotation
    if returned is NO_DEFAULT:
        return None
    try:
        hint = resolved(what, "return", returned, function, place)
        if is_json(hint):
            return None
        return Reader(TypeAdapter(hint))  # type: ignore[arg-type]  # a type known only at run time
    except (ConfigurationError, PydanticUserError, TypeError, NameError):
        return None


_JSON_TYPES = (object, Any, None, type(None), bool, int, float, str, list, dict, Sequence, Mapping)


def is_json(hint: object) -> bool:
    """Return whether decoded JSON already has this type."""
    if any(hint is plain for plain in _JSON_TYPES):
        return True
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return all(isinstance(argument, str | int | None) and not isinstance(argument, Enum) for argument in arguments)
    if origin is dict or origin is Mapping:
        return arguments[0] is str and is_json(arguments[1])
    if origin in (list, Sequence, Union, types.UnionType):
        return all(is_json(argument) for argument in arguments)
    return False


def check_limited(what: str, limits: Sequence[Limit], schema: Schema, place: Place) -> None:
    """Raise ConfigurationError if a limit counts by a part of an input, or an argument, that this schema lacks."""
    for limit in limits:
        path = limit.per.split(".")[1:]
        if (lacking := _lacking(schema, path, schema.get("$defs", {}))) is not None:
            part, known = lacking
            there = f"give one of {', '.join(known)}" if known else "only an object has named fields"
            raise ConfigurationError(f"{what} ({place}) has a limit per {limit.per!r}, but no {part!r} there: {there}")


def _lacking(schema: Any, path: Sequence[str], shared: Any) -> tuple[str, list[str]] | None:  # Any: a JSON schema
    """Return the first part of the path that no value has, and the known ones there; None: all may be there."""
    if not path:
        return None
    schema = shared.get(str(schema["$ref"]).rpartition("/")[2], {}) if "$ref" in schema else schema
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        found = [_lacking(choice, path, shared) for choice in choices]
        return None if None in found else max(filter(None, found), key=lambda lacking: len(lacking[1]))
    properties = schema.get("properties", {})
    if path[0] in properties:
        return _lacking(properties[path[0]], path[1:], shared)
    anything = not properties and schema.get("type") in (None, "object") and "additionalProperties" not in schema
    return None if anything or schema.get("additionalProperties") else (path[0], list(properties))


def tagged_schema(messages: Mapping[str, TypeAdapter[object]]) -> Schema:
    """Return the JSON schema of `{"type": name, "data": …}` for these messages; for a single one, or of its data
    alone."""
    mode: Literal["validation"] = "validation"
    inputs = [(name, mode, adapter) for name, adapter in messages.items()]
    schemas, shared = TypeAdapter.json_schemas(inputs)
    choices: list[Schema] = []
    for name in messages:
        data = schemas[name, mode]
        choices.append(
            {
                "type": "object",
                "properties": {"type": {"const": name}, "data": data},
                "required": ["type", "data"],
                "additionalProperties": False,
            }
        )
        if len(messages) == 1:
            choices.append(data)
    schema: Schema = {"anyOf": choices} if len(choices) > 1 else choices[0]
    return {**schema, **shared}


def _adapter(what: str, hint: object, place: Place, parts: Mapping[str, object]) -> TypeAdapter[object]:
    try:
        adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]  # a type known only at run time
    except (PydanticUserError, TypeError, NameError) as error:
        for name, part in parts.items():
            _adapter(f"{what}, argument {name!r}", part, place, {})
        raise ConfigurationError(
            f"{what} ({place}): a value of type {_type_text(hint)} cannot be read from JSON, {one_line(error, 160)}: "
            "use plain types, dataclasses, TypedDicts or pydantic models"
        ) from error
    return adapter


def _schema_of(what: str, adapter: TypeAdapter[object], place: Place) -> Schema:
    try:
        return adapter.json_schema()
    except PydanticUserError as error:
        raise ConfigurationError(
            f"{what} ({place}): its types have no JSON schema, {one_line(error, 160)}: use types that have one"
        ) from error


def _path(location: tuple[int | str, ...], data: bytes, *, absent: bool) -> list[str]:
    """Return the parts of a location that exist in the data: pydantic adds names of union members and validators."""
    try:
        here: object = json.loads(data)
    except ValueError:
        return []
    parts = []
    for index, part in enumerate(location):
        if isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        elif isinstance(here, dict):
            if part in here:
                here = here[part]
            elif not absent or index < len(location) - 1:
                continue
        else:
            continue
        parts.append(str(part))
    return parts


def _close_to(missing: str, given: object) -> str:
    """Return which member of an object looks like a misspelt name; empty if none does."""
    names = [name for name in given if isinstance(name, str)] if isinstance(given, dict) else []
    close = difflib.get_close_matches(missing, names, 1)
    return f"; there is {_quoted(close[0])}" if close else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def _quoted(value: object) -> str:
    # Redact before shortening: half a secret matches no rule.
    return shortened(redactor().start(repr(value)), 60)


def _type_text(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _json_or_none(default: object) -> object:
    try:
        found: object = json.loads(encode(default, "default"))
    except InvalidInput:
        return None
    return found
