"""Results on their way back: by value while they are small, else as a Reference to the blob store."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from runtime_core.blobs.store import folder_of, open_blobs
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.encoding import encode
from runtime_core.engines.reference import Reference
from runtime_core.errors import ConfigurationError, ResultTooLarge

if TYPE_CHECKING:
    from runtime_core.blobs.store import BlobStore
    from runtime_core.settings import Settings

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
        from runtime_core.settings import Settings

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
