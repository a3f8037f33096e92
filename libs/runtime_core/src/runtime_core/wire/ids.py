"""Ids. Most are derived and never random, so that a repeated operation gets the same id."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from runtime_core.errors import InvalidInput

ROOT_RUN = "r"
"""Run id of a task's first run."""
RESERVED_KEY_PREFIX = "~"
"""The prefix of instance keys that the runtime makes for agents called without a key."""
MAX_NAME_CHARACTERS = 256
"""The longest agent name, instance key, session id or request id."""

TASK_ID_RULE = "1 to 200 of A-Z a-z 0-9 . _ @ + = -, beginning with a letter or digit"
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,199}")
_TOPIC = re.compile(r"[\w\-.:=/]{1,256}")
_MESSAGE = re.compile(r"[A-Za-z0-9_.\-]{1,100}")
# The namespace of `ctx.uuid()`. It may never change.
_UUIDS = uuid.UUID("6f0cb1f3-5f0f-4f57-9d5a-0f6a3c1f7e42")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def has_control(text: str) -> bool:
    """Return whether `text` has a control character (C0, DEL or C1)."""
    return _CONTROL.search(text) is not None


def is_task_id(text: str) -> bool:
    """Return whether `text` may be a task id. Task ids are part of keys, so their alphabet is small."""
    return _TASK_ID.fullmatch(text) is not None


def checked_topic(topic: object) -> str:
    """Return the topic. Raises InvalidInput, field `topic`, if it is not a valid topic."""
    if not isinstance(topic, str) or _TOPIC.fullmatch(topic) is None:
        raise InvalidInput("topic", f"{topic!r} is not a topic: use 1 to 256 letters, digits or _ - . : = /")
    return topic


def checked_key(field: str, key: object) -> str:
    """Return the key of an agent's instance; empty stands for a new instance. Raises InvalidInput(field) if invalid."""
    if not isinstance(key, str):
        raise InvalidInput(field, f"{key!r} is not text")
    if len(key) > MAX_NAME_CHARACTERS or has_control(key) or not _is_utf8(key):
        raise InvalidInput(
            field,
            f"{key[:60]!r} is not a key: use at most {MAX_NAME_CHARACTERS} characters without control characters",
        )
    return key


def checked_message(field: str, name: object) -> str:
    """Return the name of messages to a task. Raises InvalidInput(field) if it is invalid."""
    if not isinstance(name, str) or not _MESSAGE.fullmatch(name):
        raise InvalidInput(
            field, f"{name!r} is not a name: use 1 to 100 letters, digits, dots, hyphens and underscores"
        )
    return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def partition_of(text: str, count: int, field: str = "text") -> int:
    """Return the partition of `text` among `count`: CRC-32 (IEEE) of its UTF-8, modulo `count`.

    Raises InvalidInput(field) if UTF-8 cannot encode `text` (lone surrogates).
    """
    try:
        return zlib.crc32(text.encode()) % count
    except UnicodeEncodeError as error:
        raise InvalidInput(field, f"{text!r} cannot be UTF-8 ({error.reason}): remove lone surrogates") from error


def instance_address(agent: str, key: str) -> str:
    """Return the address of an agent's instance; its partition is `partition_of(address, count)`."""
    return f"{agent}/{key}"


def scoped_name(scope: str, name: str) -> str:
    """Return the name inside a scope, as in `acme/<name>`; a name that is inside already stays as it is."""
    prefix = f"{scope}/"
    return name if name.startswith(prefix) else prefix + name


def task_id_of(source: str, event_id: str) -> str:
    """Return the task id of a submit that names none: 32 hexadecimal digits derived from source and id."""
    return fingerprint(source, event_id, digits=32)


def new_task_id() -> str:
    """Return an id that no other task has: 32 hexadecimal digits, of which the first 12 are the time (epoch ms).

    Tasks of one time are neighbours in the indices of the trajectory store, which random ids would spread over all
    pages.
    """
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def child_run(run: str, step: str) -> str:
    """Return the id of the run that step `step` of run `run` starts, as in `r/2.0.1`."""
    return f"{run}/{step}"


def idempotency_key(task: str, run: str) -> str:
    """Return the idempotency key to send to an external service, so that a repeated call has one effect."""
    return f"{task}/{run}"


def step_digest(kind: str, name: str, key: str, data: bytes) -> str:
    """Return eight hexadecimal digits derived from a step's request; `data` is canonical JSON."""
    head = f"{kind}\0{name}\0{key}\0".encode()
    return hashlib.blake2b(head + data, digest_size=4).hexdigest()


