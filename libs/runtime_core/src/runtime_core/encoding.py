"""Writes what declared functions return, and what they are given, as JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from uuid import UUID

import msgspec
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.declaration import one_line
from runtime_core.errors import InvalidInput, InvalidResult

_SCALARS = frozenset({str, int, bool, type(None)})
_LEAVES = (datetime, date, time, timedelta, UUID, Decimal, Enum, PurePath)


def encode(value: object, field: str, limit: int = codec.MAX_DATA_BYTES) -> bytes:
    """`value` as JSON bytes, at most `limit` of them.

    Plain types, dataclasses, TypedDicts, pydantic models, msgspec Structs, sets, dates, UUIDs, decimals, enums
    and paths. Raises InvalidInput(field) for anything else, for NaN, cycles and bytes, and over the limit.
    """
    return _small_enough(_encoded(value, field), field, limit)


def encode_result(value: object) -> bytes:
    """What a tool has returned, as `encode` writes it. Raises InvalidResult for what JSON cannot hold."""
    try:
        data = _encoded(value, "result")
    except InvalidInput as error:
        raise InvalidResult("result", error.message) from error
    return _small_enough(data, "result", codec.MAX_DATA_BYTES)


def _small_enough(data: bytes, field: str, limit: int) -> bytes:
    if len(data) > limit:
        raise InvalidInput(
            field,
            f"is {len(data):,} bytes of JSON, over the limit of {limit:,}: store it as a blob and return a reference",
        )
    return data


def _encoded(value: object, field: str) -> bytes:
    try:
        if _is_plain(value):
            return codec.encode(value)
        # Unlike the fast encoder, this one gives all that it does not know to the hook, bytes too.
        writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plainer)
        data = writer.encode(value).encode()
        codec.decode(data, limit=len(data))  # what others would not read back is refused here
    except RecursionError:
        message = f"a {type(value).__name__} that contains itself or is nested too deeply"
        raise InvalidInput(field, message) from None
    except UnicodeEncodeError:
        raise InvalidInput(field, "a text holds half of a surrogate pair: it cannot be written as UTF-8") from None
    except _NotJson as error:
        raise InvalidInput(field, str(error)) from None
    except InvalidInput as error:
        raise InvalidInput(field, error.message) from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(field, f"cannot be written as JSON, {one_line(error)}") from error
    return data


class _NotJson(Exception):
    """A value in the middle of a result cannot be written."""


def _is_plain(value: object) -> bool:
    """Whether the fast encoder writes this faithfully: it would turn NaN into null and bytes into text."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is float:
        return math.isfinite(value)  # type: ignore[arg-type]  # `kind is float` says it
    # Loops and not `all(…)`: a generator for each small dict costs more than the look itself.
    if kind is dict:
        for name, part in value.items():  # type: ignore[attr-defined]  # `kind is dict` says it
            if type(name) is not str or not (type(part) in _SCALARS or _is_plain(part)):
                return False
        return True
    if kind is list or kind is tuple:
        for part in value:  # type: ignore[attr-defined]  # noqa: SIM110  # `kind` says it; see above
            if not (type(part) in _SCALARS or _is_plain(part)):
                return False
        return True
    return False


def _plainer(value: object) -> object:
    """One level nearer to JSON; its parts come back here if they need it."""
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
        # Sets of texts have another order in each process; a replay compares bytes.
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if inspect.iscoroutine(value) or inspect.isawaitable(value):
        raise _NotJson(f"{type(value).__name__} was not awaited: await it and return what it gives")
    if isinstance(value, Iterator):
        raise _NotJson(f"{type(value).__name__} can be read only once: return a list")
    try:
        return to_jsonable_python(value)
    except Exception:  # a serializer of the user's may fail in any way
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise _NotJson(
            f"{name} cannot be written as JSON: return plain types, dataclasses or models, or a reference"
        ) from None
