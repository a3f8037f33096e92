"""One step of a trajectory, in the format of the record stream: its place in the task, and its usage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from runtime_core.errors import InvalidInput
from runtime_core.wire.codec import quoted
from runtime_core.wire.ids import ROOT_RUN

NOTHING = msgspec.Raw(b"")
"""No input or output. Encoding a step omits exactly this object; any other empty value would break the JSON."""


USAGE_BY_MODEL = "models"
"""The member of the JSON that holds the amounts by model; no amount may have this name."""


class Status:
    """The statuses of a task: stored, sent and shown as these words. A step has one of ENDED."""

    ACCEPTED: Final = "accepted"
    RUNNING: Final = "running"
    WAITING: Final = "waiting"
    COMPLETED: Final = "completed"
    FAILED: Final = "failed"
    CANCELLED: Final = "cancelled"


OPEN = (Status.ACCEPTED, Status.RUNNING, Status.WAITING)
"""Statuses of tasks that have not ended."""
OPEN_AS_STORED = tuple(status.encode() for status in OPEN)
ENDED = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
"""How a task or a step may end."""


# A journal entry is `digest (8 hex) · status (1) · epoch ms (13 digits) · payload`.
JOURNAL_PREFIX = 22
RESULT_OK = b"K"
RESULT_ERROR = b"E"


class StepFailure(msgspec.Struct, omit_defaults=True):
    """Why a step failed: class name, text and, if any, the traceback."""

    type: str
    message: str
    traceback: str = ""
    at: float = 0.0
    """Epoch milliseconds."""
    started: float = 0.0
    """When the failed attempt of a call began, in epoch milliseconds; 0: not known."""


class ErrorText(msgspec.Struct, frozen=True):
    """The class name and the text of an error. Its JSON may have more members, as in dead letters."""

    type: str = ""
    message: str = ""


class Fork(msgspec.Struct, omit_defaults=True):
    """The origin of a fork: its steps before `step` are those of `task`, and are not recorded again."""

    task: str
    step: str = ""
    """A step of the task's first run, as in `3.0.1`; empty for its beginning."""


FORK_STEP = "0.0"
"""The place of the row that names a fork's origin: before all steps of its code."""


class Step(msgspec.Struct, omit_defaults=True):
    """One step: an agent's run, a tool call, an engine step, or a step inside a run.

    The key of a step is (task, run, step, attempt). A run's own row has `step == ""`. Run ids are paths:
    the task's first run is `r`; the run that step `2.0.1` of run `r` started is `r/2.0.1`. The step of a row of output
    is the step before it and the number of its first piece: `2.0.1e3`.
    """

    run: str
    kind: str
    """`agent`, `tool`, `engine`, `step`, `model`, `human`, `timer`, `emit`, `send`, `publish`, `message`, `fork`,
    `usage`, `hook`, `callback`, `patch` (a change of the code that the run follows) or `hooks` (the hooks that a run
    has)."""
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
    """The instance key of an agent, if the user gave one."""
    input: msgspec.Raw = NOTHING
    """JSON, as passed in."""
    input_after: str = ""
    """On the record stream: the messages in `input` follow those of this list, which an earlier row contains; a
    hexadecimal digest of `wire/contents.py`. Empty if `input` has all messages. The store joins them."""
    output: msgspec.Raw = NOTHING
    """JSON, as returned."""
    error: StepFailure | None = None
    errors: list[StepFailure] = []
    """Errors of earlier attempts, oldest first."""
    usage: dict[str, float] = {}
    """Its usage: names to amounts."""
    attributes: dict[str, Any] = {}  # Any: texts, numbers, booleans and lists of them
    """Further attributes, with the names of OpenTelemetry's conventions: `gen_ai.…` for a model call."""
    cause: str = ""
    """Id of the event that caused it, unless that is the parent's step. Of a call: the entry of its last attempt on the
    work stream, whose first part is when it was queued, in epoch milliseconds."""
    owner: str = ""
    """The process that executed it."""
    fork: Fork | None = None
    """The origin, on a row that a forked task writes when it begins."""
    committed: float = 0.0
    """When the broker had it, in epoch milliseconds by the broker's clock: the store takes it from the id of the
    record's entry. 0: not known."""


