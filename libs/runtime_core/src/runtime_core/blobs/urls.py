"""URLs of blob stores, and of the blobs in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from runtime_core.errors import ConfigurationError, InvalidInput

BLOB_URL = "WEFT_BLOB_URL"
DATA_DIR = "WEFT_DATA_DIR"
URL = re.compile(r"file:///.+|(s3|gs|gcs|abfss?|hdfs|viewfs)://[^/?#]+.*")
# What a store holds besides, such as files of others in the same bucket, is never swept.
BLOB_NAME = re.compile(r"[0-9a-f]{32,64}\.(json|parquet)")


def blob_url(environ: Mapping[str, str]) -> str:
    """The URL of the store that a process was told of, without a `/` at its end; empty: there is none.

    Where only `WEFT_DATA_DIR` is set, it is the folder `blobs` there. Raises ConfigurationError for what is no URL.
    """
    url = environ.get(BLOB_URL, "").strip()
    if url:
        return checked_url(url)
    directory = environ.get(DATA_DIR, "").strip()
    return (Path(os.path.abspath(Path(directory).expanduser())) / "blobs").as_uri() if directory else ""


def checked_url(url: str) -> str:
    """The URL of a store. Raises ConfigurationError."""
    if not URL.fullmatch(url) or "?" in url or "#" in url or ".." in unquote(url).split("/"):
        raise ConfigurationError(f"{BLOB_URL}={url!r}: must be file:///folder, or as s3://bucket/folder")
    return url.rstrip("/")


def folder_of(namespace: str, task: str) -> str:
    """Where a task's blobs lie, below the store's URL."""
    return f"{folder_of_namespace(namespace)}/{quote(task, safe='@+=')}"


def folder_of_namespace(namespace: str) -> str:
    """Where all blobs of a namespace lie, below the store's URL."""
    return quote(namespace, safe="")


def path_below(store: str, url: str) -> str:
    """The path of a blob below its store's URL, still quoted.

    Raises InvalidInput(`reference`) for one that lies elsewhere: a URL may come from who may not read everything that
    this process can.
    """
    inner = url.removeprefix(store + "/")
    plain = unquote(inner)
    # `urlsplit` drops some control characters and ends a path at ? and #: a URL with one names another path there.
    unsafe = not plain.isprintable() or "?" in inner or "#" in inner
    if not store or inner == url or unsafe or any(part in ("", ".", "..") for part in plain.split("/")):
        where = f"outside of the blob store {store}" if store else "in a blob store, and this process knows of none"
        raise InvalidInput("reference", f"{url!r} lies {where}: set {BLOB_URL} to the store that it was written to")
    return inner


def local_path(url: str) -> Path:
    """The path that a `file:` URL names."""
    return Path(unquote(urlsplit(url).path))
