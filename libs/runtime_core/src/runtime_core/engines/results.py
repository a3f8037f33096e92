"""Results on their way back: by value while they are small, else as a `Reference` to a blob, and how to read one."""

from __future__ import annotations

import builtins
import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from runtime_core.blobs.store import open_blobs
from runtime_core.blobs.urls import blob_url, folder_of, path_below
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Error, Outcome, Value
from runtime_core.errors import ConfigurationError, EngineError, InvalidInput, ResultTooLarge

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

    from runtime_core.blobs.store import BlobStore
    from runtime_core.config.settings import Settings


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


DEFAULT_INLINE_BYTES = 256 * 1024
DEFAULT_MAX_BYTES = 1024**3


class Results(msgspec.Struct, frozen=True):
    """Where results may lie, and how large they may be. Plain data: it is sent to workers with their calls."""

    blob_url: str = ""
    """Of the blob store; empty: there is none."""
    namespace: str = "weft"
    inline_bytes: int = DEFAULT_INLINE_BYTES
    """The largest JSON that is a value, where there is a blob store; without one, values may be 1 MiB."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """The largest JSON that the blob store is given."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Results:
        """As the process's settings say. Raises ConfigurationError for a variable that cannot be used."""
        # Here: a worker is sent its results' limits, and reads no settings.
        from runtime_core.config.settings import Settings

        return cls.of_settings(Settings.from_environment(environ))

    @classmethod
    def of_settings(cls, settings: Settings) -> Results:
        return cls(settings.blob_url or "", settings.namespace, settings.result_inline_bytes, settings.result_max_bytes)

    @property
    def limit(self) -> int:
        """The largest JSON that travels by value."""
        return self.inline_bytes if self.blob_url else MAX_DATA_BYTES

    def encoded(self, value: object, task: str) -> bytes:
        """What a function has returned, as JSON: itself, or a Reference to it.

        Raises InvalidInput(`result`) for what JSON cannot hold, ResultTooLarge, OSError where it cannot be stored.
        """
        return self.kept(encode(value, "result", limit=sys.maxsize), task)

    def kept(self, data: bytes, task: str) -> bytes:
        """JSON as it travels: itself, or where it is large a Reference. Raises ResultTooLarge and OSError."""
        if len(data) <= self.limit:
            return data
        self._check(len(data))
        digest = hashlib.sha256(data).hexdigest()
        url = self.store().write(folder_of(self.namespace, task), f"{digest}.json", data)
        return msgspec.json.encode(Reference(url, len(data), "json", f"sha256:{digest}"))

    def store(self) -> BlobStore:
        """The blob store. Raises ConfigurationError where there is none."""
        if not self.blob_url:
            raise ConfigurationError("there is no blob store: set WEFT_BLOB_URL=file:///folder, or as s3://bucket")
        return open_blobs(self.blob_url)

    def table_url(self, task: str) -> str:
        """A new URL for a folder of Parquet files, which whoever has a table writes itself.

        Raises ResultTooLarge where there is no blob store.
        """
        if not self.blob_url:
            raise ResultTooLarge("is a table too large for a value, and there is no blob store: set WEFT_BLOB_URL")
        return f"{self.blob_url}/{folder_of(self.namespace, task)}/{uuid.uuid4().hex}.parquet"

    def _check(self, size: int) -> None:
        if not self.blob_url:
            raise ResultTooLarge(
                f"is {size:,} bytes of JSON, over the {self.limit:,} that a value may have, and there is no blob "
                "store: set WEFT_BLOB_URL, or return less"
            )
        if size > self.max_bytes:
            raise ResultTooLarge(
                f"is {size:,} bytes of JSON, over the limit of {self.max_bytes:,}: "
                "raise WEFT_RESULT_MAX_BYTES, or return less"
            )


MAP = "map"
"""In the place of an instance's key, it marks a call as a map."""
FAILED = "weft.error"
"""The member by which a failed item is known among the results."""
MOST_IN_FLIGHT = 100_000


class MapRequest(msgspec.Struct, frozen=True):
    """The data of a map's call."""

    items: list[msgspec.Raw]
    over: str = ""
    """The argument that takes the item; empty: the first that `arguments` does not give."""
    arguments: dict[str, msgspec.Raw] = {}
    """What is the same in all calls."""
    in_flight: int = 0
    """How many items are under way at once, at most; 0: as many as the engine takes."""
    return_exceptions: bool = False
    """A failed item stands among the results, and does not fail the step."""

    @classmethod
    def from_json(cls, data: bytes) -> MapRequest:
        """Raises InvalidInput(`arguments`) for what is no request."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("arguments", f"are no map: {error}") from None


class _ItemError(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Item(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: _ItemError | None = None


def items_of(outcomes: list[Outcome]) -> bytes:
    """How the items of a map ended, in order, as the `Value.data` of a map."""
    return msgspec.json.encode(
        [
            {"value": msgspec.Raw(outcome.data)}
            if isinstance(outcome, Value)
            else {"error": {"type": outcome.type, "message": outcome.message}}
            for outcome in outcomes
        ]
    )


def map_outcome(data: bytes, return_exceptions: bool) -> Outcome:
    """What a step gets of the items of a map: the array of results, or the error of the first item that failed.

    That is not tried again: most of the items would be done twice.
    """
    items = msgspec.json.decode(data, type=list[_Item])
    failed = [(index, item.error) for index, item in enumerate(items) if item.error is not None]
    if failed and not return_exceptions:
        index, first = failed[0]
        message = f"item {index}: {first.message} ({len(failed)} of {len(items)} failed)"
        return Error("function", first.type, message, retryable=False)
    return Value(msgspec.json.encode([item.value if item.error is None else {FAILED: item.error} for item in items]))


def with_errors(value: object) -> object:
    """The results of a map as its caller sees them: an EngineError in the place of each failed item."""
    return [_seen(item) for item in value] if isinstance(value, list) else value


def _seen(item: object) -> object:
    if isinstance(item, dict) and item.keys() == {FAILED}:
        error = msgspec.convert(item[FAILED], _ItemError)
        return EngineError(error.type, error.message)
    return item
