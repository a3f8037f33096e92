"""Requests and their answers: kept in memory, and line by line in a file that survives the server."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from tests.openai_server.asked import Asked
from tests.openai_server.script import Usage


class Entry(msgspec.Struct, kw_only=True):
    """One request."""

    number: int
    """From 1, in the order in which requests came."""
    at: float
    """Seconds since 1970."""
    api: str
    model: str
    stream: bool
    conversation: str
    digest: str
    """Of model, conversation and messages."""
    messages: int
    model_messages: int
    tool_results: int
    retry: str | None = None
    """What the client's library says of its own retries."""
    idempotency_key: str | None = None
    asked_by: str | None = None
    """What the header `x-asked-by` says, where a test tells its processes apart by it."""
    rule: str | None = None
    status: int | None = None
    """None while nothing has been sent."""
    answer: bool = False
    """Whether it is the answer of a model, and no fault."""
    usage: Usage | None = None
    """What the answer says, or was about to say when it was cut."""
    pieces: int = 0
    """Pieces that were sent so far."""
    waits: str | None = None
    """The gate where it waits now."""
    complete: bool = False
    """Whether an answer's last byte was written to a client that had not left."""
    left: bool = False
    """Whether the client had left before that."""
    ended: float | None = None
    """Seconds since 1970; None while it is under way."""


class Counts(msgspec.Struct, kw_only=True):
    asked: int
    complete: int
    """Answers (no faults) whose last byte was written."""
    repeated: int
    """Complete answers to a question that had a complete answer before."""
    under_way: int
    statuses: dict[str, int]


class Ledger:
    """Each request is a line when it comes and a line when it ends. Of one number, the last line counts."""

    def __init__(self, file: Path | None) -> None:
        self.entries: list[Entry] = []
        self.bodies: list[bytes] = []
        self._descriptor = None if file is None else os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def ask(self, asked: Asked, headers: dict[str, str | None], body: bytes) -> Entry:
        entry = Entry(
            number=len(self.entries) + 1,
            at=time.time(),
            api=asked.api,
            model=asked.model,
            stream=asked.stream,
            conversation=asked.conversation,
            digest=asked.digest,
            messages=asked.messages,
            model_messages=asked.model_messages,
            tool_results=len(asked.results),
            retry=headers.get("x-stainless-retry-count"),
            idempotency_key=headers.get("idempotency-key"),
            asked_by=headers.get("x-asked-by"),
        )
        self.entries.append(entry)
        self.bodies.append(body)
        self._write(entry)
        return entry

    def end(self, entry: Entry) -> None:
        entry.ended = time.time()
        entry.waits = None
        self._write(entry)

    def counts(self) -> Counts:
        complete = [entry for entry in self.entries if entry.complete and entry.answer]
        return Counts(
            asked=len(self.entries),
            complete=len(complete),
            repeated=len(complete) - len({entry.digest for entry in complete}),
            under_way=sum(entry.ended is None for entry in self.entries),
            statuses=dict(Counter(str(entry.status) for entry in self.entries)),
        )

    def repeated(self) -> list[Entry]:
        return repeated(self.entries)

    def _write(self, entry: Entry) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, msgspec.json.encode(entry) + b"\n")


def repeated(entries: list[Entry]) -> list[Entry]:
    """Return the entries of questions with several complete answers, without the first answer of each."""
    seen: set[str] = set()
    found = []
    for entry in entries:
        if entry.complete and entry.answer:
            if entry.digest in seen:
                found.append(entry)
            seen.add(entry.digest)
    return found


def read_file(file: Path) -> list[Entry]:
    """Return the entries of a ledger's file, even of a killed server: a half-written last line is skipped."""
    entries: dict[int, Entry] = {}
    for line in file.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            entry = msgspec.json.decode(line, type=Entry)
            entries[entry.number] = entry
    return list(entries.values())
