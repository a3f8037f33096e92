"""Values of a context: JSON, and sets of JSON scalars; how they are compared and written."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from runtime_core.errors import InvalidInput


class _Missing:
    """No value, where None is one."""

    def __repr__(self) -> str:
        return "MISSING"

    def __copy__(self) -> _Missing:
        return self

    def __deepcopy__(self, _memo: object) -> _Missing:
        return self


MISSING: Final = _Missing()
"""Stands for a key that is not there, or was deleted."""

_SCALARS = (str, int, bool, type(None))
_SET = "$set"
_ESCAPED = "$object"
_MISSING = "$missing"


def checked(value: object, field: str) -> object:
    """Return `value`, with lists for tuples. InvalidInput for what is neither JSON nor a set of scalars."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        if isinstance(value, dict):
            if not all(isinstance(name, str) for name in value):
                raise InvalidInput(field, "has a member whose name is no text: use text names, as JSON does")
            return {name: checked(part, f"{field}.{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [checked(part, f"{field}[{at}]") for at, part in enumerate(value)]
        if isinstance(value, set | frozenset):
            if all(type(part) in (*_SCALARS, float) for part in value):
                return set(value)
            raise InvalidInput(field, "is a set of more than scalars: use a list")
    except RecursionError:
        raise InvalidInput(field, "contains itself or is nested too deeply: put plain JSON values") from None
    raise InvalidInput(
        field, f"{type(value).__name__} cannot be kept: put JSON values, or sets of texts and numbers; encode the rest"
    )


def checked_key(key: object) -> str:
    """The name of a value. InvalidInput for what is no text: a copy of it would have another name."""
    if not isinstance(key, str):
        raise InvalidInput("key", f"{key!r} is no text: name values by texts")
    return key


def same(one: object, other: object) -> bool:
    """Whether two values are equal as JSON is: `1` is not `True`."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def plain(value: Any) -> Any:  # Any: the user's own values
    """Return the value as JSON; sets and what is missing are written as objects with one name that begins with `$`."""
    if value is MISSING:
        return {_MISSING: True}
    if isinstance(value, set | frozenset):
        return {_SET: sorted(value, key=msgspec.json.encode)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        made = {name: plain(part) for name, part in value.items()}
        # A user's own object that looks like one of ours.
        return {_ESCAPED: made} if len(made) == 1 and next(iter(made)).startswith("$") else made
    return value


def from_plain(value: Any) -> Any:  # Any: as above
    """The value that `plain` was given."""
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (name, part), *_ = value.items()
        if name == _MISSING:
            return MISSING
        if name == _SET:
            return set(part)
        if name == _ESCAPED:
            return {inner: from_plain(each) for inner, each in part.items()}
    return {name: from_plain(part) for name, part in value.items()}
