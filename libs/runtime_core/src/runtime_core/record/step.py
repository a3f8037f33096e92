"""One step of a trajectory, as it travels on the record stream, and its place in the task."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from runtime_core.errors import InvalidInput

NOTHING = msgspec.Raw(b"")
"""No input or output. This very object is left out when a step is written; another empty one would break the JSON."""


class StepError(msgspec.Struct, omit_defaults=True):
    """Why a step failed: class name, text and, where there was one, the traceback."""

    type: str
    message: str
    traceback: str = ""
    at: float = 0.0
    """Epoch milliseconds."""


class Fork(msgspec.Struct, omit_defaults=True):
    """Where a task was forked: its steps before `step` are those of `task`, and are not recorded again."""

    task: str
    step: str = ""
    """A step of the task's first run, as in `3.0.1`; empty: at its beginning."""


FORK_STEP = "0.0"
"""The place of the row that says where a task was forked: before all that its code does."""


class Step(msgspec.Struct, omit_defaults=True):
    """One step: an agent's run, a tool call, an engine step, or a step inside a run.

    The key of a step is (task, run, step, attempt). A run's own row has `step == ""`. Run ids are paths:
    the task's first run is `r`; the run that step `2.0.1` of run `r` started is `r/2.0.1`.
    """

    run: str
    kind: str
    """`agent`, `tool`, `engine`, `step`, `model`, `human`, `timer`, `emit`, `send`, `publish`, `message`, `fork`,
    `usage`, `hook`, `callback` or `hooks` (which of them a run has)."""
    name: str
    status: str
    """`completed`, `failed` or `cancelled`."""
    started: float
    """Epoch milliseconds."""
    ended: float
    """Epoch milliseconds."""
    step: str = ""
    attempt: int = 1
    key: str = ""
    """The instance key of an agent, where the user gave one."""
    input: msgspec.Raw = NOTHING
    """JSON, as it was given."""
    input_after: str = ""
    """On the record stream: the messages in `input` come after those of this list, which an earlier row has told; a
    digest of `record/contents.py`, hexadecimal. Empty: they are all. The store puts them together."""
    output: msgspec.Raw = NOTHING
    """JSON, as it was returned."""
    error: StepError | None = None
    errors: list[StepError] = []
    """Errors of earlier attempts, oldest first."""
    usage: dict[str, float] = {}
    """What it has used: names to amounts."""
    attributes: dict[str, Any] = {}  # Any: texts, numbers, booleans and lists of them
    """What else is known of it, by the names of OpenTelemetry's conventions: of a model call `gen_ai.…`."""
    cause: str = ""
    """Id of the event that caused it, where it is not the parent's step."""
    owner: str = ""
    """The process that did it."""
    fork: Fork | None = None
    """Set on a row of a forked task, one that is written when it begins: where it comes from."""


DIGEST = "weft.digest"
"""The attribute that holds a step's digest, where that is not made of its name and input."""


INCOMPLETE = "weft.messages.incomplete"
"""The attribute (true) of a step that was read without the first of its messages: the store has lost them."""


class TaskEnd(msgspec.Struct):
    """What the commit that ends a task says of it on the record stream."""

    task: str
    status: str
    agent: str
    steps: int
    """How many rows the trajectory of this task holds when it is complete."""
    created: float
    """Epoch milliseconds."""
    ended: float
    """Epoch milliseconds."""
    error: StepError | None = None
    session: str = ""


STEPS = msgspec.json.Decoder(list[Step])
ENCODER = msgspec.json.Encoder()


PLACE_MAX = 1_500
"""Bytes. PostgreSQL refuses index rows over 2,704 bytes; namespace and task share them."""

_RUN_ENDS = " "
_SLASH = "!"
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")


@lru_cache(maxsize=16_384)
def place(run: str, step: str) -> str:
    """Return the sort key of (run, step). InvalidInput where it is longer than an index can hold."""
    text = _path(run) + _RUN_ENDS + (_path(step) if step else "")
    if len(text) > PLACE_MAX:
        raise InvalidInput("run", f"the path of run and step is longer than {PLACE_MAX} bytes; nest less")
    return text


def before(run: str, step: str, at: str) -> bool:
    """Return whether a step, or a run that it started, comes before step `at` of the task's first run.

    The first run's own row does not: a fork has its own.
    """
    inside, _, rest = run.partition("/")
    of_first_run = rest.partition("/")[0] if rest else step
    return inside == "r" and bool(of_first_run) and place("r", of_first_run) < place("r", at)


def _path(path: str) -> str:
    return _SLASH.join(".".join(map(_part, piece.split("."))) for piece in path.split("/"))


def _part(part: str) -> str:
    if _NUMBER.match(part):
        return f"{len(part)}{part}"
    if _WORD.match(part):
        return f"~{part}"
    # Anything else could hold a separator; hexadecimal keeps the order and cannot be taken for a word.
    return f"~~{part.encode('utf-8', 'surrogatepass').hex()}"
