"""Names that are derived and never random: what is done again finds the name it had."""

from __future__ import annotations

import hashlib
import re
import zlib

from runtime_core.errors import InvalidInput

ROOT_RUN = "r"
"""Run id of a task's first run."""
RESERVED_KEY_PREFIX = "~"
"""Instance keys that begin so are the runtime's own: agents called without a key."""
MAX_NAME_CHARACTERS = 256
"""The longest agent name, instance key, session id or request id."""

TASK_ID_RULE = "1 to 200 of A-Z a-z 0-9 . _ @ + = -, beginning with a letter or digit"
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,199}")
_TOPIC = re.compile(r"[\w\-.:=/]{1,256}")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def has_control(text: str) -> bool:
    """Whether `text` holds a control character (C0, DEL or C1)."""
    return _CONTROL.search(text) is not None


def is_task_id(text: str) -> bool:
    """Whether `text` may be a task id: it becomes part of keys, so the alphabet is small."""
    return _TASK_ID.fullmatch(text) is not None


def checked_topic(topic: object) -> str:
    """The topic. Raises InvalidInput, field `topic`, for what is none."""
    if not isinstance(topic, str) or _TOPIC.fullmatch(topic) is None:
        raise InvalidInput("topic", f"{topic!r} is no topic: give 1 to 256 letters, digits or _ - . : = /")
    return topic


def checked_key(field: str, key: object) -> str:
    """The key of an agent's instance; empty: one of its own. Raises InvalidInput(field) for what is none."""
    if not isinstance(key, str):
        raise InvalidInput(field, f"{key!r} is no text")
    if len(key) > MAX_NAME_CHARACTERS or has_control(key) or not _is_utf8(key):
        raise InvalidInput(
            field, f"{key!r} is no key: give at most {MAX_NAME_CHARACTERS} characters, none of them a control"
        )
    return key


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def partition_of(text: str, count: int) -> int:
    """The partition of `text` among `count`: CRC-32 (IEEE) of its UTF-8, modulo `count`.

    Raises InvalidInput, field `text`, where `text` is no UTF-8 (lone surrogates).
    """
    try:
        return zlib.crc32(text.encode()) % count
    except UnicodeEncodeError as error:
        raise InvalidInput("text", f"cannot be UTF-8: {error.reason}") from error


def instance_address(agent: str, key: str) -> str:
    """The address of an agent's instance; its partition is `partition_of(address, count)`."""
    return f"{agent}/{key}"


def own_key(run: str) -> str:
    """The key of the instance that exists for one run of an agent called without a key."""
    return RESERVED_KEY_PREFIX + run


def scoped_name(scope: str, name: str) -> str:
    """The name inside a scope, as in `acme/<name>`; one that is inside already stays as it is."""
    prefix = f"{scope}/"
    return name if name.startswith(prefix) else prefix + name


def task_id_of(source: str, event_id: str) -> str:
    """The task id of a submit that names none: 32 hexadecimal digits over source and id."""
    return fingerprint(source, event_id, digits=32)


def child_run(run: str, step: str) -> str:
    """The id of the run that step `step` of run `run` starts, as in `r/2.0.1`."""
    return f"{run}/{step}"


def idempotency_key(task: str, run: str) -> str:
    """What an external service is given so that a repeated call has one effect."""
    return f"{task}/{run}"


def step_digest(kind: str, name: str, key: str, data: bytes) -> str:
    """Eight hexadecimal digits over what a step asks for; `data` is canonical JSON."""
    head = f"{kind}\0{name}\0{key}\0".encode()
    return hashlib.blake2b(head + data, digest_size=4).hexdigest()


def any_digest(kind: str, name: str) -> str:
    """In the place of a step's digest: fits every step of this kind and name, whatever its arguments.

    A fork's journal holds it, since a changed input may have changed what is asked. Engines count as one kind, and
    the texts of questions and timers are arguments.
    """
    if kind in ("ray", "spark"):
        kind = "engine"
    if kind in ("human", "timer"):
        name = ""
    return "*" + hashlib.blake2b(f"{kind}\0{name}".encode(), digest_size=4).hexdigest()[:7]


ANY_DIGEST = "*" * 8
"""In the place of a step's digest: fits every step."""


def fingerprint(*parts: str, digits: int = 16) -> str:
    """The first `digits` hexadecimal digits of SHA-256 over the parts, joined by NUL."""
    # Lone surrogates come from Python callers only; any stable bytes will do for them.
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:digits]


def event_id(task: str, *parts: str | int) -> str:
    """The id of an event about `task`: the same happening has the same id, however often it is sent."""
    return "/".join((task, *map(str, parts)))


def task_of_message(task: str, run: str, step: str) -> str:
    """The id of the task that a message of `ctx.send` starts: the same at each replay."""
    return fingerprint(task, run, step, digits=32)
