"""What goes into the bus and comes out of it, as values: a delivery, the outcome of a submit, and others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from runtime_core.errors import InvalidInput, Rejected
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


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A model call that may be made now."""

    attempt: int
    """From 1: how often it was begun, by processes that died too."""
    granted: dict[str, float]
    """The most that it may use, by name; of what the task limits."""


@dataclass(frozen=True, slots=True)
class TrimmedLetters:
    """What one look after dead letters did and found."""

    old: int
    """Trimmed, since they were past the retention."""
    large: int
    """Trimmed, since all letters had more bytes than they may have."""
    stored: int
    """Letters on the stream."""
    counted: int
    """Letters whose bytes are counted; as many, unless somebody changed the stream past Weft."""


@dataclass(frozen=True, slots=True)
class Gateways:
    """Who serves a stream of an engine."""

    live: int
    """How many live gateways do."""
    silent_seconds: float | None
    """Since one of them was heard last; None: never."""
    now: float
    """The partition's own time, in seconds since 1970."""
    nobody: str
    """What is said of the stream where none serves it: one line, with the remedy."""


@dataclass(slots=True)
class Submitted:
    """The task that a submit started, or that an equal one had started before."""

    task: str
    status: str
    started: bool
    partition: int = field(default=0, compare=False)
    """Where the task is."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request to another partition that has no result yet, or a task there that is to be cancelled."""

    member: str
    """`task|run|step` of who waits, or `@<partition>:<task>|<asker>` where the asker has ended."""
    partition: int
    """Where it was asked."""
    task: str
    """The task there."""

    @property
    def asker(self) -> str:
        """The task whose end cancels the request; empty for one that is waited for."""
        return self.member.rpartition("|")[2] if self.member.startswith("@") else ""


@dataclass(frozen=True, slots=True)
class TopicSubscription:
    """An agent gets what is published on a topic, or on all topics that begin with a prefix."""

    topic: str
    agent: str
    prefix: bool = False


@dataclass(slots=True)
class Adopted:
    """What a dead owner held and this one took over."""

    deliveries: list[Delivery]
    condemned: list[Delivery]
    malformed: list[tuple[str, bytes, str]]
    """(stream, entry, why) of entries that are no work."""
    empty_hands: bool
    """A quarantined entry waits for this owner to hold nothing else."""


@dataclass(slots=True)
class RunFields:
    """What the broker holds of a run: enough to replay it. Of one that begins, only data and time are known."""

    cur: str = ""
    status: str = ""
    """The task's."""
    context: bytes = b""
    state: bytes = b""
    """The instance's, as it was when the run began."""
    header: str = ""
    """The task's."""
    data: bytes = b""
    turn: int = 0
    started_ms: int = 0
    journal: dict[str, bytes] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, bytes] = field(default_factory=dict)
    """The instance's state from a step on, where a nested run has changed it."""
    unrecorded: list[str] = field(default_factory=list)
    """Journaled steps whose rows no commit has written to the record yet."""
    withdrawn: bool = False
    """Whether nobody wants the task's answer any more."""


@dataclass(frozen=True, slots=True)
class Journaled:
    """What a run has journaled since its last committed turn."""

    steps: list[str]
    """Steps that were finished in mid-turn."""
    asked: bool
    """Whether the run has asked for something in mid-turn."""


class Misplaced(Rejected):
    """An id of the submit is claimed for another partition, or the submit's own claim was refused (`again`).

    `equal`: by a submit of equal content. `bus/claims.py` settles it.
    """

    def __init__(self, kind: str, field: str, holder: int, token: str, task: str) -> None:
        super().__init__(field, f"is claimed for partition {holder}; submit again", 1.0, task)
        self.again = kind == "again"
        self.equal = kind == "elsewhere"
        self.holder = holder
        self.token = token


class NotYet(Rejected):
    """Before the first manifest arrives nothing can be checked: the same submit may be accepted later."""


class NotDurable(Rejected):
    """The command took effect, but the broker may still lose it: the same command, sent again, waits again.

    `retry_after_seconds` is 0 where the connection broke during the wait.
    """
