"""A result that is too large to travel: where it lies, and how to read it."""

from __future__ import annotations

import builtins
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MARK = "weft.reference"
"""The member by which a JSON object is known to be a Reference; it holds the URL."""
_MARKED = f'"{MARK}"'.encode()


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

    def load(self, store: str | None = None) -> Any:  # Any: the JSON that was stored, or a pyarrow Table
        """Read it: the value, of Parquet a pyarrow Table.

        Blocks: in an agent, `await asyncio.to_thread(reference.load)`, which needs no step, since it gives the same
        each time; or inside of `ctx.step`, where only what is made of the value is to be recorded.

        `store` is the URL of the blob store; None: the one of this process (`WEFT_BLOB_URL`). Raises InvalidInput
        (`reference`) where it lies elsewhere, is gone, or is not what was stored.
        """
        if self.format == "parquet":
            return self._found(lambda blobs: blobs.read_table(self.url), store)
        try:
            return msgspec.json.decode(self.read(store))
        except msgspec.DecodeError as error:
            raise InvalidInput("reference", f"{self.url!r} is not JSON: {error}") from None

    def read(self, store: str | None = None) -> builtins.bytes:
        """The bytes of a JSON file, checked by their digest. Blocks; raises as `load`."""
        if self.format == "parquet":
            raise InvalidInput("reference", f"{self.url!r} is a folder of Parquet files: use load()")
        data: builtins.bytes = self._found(lambda blobs: blobs.read(self.url), store)
        if self.digest and self.digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
            raise InvalidInput("reference", f"{self.url!r} is not what was stored: its digest differs")
        return data

    def _found(self, read: Callable[[Any], Any], store: str | None) -> Any:  # Any: a BlobStore, and what it gives
        from runtime_core.blobs.store import open_blobs
        from runtime_core.blobs.urls import blob_url, path_below

        store = blob_url(os.environ) if store is None else store
        path_below(store, self.url)
        try:
            return read(open_blobs(store))
        except FileNotFoundError:
            raise InvalidInput(
                "reference", f"{self.url!r} is gone: its retention has ended, or its task was deleted"
            ) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_read, core_schema.is_instance_schema(cls))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: object, handler: object) -> dict[str, Any]:  # Any: a JSON schema
        return {
            "type": "object",
            "properties": {MARK: {"type": "string"}, "bytes": {"type": "integer"}},
            "required": [MARK, "bytes"],
        }


def has_references(data: bytes) -> bool:
    """Whether JSON may hold references; a quick look."""
    return _MARKED in data


def replaced(value: object, by: Callable[[Reference], object]) -> object:
    """A JSON value in which each reference is what `by` makes of it."""
    if isinstance(value, list):
        return [replaced(part, by) for part in value]
    if isinstance(value, dict):
        reference = Reference.from_value(value)
        if reference is not None:
            return by(reference)
        return {name: replaced(part, by) for name, part in value.items()}
    return value


def referenced_urls(data: bytes) -> Iterator[object]:
    """What JSON names as URLs of references, well formed or not."""
    if not has_references(data):
        return
    left: list[object] = [msgspec.json.decode(data)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if MARK in value:
                yield value[MARK]
            left += value.values()
        elif isinstance(value, list):
            left += value


def with_references(value: object, data: bytes) -> object:
    """The value of `data` (JSON) with a Reference in the place of each that it holds as an object."""
    return replaced(value, lambda reference: reference) if has_references(data) else value


def mentions_reference(hint: object) -> bool:
    """Whether a type takes references as they are: Reference itself, or as in `list[Reference]`."""
    return hint is Reference or any(mentions_reference(part) for part in get_args(hint))


def _read(value: object) -> object:
    if isinstance(value, Reference):
        return value
    found = Reference.from_value(value)
    if found is None:
        raise ValueError(f'no reference to a result: an object with "{MARK}" and "bytes"')
    return found
