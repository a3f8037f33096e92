"""Writes what declared functions return, and what they are given, as JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from uuid import UUID

import msgspec
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.declare.declaration import one_line
from runtime_core.errors import InvalidInput, InvalidResult

_SCALARS = frozenset({str, int, bool, type(None)})
_COUNTED = frozenset({int, bool, float, type(None)})
"""Types whose values are counted with what holds them."""
MEASURED = 4
"""A value up to so many times its limit is written, so that the error names its size."""
_LEAVES = (datetime, date, time, timedelta, UUID, Decimal, Enum, PurePath)


def encode(value: object, field: str, limit: int = codec.MAX_DATA_BYTES) -> bytes:
    """`value` as JSON bytes, at most `limit` of them.

    Plain types, dataclasses, TypedDicts, pydantic models, msgspec Structs, sets, dates, UUIDs, decimals, enums
    and paths. Raises InvalidInput(field) for anything else, for NaN, cycles and bytes, and over the limit.
    """
    return _small_enough(_encoded(value, field, limit), field, limit)


def encode_result(value: object) -> bytes:
    """What a tool has returned, as `encode` writes it. Raises InvalidResult for what JSON cannot hold."""
    try:
        data = _encoded(value, "result", codec.MAX_DATA_BYTES)
    except InvalidInput as error:
        raise InvalidResult("result", error.message) from error
    return _small_enough(data, "result", codec.MAX_DATA_BYTES)


def _small_enough(data: bytes, field: str, limit: int) -> bytes:
    if len(data) > limit:
        raise InvalidInput(field, _too_large(f"{len(data):,}", limit))
    return data


def _too_large(size: str, limit: int) -> str:
    return f"is {size} bytes of JSON, over the limit of {limit:,}: store it as a blob and return a reference"


def _encoded(value: object, field: str, limit: int) -> bytes:
    try:
        # A value a little over the limit is written, to name its size; a huge one would take all time and memory.
        if _room_after(value, MEASURED * limit) is not None:
            return codec.encode(value)
        # Unlike the fast encoder, this one gives all that it does not know to the hook, bytes too.
        plainer = _Plainer(limit)
        plainer.count(value)
        writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plainer)
        data = writer.encode(value).encode()
        codec.decode(data, limit=len(data))  # what others would not read back is refused here
    except RecursionError:
        message = f"a {type(value).__name__} that contains itself or is nested too deeply"
        raise InvalidInput(field, message) from None
    except UnicodeEncodeError:
        raise InvalidInput(field, "a text holds half of a surrogate pair: it cannot be written as UTF-8") from None
    except _TooLarge as error:
        raise InvalidInput(field, _too_large(f"more than {error.size:,}", limit)) from None
    except _NotJson as error:
        raise InvalidInput(field, str(error)) from None
    except InvalidInput as error:
        raise InvalidInput(field, error.message) from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(field, f"cannot be written as JSON, {one_line(error)}") from error
    return data


class _NotJson(Exception):
    """A value in the middle of a result cannot be written."""


class _TooLarge(Exception):
    """A value has more than `size` bytes of JSON; it was not written."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _room_after(value: object, room: int) -> int | None:
    """How much of `room` (bytes) is left after a value that the fast encoder writes faithfully.

    None: it would turn NaN into null and bytes into text. The count is at most the JSON's size, so a value that does
    not fit is too large: raises _TooLarge, before anything is written.
    """
    left = _left(value, room)
    if left is not None and left < 0:
        raise _TooLarge(room)
    return left


def _left(value: object, left: int) -> int | None:
    kind = type(value)
    if kind is str:
        return left - len(value)  # type: ignore[arg-type]  # `kind is str` says it
    if kind in _SCALARS:
        return left
    if kind is float:
        return left if math.isfinite(value) else None  # type: ignore[arg-type]  # `kind is float` says it
    # Loops and not `sum(…)`: a generator for each small dict costs more than the look itself.
    if kind is dict:
        left -= 5 * len(value)  # type: ignore[arg-type]  # `kind is dict` says it; `"":1,` is the least
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
        left -= 2 * len(value)  # type: ignore[arg-type]  # `kind` says it; `1,` is the least
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
    """The hook of the slow encoder: brings a value one level nearer to JSON, as long as the whole is small enough."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def __call__(self, value: object) -> object:
        if isinstance(value, Collection) and not isinstance(value, bytes | bytearray | memoryview):
            self._spend(2 * len(value))  # before a copy of it is made
        plain = _plainer(value)
        self.count(plain)
        return plain

    def count(self, value: object) -> None:
        """Count what the encoder will write of a value; other parts of it come to the hook."""
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
