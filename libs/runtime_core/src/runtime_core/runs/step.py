"""What every step has: an id from its place in the program, and a digest of what it asks for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from runtime_core import codec
from runtime_core.consumer.effects import FAILED
from runtime_core.errors import (
    AgentError,
    Deadlock,
    EngineError,
    HumanTimeout,
    LocalStepError,
    StepError,
    ToolError,
    WeftError,
)
from runtime_core.ids import step_digest
from runtime_core.runs.journal import payload_of, status_of, time_of
from runtime_core.runs.ports import Registered
from runtime_core.runs.sharing import bring_in, unwrapped

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


_decoder = msgspec.json.Decoder()


def from_json(payload: bytes) -> object:
    """The value of a recorded payload; an empty one is None. Raises WeftError where it is not JSON."""
    if not payload:
        return None
    try:
        return _decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise WeftError(f"a recorded result is not JSON: {error}; whoever wrote it must send JSON") from error


def canonical(data: bytes) -> bytes:
    """The same JSON with sorted keys: its digest does not depend on the order in which a dict was filled."""
    # Without a comma no object has two members, so there is only one order.
    return codec.canonical(_decoder.decode(data)) if b"," in data else data


T = TypeVar("T")

_ERRORS: dict[str, type[StepError]] = {
    "tool": ToolError,
    "agent": AgentError,
    "engine": EngineError,
    "ray": EngineError,
    "spark": EngineError,
    "human": HumanTimeout,
    "step": LocalStepError,
    "model": LocalStepError,
}


_CONTAINERS = (b"{", b"[")
"""How JSON begins that may be written in more than one order."""


class _RecordedError(msgspec.Struct):
    """The payload of a failed step."""

    type: str = ""
    message: str = ""


_decode_error = msgspec.json.Decoder(_RecordedError).decode


class Step(Generic[T]):
    """Something durable that an agent asks for: `await` it, once or more often; each gives an equal result.

    It takes its id when it is created and does nothing until it is awaited or gathered. One that never is
    does nothing at all; the run then says so in a warning.
    """

    identified = False
    """Whether the digest is made of something else than name and data."""

    __slots__ = ("data", "digest", "id", "key", "kind", "name", "order", "run")

    def __init__(self, run: Run, branch: Branch, kind: str, name: str, key: str, data: bytes, digest: str = "") -> None:
        """`digest` replaces the digest of kind, name, key and data."""
        self.run = run
        self.kind = kind
        self.name = name
        self.key = key
        self.data = data
        """JSON of what it asks for."""
        self.digest = digest or step_digest(kind, name, key, canonical(data) if data[:1] in _CONTAINERS else data)
        self.id = run.take_id(branch, kind, self.digest)
        self.order = run.steps_taken
        """Place in the program among all steps of this execution."""
        run.unawaited[self.id] = self

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        raise NotImplementedError

    def read(self, payload: bytes) -> T:
        """The result that a recorded payload stands for."""
        result: T = from_json(payload)  # type: ignore[assignment]  # JSON, whose shape the step's creator declares
        return result

    def __repr__(self) -> str:
        return f"<step {self.id}: {self.kind} {self.name}>"


def result_of(step: Step[T], value: bytes, branch: Branch) -> T:
    """What a journal value gives to the code: the result, or the error raised. Live and replayed alike."""
    branch.saw(time_of(value))
    if status_of(value) == FAILED:
        type, message = recorded_error(value)
        if type == Deadlock.__name__ and step.kind == "agent":
            raise Deadlock(type, message)
        raise _ERRORS.get(step.kind, StepError)(type, message)
    payload = payload_of(value)
    if step.kind == "agent":
        payload, changes = unwrapped(payload)
        if changes:
            bring_in(step.run, branch, changes)
    return step.read(payload)


def recorded_error(value: bytes) -> tuple[str, str]:
    """Type and message of a failed step's journal value."""
    payload = payload_of(value)
    try:
        error = _decode_error(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Written by another program; better its bytes than no reason.
        return "", payload.decode(errors="replace")
    return error.type, error.message


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tool or agent by its name and pool, of this app or of another, as manifests give them: it may be called."""

    name: str
    pool: str = ""


def name_and_pool(run: Run, kind: str, known: Registered | None, named: object) -> tuple[str, str]:
    """The name and pool of a call. A name that this app does not know is sent as it is, to the default pool.

    Raises WeftError, and ends the run, for a function that is not registered.
    """
    if known is not None:
        return known.name, known.pool
    if isinstance(named, Elsewhere):
        return named.name, named.pool
    if isinstance(named, str) and named:
        return named, ""
    label = getattr(named, "__qualname__", None) or repr(named)
    raise run.flow.misuse(
        f"{label} is no {kind} of this app: register it with the app before it starts, or give a name (text)"
    )


class Ready(Generic[T]):
    """Gives a value that is there already."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol; this one yields nothing
        yield from ()
        return self._value
