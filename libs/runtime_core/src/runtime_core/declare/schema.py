"""Reads arguments and inputs by their declared types, and makes the JSON schemas of these types."""

from __future__ import annotations

import functools
import inspect
import json
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NotRequired, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

# pydantic reads the TypedDict of the standard library only from Python 3.12 on.
from typing_extensions import TypedDict

from runtime_core.declare.declaration import NO_DEFAULT, Argument, Place, one_line, resolved
from runtime_core.declare.encoding import encode
from runtime_core.errors import ConfigurationError, InvalidInput

Schema = dict[str, object]


def _no_boolean(value: object) -> object:
    # JSON's true is no number; pydantic, as Python, would read it as 1.
    if value is True or value is False:
        raise PydanticCustomError("number_type", "Input should be a number, not a boolean")
    return value


def numbers_only(hint: object) -> object:
    """The same type, in which `int` and `float` do not take booleans.

    Reaches into unions, collections and `Annotated`; classes (models, dataclasses, TypedDicts) keep the rules
    that their author gave them.
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
            # Last in the list runs first; before it, it would hide bounds such as `ge` from the JSON schema.
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

    def __init__(self, adapter: TypeAdapter[object], known: Sequence[str] = ()) -> None:
        self._validate = adapter.validator.validate_json
        self._known = known

    def decode(self, data: bytes, field: str) -> object:
        """The value in `data` (JSON). Raises InvalidInput that names the part, as in `arguments.query`."""
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
            text = "is missing"
        elif kind == "extra_forbidden":
            known = f"; known are {', '.join(self._known)}" if self._known and len(location) == 1 else ""
            text = f"is not known{known}"
        else:
            text = f"{_line(first['msg'])}, got {_quoted(first['input'])}"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return InvalidInput(field, text + more)


class Arguments:
    """The arguments of one function: a JSON object to keyword arguments."""

    __slots__ = ("_reader", "_schema")

    def __init__(self, what: str, hints: Mapping[str, object], defaults: Mapping[str, object], place: Place) -> None:
        """`hints` gives each argument's type, `defaults` those that may be left out."""
        fields: dict[str, object] = {}
        for name, hint in hints.items():
            if isinstance(defaults.get(name), FieldInfo):
                raise ConfigurationError(
                    f"{what} ({place}): argument {name!r} has Field(…) as its default: write "
                    f"{name}: Annotated[…, Field(…)] = default"
                )
            exact = numbers_only(hint)
            fields[name] = NotRequired[exact] if name in defaults else exact
        # A TypedDict and not a model: any argument name is allowed, and the call takes a dict anyhow.
        # mypy wants literal fields; these are known at run time only.
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
        """The keyword arguments in `data` (a JSON object). Raises InvalidInput that names the argument."""
        found = self._reader.decode(data, "arguments")
        assert isinstance(found, dict)  # what a TypedDict validates to
        return found

    def schema(self) -> Schema:
        """The JSON schema of the arguments: an object."""
        return self._schema


class Value:
    """One input: a JSON value of a declared type."""

    __slots__ = ("_default", "_reader", "_schema", "adapter")

    def __init__(self, what: str, hint: object, place: Place, *, default: object = NO_DEFAULT) -> None:
        """`default` is used where the input is null."""
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
        """The value in `data` (JSON). Raises InvalidInput that names the part, as in `input.topic`."""
        if self._default is not NO_DEFAULT and data.strip() == b"null":
            return self._default
        return self._reader.decode(data, field)

    def schema(self) -> Schema:
        """The JSON schema of the input."""
        return self._schema


class NoInput:
    """The input of an agent that takes none: null."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def decode(self, data: bytes) -> None:
        """None. Raises InvalidInput for anything but null."""
        if data.strip() not in (b"null", b""):
            raise InvalidInput("input", f"{self._what} takes no input: leave it out")

    def schema(self) -> Schema:
        """The JSON schema of null."""
        return {"type": "null"}


def arguments_reader(
    what: str, function: Callable[..., object], arguments: Sequence[Argument], place: Place
) -> Arguments:
    """What reads these arguments of `function`. Raises ConfigurationError for types that JSON cannot give."""
    hints = {
        argument.name: resolved(what, argument.name, argument.annotation, function, place) for argument in arguments
    }
    defaults = {a.name: a.default for a in arguments if a.default is not NO_DEFAULT}
    return Arguments(what, hints, defaults, place)


def result_schema(what: str, function: Callable[..., object], place: Place) -> Schema | None:
    """The JSON schema of what `function` says it returns; None where it does not say, or it has none.

    Only information: a result is checked when it is written.
    """
    returned = inspect.signature(function).return_annotation
    if returned is NO_DEFAULT:
        return None
    try:
        hint = resolved(what, "return", returned, function, place)
        adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]  # a type known at run time only
        return adapter.json_schema(mode="serialization")
    except (ConfigurationError, PydanticUserError, TypeError, NameError):
        return None


def tagged_schema(messages: Mapping[str, TypeAdapter[object]]) -> Schema:
    """The JSON schema of `{"type": name, "data": …}` over these messages; with a single one, also of its data."""
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
        adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]  # a type known at run time only
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
            f"{what} ({place}): no JSON schema can be made of its types, {one_line(error, 160)}: "
            "use types that have one"
        ) from error


def _path(location: tuple[int | str, ...], data: bytes, *, absent: bool) -> list[str]:
    """The parts of a location that exist in the data: pydantic adds names of union members and validators."""
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


def _line(text: str) -> str:
    return " ".join(text.split())


def _quoted(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _type_text(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _json_or_none(default: object) -> object:
    try:
        found: object = json.loads(encode(default, "default"))
    except InvalidInput:
        return None
    return found
