"""The effects that a turn or a call requests, as values. Nothing here touches the broker."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_core.record.step import Step
from runtime_core.record.usage import Usage

# A journal entry is `digest (8 hex) · status (1) · epoch ms (13 digits) · payload`.
JOURNAL_PREFIX = 22
COMPLETED = b"K"
FAILED = b"E"

WAKE = "!"
"""The run continues when this one step has its result."""
NO_WAKE = "0"
"""The run waits for this step, but another step's result wakes it first."""


@dataclass(slots=True)
class Call:
    """One event for a tool, an agent or an engine, whose result the run will wait for."""

    kind: str
    """`tool`, `agent`, `ray` or `spark`: the work stream's name."""
    step: str
    """The step's path id in the run, as in `2` or `3.0.1`."""
    name: str
    data: bytes
    """JSON: the arguments of a tool or engine function (an object), or the input of an agent."""
    digest: str
    """Eight hexadecimal digits over kind, name, key and data: a replay compares them."""
    wait: str = WAKE
    """`!` to wake at its result, `0` not to wake, `g<n>` to wake when all steps of group n have results."""
    key: str = ""
    """The instance key of an agent; empty for a separate instance per run."""
    pool: str = ""
    snapshot: bytes = b""
    """The calling branch's context (JSON), if it was used."""
    timeout_ms: int = 0
    """Time limit of a request that goes to another partition; 0: the namespace's."""


@dataclass(slots=True)
class Timer:
    """A step that the broker itself answers when it is due (a sleep, or a human's deadline)."""

    step: str
    digest: str
    after_ms: int
    wait: str = WAKE
    status: bytes = COMPLETED
    """`K` to answer with `payload` as the result, `E` as an error (JSON `{"type", "message"}`)."""
    payload: bytes = b"null"


@dataclass(slots=True)
class Question:
    """A step that a human or another program answers with `weft.task.signal`."""

    step: str
    digest: str
    prompt: str
    data: bytes
    """JSON shown with the question."""
    wait: str = WAKE
    timeout_ms: int | None = None
    default: bytes | None = None
    """JSON used as the answer at the deadline; without it the deadline is an error."""
    expects: str = ""
    """`verdict`: the broker accepts no other answer. Empty: any JSON will do."""


@dataclass(slots=True)
class Send:
    """A message to an agent that nobody waits for: a separate task, started by the commit."""

    step: str
    agent: str
    key: str
    data: bytes
    digest: str = ""
    """As in a Call: the commit journals the step with it, so that a replay does not send again."""


@dataclass(slots=True)
class Publish:
    """A message to every agent that subscribes to a topic: a separate task for each."""

    step: str
    topic: str
    key: str
    """The topic's source: the instance of each agent that gets it. Empty for a new one."""
    data: bytes
    digest: str = ""
    """As in a Send."""


@dataclass(slots=True)
class Spend:
    """A step's usage; the commit adds it to the task's usage and journals the step, so that it counts once."""

    step: str
    digest: str
    usage: Usage


Asking = Call | Timer | Question
"""A request whose result the run waits for."""
Effect = Asking | Send | Publish | Spend
"""A request of a turn to its commit. Each is one step."""


@dataclass(slots=True)
class Suspended:
    """The turn waits: `calls` start now, and earlier steps are awaited again."""

    asked: list[Asking] = field(default_factory=list)
    """In the order of the program."""
    sends: list[Send | Publish] = field(default_factory=list)
    again: list[tuple[str, str]] = field(default_factory=list)
    """(step, wait) of steps asked for in an earlier turn that have no result yet."""
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Local steps that this turn finished, for the record."""
    working_state: bytes | None = None


@dataclass(slots=True)
class Completed:
    """The run is over with a result."""

    output: bytes
    """JSON."""
    answer: bytes | None = None
    """The result of the calling run's step, if that is more than the output."""
    sends: list[Send | Publish] = field(default_factory=list)
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    state: bytes | None = None
    """The instance's new state (JSON); None: unchanged."""


@dataclass(slots=True)
class Failed:
    """The attempt ended with an error; the policy decides whether it is retried."""

    type: str
    message: str
    traceback: str = ""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """Set if the code requested a retry at a given time."""
    counts: bool = True
    """False: nothing was tried, since a requirement was missing."""
    parked: bool = False
    """The journal and the code disagree: the run waits for a rollback or a fix."""
    rejected: bool = False
    """The code declared that this will not work: fail without a dead letter."""
    cancelled: bool = False
    """The code has chosen this end: the task whose first run this is ends as cancelled."""
    ends_task: bool = False
    """Over a limit of the task: the whole task ends, whichever of its runs this is."""
    spends: list[Spend] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


TurnResult = Suspended | Completed | Failed