_MARK = "~"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MAX_MARKED = 36**2 - 1


def digest_in_attempt(digest: str, attempt: int) -> str:
    """Return the digest of a step that follows a read of `ctx.attempt` in this attempt, from 2.

    Higher attempts than 1295 count as that one.
    """
    high, low = divmod(min(attempt, _MAX_MARKED), 36)
    return f"{_MARK}{_DIGITS[high]}{_DIGITS[low]}{digest[:5]}"


def attempt_in_digest(digest: str) -> int:
    """Return the attempt in a digest from `digest_in_attempt`; 1 for any other digest."""
    return int(digest[1:3], 36) if digest.startswith(_MARK) else 1


def any_digest(kind: str, name: str) -> str:
    """Return a stand-in for a step's digest that matches every step of this kind and name, whatever its arguments.

    The journal of a fork holds it, because a changed input may change the arguments of its steps. All engines are one
    kind, and the texts of questions and timers count as arguments.
    """
    if kind in ("ray", "spark"):
        kind = "engine"
    if kind in ("human", "timer"):
        name = ""
    return "*" + hashlib.blake2b(f"{kind}\0{name}".encode(), digest_size=4).hexdigest()[:7]


ANY_DIGEST = "*" * 8
"""A stand-in for a step's digest that matches every step."""


def fingerprint(*parts: str, digits: int = 16) -> str:
    """Return the first `digits` hexadecimal digits of SHA-256 over the parts, joined by NUL."""
    # Only Python callers send lone surrogates; any stable bytes will do for them.
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:digits]


def event_id(task: str, *parts: str | int) -> str:
    """Return the id of an event about `task`. An event that is sent again has the same id."""
    return "/".join((task, *map(str, parts)))


def task_of_message(task: str, run: str, step: str) -> str:
    """Return the id of the task that a message of `ctx.send` starts: the same at each replay."""
    return fingerprint(task, run, step, digits=32)


def uuid_of_place(place: str) -> uuid.UUID:
    """Return the UUID of a place in a run's program: the same at each replay."""
    return uuid.uuid5(_UUIDS, place)


class RunField:
    """Names of fields in the hashes of runs and tasks, as `shared/fields.lua` has them."""

    CURRENT: Final = b"cur"
    HEADER: Final = b"h"
    INPUT: Final = b"d"
    CONTEXT: Final = b"x"
    MISSING: Final = b"m:"
    RELEASED: Final = b"ks"
    FLAGS: Final = b"fl"
    CHILD: Final = b"k:"
    USAGE: Final = b"us"
    LIMITS: Final = b"lim"
    FINAL: Final = b"out"
    VERSION: Final = b"av"


class EntryField:
    """Names of fields in the entries of work streams, as `shared/fields.lua` has them."""

    HEADER: Final = b"h"
    DATA: Final = b"d"
    CONTEXT: Final = b"x"
    STEP: Final = b"s"
    ERRORS: Final = b"e"


class RunHeader(NamedTuple):
    """The header of a run (field `h` of its hash): one value a line, as `header_of` in Lua reads them.

    A child run has the first six; a task's first run has all.
    """

    stream: str = ""
    agent: str = ""
    key: str = ""
    reply_to: str = ""
    created: str = ""
    """Epoch milliseconds."""
    max_steps: str = ""
    event_id: str = ""
    source: str = ""
    digest: str = ""
    session: str = ""
    tenant: str = ""
    retention: str = ""

    @classmethod
    def parse(cls, header: bytes | None) -> Self:
        """Return the header; lines that it lacks are empty."""
        return cls(*(header or b"").decode().split("\n")[: len(cls._fields)])

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Return the header in the hash of a run or a task."""
        return cls.parse(fields.get(RunField.HEADER))

    @property
    def created_ms(self) -> int:
        """When the run was requested, in epoch milliseconds; 0 if it is unknown."""
        return int(self.created or 0)


class DeliveryHeader(NamedTuple):
    """The header of a delivery (field `h` of an entry of a work stream), one value a line."""

    version: str = ""
    kind: str = ""
    """`start`, `resume` or `call`."""
    task: str = ""
    run: str = ""
    name: str = ""
    key: str = ""
    attempt: str = ""
    turn: str = ""

    @classmethod
    def parse(cls, header: bytes | None) -> Self:
        """Return the header; lines that it lacks are empty. Other programs may have written it."""
        return cls(*(header or b"").decode("utf-8", "replace").split("\n")[: len(cls._fields)])

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Return the header in the fields of an entry."""
        return cls.parse(fields.get(EntryField.HEADER))