DIGEST = "weft.digest"
"""The attribute with a step's digest, if that is not derived from its name and input."""


ATTEMPTS = "weft.attempts"
"""The attribute with what `ctx.attempt` has returned in a run of several attempts, as a list of `place=attempt`.

A place is the number of the step before it."""


KEY_RETURNS = ".acquire"
"""Ends the id of the step in which a run gets back the key that the step before this suffix gave up."""
PIECES = "weft.pieces"
"""The attribute of a row of output with the number of its pieces: `ctx.emit`s without another step between them."""
BYTES = "weft.bytes"
"""The attribute with the bytes of all of these pieces, if the row has only the first ones."""


INCOMPLETE = "weft.messages.incomplete"
"""The attribute (true) of a step that was read without its first messages, because the store has lost them."""


class TaskEnd(msgspec.Struct):
    """The end of a task, as its last commit writes it to the record stream."""

    task: str
    status: str
    agent: str
    steps: int
    """The number of rows in the complete trajectory of this task."""
    created: float
    """Epoch milliseconds."""
    ended: float
    """Epoch milliseconds."""
    error: StepFailure | None = None
    session: str = ""


STEPS = msgspec.json.Decoder(list[Step])
ENCODER = msgspec.json.Encoder()


PLACE_MAX = 1_500
"""Bytes. PostgreSQL refuses index rows over 2,704 bytes; namespace and task share them."""

ARGUMENT_CHARACTERS = 60
"""The most characters of an argument in a shown call."""
CALL_CHARACTERS = 400
_METHODS = {"message": "note", "usage": "spend", "timer": "sleep", "patch": "patched"}
"""The method of `ctx` that makes a kind of step, if its name is another one."""

_RUN_ENDS = " "
_SLASH = "!"
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")
_PIECE = re.compile(r"(0|[1-9][0-9]{0,8})e([1-9][0-9]{0,8})\Z")
"""A piece of output, by the step before it: after that step's own parts, and before the next step."""


@lru_cache(maxsize=16_384)
def place(run: str, step: str) -> str:
    """Return the sort key of (run, step). Raises InvalidInput if it is longer than an index can hold."""
    text = _path(run) + _RUN_ENDS + (_path(step) if step else "")
    if len(text) > PLACE_MAX:
        raise InvalidInput("run", f"the path of run and step is longer than {PLACE_MAX} bytes; nest less")
    return text


def before(run: str, step: str, at: str) -> bool:
    """Return whether a step, or a run that it started, comes before step `at` of the task's first run.

    `1/3` is step 3 of the run that step 1 started. The rows of the runs that contain `at` do not come before it: a fork
    has its own.
    """
    inside, _, rest = run.partition("/")
    path = [*rest.split("/"), step] if rest else [step]
    if inside != ROOT_RUN:
        return False
    for own, limit in zip(path, at.split("/"), strict=False):
        if own != limit:
            return bool(own) and place(ROOT_RUN, own) < place(ROOT_RUN, limit)
    return False


def _path(path: str) -> str:
    return _SLASH.join(".".join(map(_part, piece.split("."))) for piece in path.split("/"))


def _part(part: str) -> str:
    if _NUMBER.match(part):
        return f"{len(part)}{part}"
    if _WORD.match(part):
        return f"~{part}"
    if piece := _PIECE.match(part):
        step, number = piece.groups()
        return f"{len(step)}{step}e{len(number)}{number}"
    # Anything else could hold a separator; hexadecimal keeps the order and cannot be mistaken for a word.
    return f"~~{part.encode('utf-8', 'surrogatepass').hex()}"


