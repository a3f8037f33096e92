"""Results of engine functions: small ones by value, large ones as a `Reference` to a blob."""

from __future__ import annotations

import builtins
import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Error, Outcome, Value
from runtime_core.errors import ConfigurationError, EngineError, InvalidInput, ResultTooLarge
from runtime_core.wire.blobs import blob_url, folder_of, open_blobs, path_below
from runtime_core.wire.codec import MAX_DATA_BYTES

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

    from runtime_core.settings import Settings
    from runtime_core.wire.blobs import BlobStore


MARK = "weft.reference"
"""The member that marks a JSON object as a Reference; its value is the URL."""
_MARKED = f'"{MARK}"'.encode()


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result in the blob store. Its content never changes. It is deleted with its task, or when its retention ends.

    An engine function gets the referenced value as its argument, unless the argument's type is Reference.
    """

    url: str = msgspec.field(name=MARK)
    """`file:///…` or `s3://…`, of a JSON file or a folder of Parquet files."""
    bytes: int
    """The size of the result."""
    format: Literal["json", "parquet"] = "json"
    digest: str = ""
    """`sha256:…` of a JSON file."""
    rows: int | None = None
    """The number of rows of a table."""

    def to_value(self) -> dict[str, Any]:  # Any: JSON
        """Return it as a JSON object."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def from_value(cls, value: object) -> Reference | None:
        """Return the reference in a JSON value; None for any other value."""
        if not isinstance(value, dict) or MARK not in value:
            return None
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError:
            return None

    def load(self, store: str | None = None) -> Any:  # Any: the JSON that was stored, or a pyarrow Table
        """Read the value; Parquet files as a pyarrow Table.

        Blocks. In an agent, `await asyncio.to_thread(reference.load)` needs no step, since the content never changes.
        Or call it inside `ctx.step`, to record only what you derive from the value.

        `store` is the URL of the blob store; None: this process's (`WEFT_BLOB_URL`). Raises InvalidInput (`reference`)
        if the reference is of another store, its content is deleted, or its digest differs.
        """
        if self.format == "parquet":
            return self._found(lambda blobs: blobs.read_table(self.url), store)
        try:
            return msgspec.json.decode(self.read(store))
        except msgspec.DecodeError as error:
            raise InvalidInput("reference", f"{self.url!r} is not JSON: {error}") from None

    def read(self, store: str | None = None) -> builtins.bytes:
        """Return the bytes of a JSON file after checking their digest. Blocks; raises as `load`."""
        if self.format == "parquet":
            raise InvalidInput("reference", f"{self.url!r} is a folder of Parquet files: use load()")
        data: builtins.bytes = self._found(lambda blobs: blobs.read(self.url), store)
        if self.digest and self.digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
            raise InvalidInput("reference", f"{self.url!r} has changed since it was stored: its digest differs")
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
    """Whether JSON may contain references; a quick check."""
    return _MARKED in data


def replaced(value: object, by: Callable[[Reference], object]) -> object:
    """Return a JSON value with each reference replaced by `by`."""
    if isinstance(value, list):
        return [replaced(part, by) for part in value]
    if isinstance(value, dict):
        reference = Reference.from_value(value)
        if reference is not None:
            return by(reference)
        return {name: replaced(part, by) for name, part in value.items()}
    return value


def referenced_urls(data: bytes) -> Iterator[object]:
    """Return the URLs of references in JSON, valid or not."""
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
    """Return the value of `data` (JSON) with its references as `Reference` objects."""
    return replaced(value, lambda reference: reference) if has_references(data) else value


def mentions_reference(hint: object) -> bool:
    """Whether a type contains Reference, as in `list[Reference]`."""
    return hint is Reference or any(mentions_reference(part) for part in get_args(hint))


def _read(value: object) -> object:
    if isinstance(value, Reference):
        return value
    found = Reference.from_value(value)
    if found is None:
        raise ValueError(f'not a reference to a result: an object with "{MARK}" and "bytes"')
    return found


DEFAULT_INLINE_BYTES = 256 * 1024
DEFAULT_MAX_BYTES = 1024**3


