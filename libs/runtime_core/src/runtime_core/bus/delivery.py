"""One event in a consumer's hands."""

from __future__ import annotations

from typing import cast

from runtime_core.errors import InvalidInput
from runtime_core.telemetry.spans import NO_SPAN

FORMAT = b"1"


class Delivery:
    """One entry of a work stream, taken by this owner.

    The header `h` holds one value per line: format, kind (`start`, `resume`, `call`), task, run, name, key, attempt
    (from 1) and turn. An entry whose header is not the bus's own, or of another format, raises InvalidInput at `parse`.
    """

    __slots__ = (
        "attempt", "context", "data", "deliveries", "entry", "errors", "key", "kind", "mark", "name", "partition",
        "quarantined", "run", "span", "step", "stream", "task", "trace", "turn", "waits",
    )  # fmt: skip

    def __init__(self, partition: int, stream: str, entry: bytes) -> None:
        self.partition = partition
        self.stream = stream
        self.entry = entry
        self.kind = self.task = self.run = self.name = self.key = self.step = self.trace = ""
        self.span = NO_SPAN
        self.attempt = 1
        self.turn = 0
        self.data = b""
        self.context = b""
        self.errors = b""
        self.deliveries = 1
        self.quarantined = False
        self.mark = ""
        """The word with which this call, which may not be repeated, was marked as begun; empty: it was not."""
        self.waits = 0
        """How many answers of others its turn waits for at this moment."""
        # `span` is that of its handling, `trace` the traceparent of what it causes: empty where nothing is traced.

    def parse(self, fields: list[bytes]) -> Delivery:
        """Read the entry's fields. Raises InvalidInput where the entry was not written by the bus."""
        try:
            if fields[0] != b"h":
                raise InvalidInput("h", "not sent by the bus: work streams are written by its functions only")
            version = fields[1].partition(b"\n")[0]
            if version != FORMAT:
                raise InvalidInput("h", f"has format {version.decode()[:20]!r}, this release reads {FORMAT.decode()}")
            _, self.kind, self.task, self.run, self.name, self.key, attempt, turn = fields[1].decode().split("\n")
            self.attempt = int(attempt)
            self.turn = int(turn)
        except (IndexError, ValueError) as error:
            raise InvalidInput("h", f"not a header of the bus: {error}") from None
        if (self.kind == "call") is self.stream.startswith("agent") or (self.kind == "call" and "/" not in self.run):
            raise InvalidInput("h", f"not a header of the bus: {self.kind!r} of {self.run!r} on {self.stream}")
        for at in range(2, len(fields) - 1, 2):
            name = fields[at]
            if name == b"d":
                self.data = fields[at + 1]
            elif name == b"s":
                self.step = fields[at + 1].decode()
            elif name == b"x":
                self.context = fields[at + 1]
            elif name == b"e":
                self.errors = fields[at + 1]
        return self

    @property
    def instance(self) -> str:
        """`agent/key` where the user gave the agent a key, else empty."""
        return f"{self.name}/{self.key}" if self.key and self.kind != "call" else ""

    def __repr__(self) -> str:
        return f"<Delivery {self.stream} {self.entry.decode()} {self.kind} {self.name} {self.task}/{self.run}>"


def pairs(reply: object) -> list[tuple[bytes, list[bytes]]]:
    """Entries of a stream reply as (id, fields); entries deleted meanwhile are left out."""
    entries = cast(list[tuple[bytes, list[bytes] | None] | None], reply or [])
    return [(entry[0], entry[1]) for entry in entries if entry is not None and entry[1] is not None]
