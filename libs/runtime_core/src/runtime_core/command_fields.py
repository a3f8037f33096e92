"""Reads the data of commands, field by field. A mistake is an InvalidInput that names its path and quotes the value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from runtime_core import codec
from runtime_core.codec import quoted
from runtime_core.envelope import Envelope
from runtime_core.errors import InvalidInput
from runtime_core.identifiers import MAX_NAME_CHARACTERS, has_control


def data_of(envelope: Envelope) -> dict[str, object]:
    """The data of a command, which is an object."""
    return as_object("data", codec.decode(envelope.data, envelope.datacontenttype))


def refuse_unknown(path: str, data: Mapping[str, object], known: Collection[str]) -> None:
    """Raises InvalidInput for a member that is none of these, named by its path."""
    for name in data:
        if name not in known:
            # The field is a path of plain words wherever it is shown.
            raise InvalidInput(f"{path}.{quoted(name)[1:-1]}", f"unknown; known are {', '.join(known)}")


def as_object(path: str, value: object) -> dict[str, object]:
    """Raises InvalidInput for what is no object."""
    if not isinstance(value, dict):
        raise InvalidInput(path, f"{quoted(value)} is not an object")
    return value


def optional_object(path: str, value: object) -> dict[str, object]:
    """An optional object; null counts as absent, which is an empty one."""
    return {} if value is None else as_object(path, value)


def checked_text(path: str, value: object) -> str:
    """A short text. Raises InvalidInput."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARACTERS or has_control(value):
        raise InvalidInput(
            path,
            f"{quoted(value)} is not text of 1 to {MAX_NAME_CHARACTERS} characters, none of them a control",
        )
    return value


def optional_name(data: Mapping[str, object], field: str) -> str:
    """An optional text; null counts as absent."""
    value = data.get(field)
    return "" if value is None else checked_text(f"data.{field}", value)


def required_name(data: Mapping[str, object], field: str) -> str:
    """A text that must be there."""
    if data.get(field) is None:
        raise InvalidInput(f"data.{field}", "is missing")
    return optional_name(data, field)


def optional_whole(conf: Mapping[str, object], field: str, most: int) -> int | None:
    """An optional whole number from 1 to `most`, in `data.conf`."""
    value = conf.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(f"data.conf.{field}", f"{quoted(value)} is not a whole number from 1 to {most}")
    return value


def optional_positive(
    conf: Mapping[str, object], field: str, most: int | None, *, or_zero: bool = False
) -> float | None:
    """An optional number above 0, or from 0 up, at most `most`, in `data.conf`; None: without bound."""
    value = conf.get(field)
    if value is None:
        return None
    limit = math.inf if most is None else most
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= limit or (value == 0 and or_zero))
    ):
        return float(value)
    lower = "from 0 up" if or_zero else "above 0"
    upper = "" if most is None else f" and at most {most}"
    raise InvalidInput(f"data.conf.{field}", f"{quoted(value)} is not a number {lower}{upper}")