def as_call(kind: str, name: str, key: str, data: bytes) -> str:
    """Return a step as the call that made it, as in `ctx.tool("search", query="x")`. `data` is its request (JSON)."""
    given: list[str] = []
    try:
        request = msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        request = data.decode(errors="replace")
    method = f"ctx.{_METHODS.get(kind, kind)}"
    if kind in ("ray", "spark", "engine"):
        method = f"ctx.engine({quoted(kind)}).call" if kind != "engine" else "ctx.engine().call"
    if kind in ("release", "acquire"):
        return "ctx.released()" if kind == "release" else "the end of ctx.released()"
    if kind == "timer":
        return f"{method}({request / 1000:g})" if isinstance(request, int) else f"{method}()"
    if kind == "human":
        # The record has the question as its event.
        if isinstance(request, dict) and {"request_id", "prompt"} <= request.keys():
            name, request = request["prompt"], request.get("data")
        data = b"" if request is None else data
    if kind not in ("emit", "usage"):
        given.append(quoted(name, ARGUMENT_CHARACTERS))
    if kind in ("tool", "ray", "spark", "engine", "step", "usage") and isinstance(request, dict):
        positional = request.pop("args", ()) if kind == "step" else ()
        given += [quoted(value, ARGUMENT_CHARACTERS) for value in positional]
        given += [f"{argument}={quoted(value, ARGUMENT_CHARACTERS)}" for argument, value in request.items()]
    elif data and kind != "hooks":
        given.append(quoted(request, ARGUMENT_CHARACTERS))
    if key and kind in ("agent", "send", "publish"):
        given.append(f"{'source' if kind == 'publish' else 'key'}={quoted(key, ARGUMENT_CHARACTERS)}")
    return f"{method}({', '.join(given)})"[:CALL_CHARACTERS]


MOST_AMOUNT = 1e15
"""The largest amount of one report. The broker cannot store a sum that is infinite, so it would refuse the result."""


class Usage(msgspec.Struct, frozen=True):
    """Sums of amounts by name. A name without reports has 0."""

    amounts: dict[str, float] = {}
    """By name, as `tokens`; `cost` is in the currency that the agents report."""
    models: dict[str, dict[str, float]] = {}
    """The same by model, as far as it was reported with a model's name."""

    def __getitem__(self, name: str) -> float:
        return self.amounts.get(name, 0.0)

    def __bool__(self) -> bool:
        return bool(self.amounts)

    @classmethod
    def of(cls, amounts: Mapping[str, object], model: str = "") -> Usage:
        """Return one report of `spend`. Raises InvalidInput (`spend.…`) for an invalid amount."""
        checked = {name: _amount(name, value) for name, value in amounts.items()}
        if not checked:
            raise InvalidInput("spend", "names no amount: give one, as in spend(tokens=812)")
        if not isinstance(model, str):
            raise InvalidInput("spend.model", f"{model!r} is not text")
        return cls(checked, {model: checked} if model else {})

    @classmethod
    def from_json(cls, data: bytes) -> Usage:
        """Parse the JSON that `to_json` writes and the broker sums; empty bytes stand for no usage."""
        found: dict[str, object] = msgspec.json.decode(data) if data else {}
        models = found.pop(USAGE_BY_MODEL, {})
        return cls(
            msgspec.convert(found, dict[str, float]),
            msgspec.convert(models, dict[str, dict[str, float]]),
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode({**self.amounts, USAGE_BY_MODEL: self.models} if self.models else self.amounts)


NOTHING_USED = Usage()


def total_usage(parts: Iterable[Usage]) -> Usage:
    """Return the sum of several usages."""
    amounts: dict[str, float] = {}
    models: dict[str, dict[str, float]] = {}
    for part in parts:
        _add(amounts, part.amounts)
        for model, of_model in part.models.items():
            _add(models.setdefault(model, {}), of_model)
    return Usage(amounts, models)


def _add(into: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        into[name] = into.get(name, 0) + amount


def _amount(name: str, value: object) -> float:
    if name == USAGE_BY_MODEL:
        raise InvalidInput("spend.models", "is not an amount; name the model with model=")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_AMOUNT:
        raise InvalidInput(f"spend.{name}", f"{quoted(value)} is not a number from 0 to {MOST_AMOUNT:g}")
    return value
