"""What goes into the bus and comes out of it, as values, and why a submit may have to wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_core.bus.delivery import Delivery
from runtime_core.errors import Rejected


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
