"""A result that is too large to travel: where it lies, and how to read it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MARK = "weft.reference"
"""The member by which a JSON object is known to be a Reference; it holds the URL."""


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result in the blob store. Its content never changes; it goes when its retention ends, or with its task.

    As an argument of an engine function it is read where the function runs, unless the argument's type is Reference.
    """

    url: str = msgspec.field(name=MARK)
    """`file:///…`, `s3://…`: of a JSON file, or of a folder of Parquet files."""
    bytes: int
    """Its size."""
    format: Literal["json", "parquet"] = "json"
    digest: str = ""
    """`sha256:…` of a JSON file."""
    rows: int | None = None
    """Of a table."""

    def to_value(self) -> dict[str, Any]:  # Any: JSON
        """Itself as a JSON object."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def from_value(cls, value: object) -> Reference | None:
        """The reference that a JSON value is; None for any other value."""
        if not isinstance(value, dict) or MARK not in value:
            return None
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError:
            return None
