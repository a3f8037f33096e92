"""The effects that a turn or a call requests, as values. Nothing here uses the broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from runtime_core.record.step import Step, Usage

# A journal entry is `digest (8 hex) · status (1) · epoch ms (13 digits) · payload`.
JOURNAL_PREFIX = 22
COMPLETED = b"K"
FAILED = b"E"

WAKE = "!"
"""This step's result alone wakes the run."""
NO_WAKE = "0"
"""This step's result does not wake the run; another step's does."""


@dataclass(slots=True)
class Call:
    """A call of a tool, an agent or an engine. The run waits for its result."""

    kind: str
    """`tool`, `agent`, `ray` or `spark`: the work stream's name."""
    step: str
    """The step's path id in the run, as in `2` or `3.0.1`."""
    name: str
    data: bytes
    """JSON: the arguments of a tool or engine function (an object), or the input of an agent."""
    digest: str
    """Eight hexadecimal digits over kind, name, key and data. A replay compares them with the journal's."""
    wait: str = WAKE
    """`!`: its result wakes the run; `0`: it does not; `g<n>`: the last result of group n does."""
    key: str = ""
    """The instance key of an agent; empty: each run has its own instance."""
    pool: str = ""
    snapshot: bytes = b""
    """The context of the calling branch (JSON); empty if the code has not used it."""
    timeout_ms: int = 0
    """The time limit of a request to another partition; 0: the namespace's default."""


@dataclass(slots=True)
class Timer:
    """A step that the broker itself answers when it is due: a sleep, or a human's deadline."""

    step: str
    digest: str
    after_ms: int
    wait: str = WAKE
    status: bytes = COMPLETED
    """`K`: `payload` is the result; `E`: it is an error (JSON `{"type", "message"}`)."""
    payload: bytes = b"null"


@dataclass(slots=True)
class Question:
    """A step that a human or another program answers with `weft.task.signal`."""

    step: str
    digest: str
    prompt: str
    data: bytes
    """JSON that is shown with the question."""
    wait: str = WAKE
    timeout_ms: int | None = None
    default: bytes | None = None
    """The answer (JSON) at the deadline; None: the deadline is an error."""
    expects: str = ""
    """`verdict`: the broker accepts only a verdict. Empty: it accepts any JSON."""


@dataclass(slots=True)
class Send:
    """A message to an agent. Nobody waits for it: the commit starts a separate task."""

    step: str
    agent: str
    key: str
    data: bytes
    digest: str = ""
    """As in `Call`. The commit journals the step with it, so that a replay does not send again."""


@dataclass(slots=True)
class Publish:
    """A message to every agent that subscribes to a topic, each in a separate task."""

    step: str
    topic: str
    key: str
    """The topic's source: the instance key of each receiving agent. Empty: a new instance."""
    data: bytes
    digest: str = ""
    """As in `Send`."""


@dataclass(slots=True)
class Spend:
    """A step's usage. The commit adds it to the task's usage and journals the step, so that it counts once."""

    step: str
    digest: str
    usage: Usage


class JournaledStep(NamedTuple):
    """A step that was journaled in the middle of a turn which has not committed yet."""

    step: str
    value: bytes
    """The journal value."""
    kind: str
    name: str
    usage: bytes = b""
    """JSON; empty: none. The write that journals the step adds it to the task's usage."""


StepRequest = Call | Timer | Question
"""A request with a result that the run waits for."""
Effect = StepRequest | Send | Publish | Spend
"""What a turn requests from its commit. Each is one step."""


@dataclass(slots=True)
class Suspended:
    """The turn ends and the run waits: for the steps in `requests`, and again for those in `again`."""

    requests: list[StepRequest] = field(default_factory=list)
    """In the order of the program."""
    sends: list[Send | Publish] = field(default_factory=list)
    again: list[tuple[str, str]] = field(default_factory=list)
    """(step, wait) of steps that an earlier turn requested and that have no result yet."""
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Steps that this turn performed itself, for the record."""
    journaled: list[JournaledStep] = field(default_factory=list)
    """Steps that the journal must hold, so that a replay continues as this turn did."""
    working_state: bytes | None = None


@dataclass(slots=True)
class Completed:
    """The run ends with a result."""

    output: bytes
    """JSON."""
    answer: bytes | None = None
    """The result of the calling run's step, if it contains more than the output."""
    sends: list[Send | Publish] = field(default_factory=list)
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    state: bytes | None = None
    """The instance's new state (JSON); None: unchanged."""
    journaled: list[JournaledStep] = field(default_factory=list)
    """Steps of this turn whose usage the task must hold."""


@dataclass(slots=True)
class Failed:
    """The attempt ended with an error; the policy decides whether it is retried."""

    type: str
    message: str
    traceback: str = ""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """The delay that the code requested; None: the policy's."""
    counts: bool = True
    """False: a requirement was missing, so this was no attempt."""
    parked: bool = False
    """The code differs from the journal: the run waits for a rollback or a fix."""
    rejected: bool = False
    """The code gave up: fail without a dead letter."""
    cancelled: bool = False
    """The code cancelled the task. If this is the task's first run, the task ends as cancelled."""
    ends_task: bool = False
    """The task exceeded a limit: the whole task ends, whichever of its runs this is."""
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    journaled: list[JournaledStep] = field(default_factory=list)
    """Steps of this turn, which the next attempt or a redrive replays."""


TurnResult = Suspended | Completed | Failed