class Results(msgspec.Struct, frozen=True):
    """The blob store of results and their limits. Plain data, which workers get with their calls."""

    blob_url: str = ""
    """The URL of the blob store; empty: none."""
    namespace: str = "weft"
    inline_bytes: int = DEFAULT_INLINE_BYTES
    """The largest JSON by value if there is a blob store; without one, 1 MiB."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """The largest JSON in the blob store."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Results:
        """Return the limits of the process's settings. Raises ConfigurationError for an invalid variable."""
        # Imported here, since workers get their limits and read no settings.
        from runtime_core.settings import Settings

        return cls.of_settings(Settings.from_environment(environ))

    @classmethod
    def of_settings(cls, settings: Settings) -> Results:
        return cls(settings.blob_url or "", settings.namespace, settings.result_inline_bytes, settings.result_max_bytes)

    @property
    def limit(self) -> int:
        """The largest JSON by value."""
        return self.inline_bytes if self.blob_url else MAX_DATA_BYTES

    def encoded(self, value: object, task: str) -> bytes:
        """Return a function's result as JSON: the value, or a Reference to it.

        Raises InvalidInput(`result`) for a result without JSON, ResultTooLarge, and OSError if it cannot be stored.
        """
        return self.kept(encode(value, "result", limit=sys.maxsize), task)

    def kept(self, data: bytes, task: str) -> bytes:
        """Return the JSON itself, or a Reference if it is large. Raises ResultTooLarge and OSError."""
        if len(data) <= self.limit:
            return data
        self._check(len(data))
        return msgspec.json.encode(self._stored(data, task))

    def referenced(self, data: bytes, task: str, field: str) -> Reference:
        """Store the JSON and return a Reference to it. Raises InvalidInput(`field`), ConfigurationError and OSError."""
        if len(data) > self.max_bytes:
            raise InvalidInput(
                field,
                f"is {len(data):,} bytes of JSON, over the limit of {self.max_bytes:,}: raise WEFT_RESULT_MAX_BYTES, "
                "or send less",
            )
        return self._stored(data, task)

    def _stored(self, data: bytes, task: str) -> Reference:
        digest = hashlib.sha256(data).hexdigest()
        url = self.store().write(folder_of(self.namespace, task), f"{digest}.json", data)
        return Reference(url, len(data), "json", f"sha256:{digest}")

    def store(self) -> BlobStore:
        """Return the blob store. Raises ConfigurationError if there is none."""
        if not self.blob_url:
            raise ConfigurationError(
                "there is no blob store: set WEFT_BLOB_URL to file:///folder or a URL such as s3://bucket"
            )
        return open_blobs(self.blob_url)

    def table_url(self, task: str) -> str:
        """Return a new URL for a folder of Parquet files, for the caller to write.

        Raises ResultTooLarge if there is no blob store.
        """
        if not self.blob_url:
            raise ResultTooLarge("is a table too large for a value, and there is no blob store: set WEFT_BLOB_URL")
        return f"{self.blob_url}/{folder_of(self.namespace, task)}/{uuid.uuid4().hex}.parquet"

    def _check(self, size: int) -> None:
        if not self.blob_url:
            raise ResultTooLarge(
                f"is {size:,} bytes of JSON, over the limit of {self.limit:,} for a value, and there is no blob "
                "store: set WEFT_BLOB_URL, or return less"
            )
        if size > self.max_bytes:
            raise ResultTooLarge(
                f"is {size:,} bytes of JSON, over the limit of {self.max_bytes:,}: "
                "raise WEFT_RESULT_MAX_BYTES, or return less"
            )


MAP = "map"
"""Marks a call as a map, in the place of an instance's key."""
FAILED = "weft.error"
"""The member that marks a failed item among the results."""
MOST_IN_FLIGHT = 100_000


class MapRequest(msgspec.Struct, frozen=True):
    """The data of a map's call."""

    items: list[msgspec.Raw] | Reference
    """A Reference to a list that is too large for an event: see `loaded`."""
    over: str = ""
    """The argument that takes the item; empty: the first that `arguments` does not give."""
    arguments: dict[str, msgspec.Raw] = {}
    """The arguments that all calls share."""
    in_flight: int = 0
    """The most items at once; 0: as many as the engine takes."""
    return_exceptions: bool = False
    """Whether a failed item is a result instead of failing the step."""

    @classmethod
    def from_json(cls, data: bytes) -> MapRequest:
        """Raises InvalidInput(`arguments`) for an invalid request."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("arguments", f"are not a map: {error}") from None

    @property
    def is_large(self) -> bool:
        return isinstance(self.items, Reference)

    @property
    def listed(self) -> list[msgspec.Raw]:
        """The items of a map that was loaded."""
        assert isinstance(self.items, list)
        return self.items

    def loaded(self, store: str | None) -> MapRequest:
        """Return the map with its items, read from the blob store at this URL. Blocks. Raises InvalidInput."""
        if not isinstance(self.items, Reference):
            return self
        items = msgspec.json.decode(self.items.read(store), type=list[msgspec.Raw])
        return msgspec.structs.replace(self, items=items)


class _ItemError(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Item(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: _ItemError | None = None


def items_of(outcomes: list[Outcome]) -> bytes:
    """Return the outcomes of a map's items in order, as the `Value.data` of a map."""
    return msgspec.json.encode(
        [
            {"value": msgspec.Raw(outcome.data)}
            if isinstance(outcome, Value)
            else {"error": {"type": outcome.type, "message": outcome.message}}
            for outcome in outcomes
        ]
    )


def map_outcome(data: bytes, return_exceptions: bool) -> Outcome:
    """Return a map's outcome for its step: the array of results, or the error of the first failed item.

    The error is not retryable, since a retry would repeat most of the items.
    """
    items = msgspec.json.decode(data, type=list[_Item])
    failed = [(index, item.error) for index, item in enumerate(items) if item.error is not None]
    if failed and not return_exceptions:
        index, first = failed[0]
        message = f"item {index}: {first.message} ({len(failed)} of {len(items)} failed)"
        return Error("function", first.type, message, retryable=False)
    return Value(msgspec.json.encode([item.value if item.error is None else {FAILED: item.error} for item in items]))


def with_errors(value: object) -> object:
    """Return the results of a map with an EngineError for each failed item."""
    return [_seen(item) for item in value] if isinstance(value, list) else value


def _seen(item: object) -> object:
    if isinstance(item, dict) and item.keys() == {FAILED}:
        error = msgspec.convert(item[FAILED], _ItemError)
        return EngineError(error.type, error.message)
    return item
