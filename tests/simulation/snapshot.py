"""What the broker holds at the end of a history, and the names of broken invariants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tests.simulation.history import History

ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Violation:
    """A broken invariant; `kind` is usually the same for the same cause."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Broken(Exception):
    """Ends a history whose invariants do not hold."""

    def __init__(self, violations: list[Violation]) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = violations


class Snapshot:
    """Everything that the broker holds, by key and type."""

    def __init__(self, history: History) -> None:
        server = history.server
        keys = sorted(cast(list[bytes], server.execute("KEYS", "*")))
        types = [cast(bytes, found) for found in server.pipeline([("TYPE", key) for key in keys])] if keys else []
        self.hashes: dict[str, dict[str, str]] = {}
        self.streams: dict[str, list[tuple[str, dict[str, str]]]] = {}
        self.other: dict[str, bytes] = {}
        wanted: list[tuple[bytes, bytes]] = []
        for key, kind in zip(keys, types, strict=True):
            if kind in (b"hash", b"stream"):
                wanted.append((key, kind))
            else:
                self.other[key.decode()] = kind
        contents = server.pipeline(
            [("HGETALL", key) if kind == b"hash" else ("XRANGE", key, "-", "+") for key, kind in wanted]
        ) if wanted else []  # fmt: skip
        for (key, kind), content in zip(wanted, contents, strict=True):
            if kind == b"hash":
                self.hashes[key.decode()] = _fields(cast(list[bytes], content))
            else:
                entries = cast(list[tuple[bytes, list[bytes]]], content)
                self.streams[key.decode()] = [(entry.decode(), _fields(flat)) for entry, flat in entries]


def _fields(flat: list[bytes]) -> dict[str, str]:
    return {_text(flat[at]): _text(flat[at + 1]) for at in range(0, len(flat), 2)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
