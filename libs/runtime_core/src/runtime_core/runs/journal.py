"""The data of a run: its steps' results, its instance's state, and the turn's rows for the record."""

from __future__ import annotations

import copy
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, cast

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.errors import WeftError
from runtime_core.telemetry import gen_ai
from runtime_core.wire import codec
from runtime_core.wire.model_call import answer_in, is_amount
from runtime_core.wire.step import DIGEST, JOURNAL_PREFIX, NOTHING, RESULT_OK, Status, StepFailure, Usage
from runtime_core.wire.step import Step as Row

MAX_JOURNAL_BYTES = 16 * 1024 * 1024
"""The most bytes of all results of a run together."""
_OF_WEFT = ("memory", "window")
"""What Weft itself keeps in the state of a run without a key, for the rest of that run: see `aworld` and `llm`."""
DIGEST_BYTES = 8
_STATUS = slice(8, 9)
_TIME = slice(9, JOURNAL_PREFIX)
_decoder = msgspec.json.Decoder()


def pack(digest: str, status: bytes, epoch_ms: int, payload: bytes) -> bytes:
    """Return a journal value: `digest (8) · status (1) · epoch ms (13 digits) · payload`."""
    return b"%b%b%013d%b" % (digest.encode(), status, epoch_ms, payload)


def packed_now(digest: str, status: bytes = RESULT_OK, payload: bytes = b"null") -> bytes:
    """Return the journal value of a step that ends now, by default without a result."""
    return pack(digest, status, time.time_ns() // 1_000_000, payload)


def unpacked(value: bytes) -> tuple[bytes, int, bytes]:
    """Return status, epoch milliseconds and payload of a journal value, as the three functions below do."""
    return value[_STATUS], int(value[_TIME]), value[JOURNAL_PREFIX:]


def status_of(value: bytes) -> bytes:
    """Return `K` for a result, `E` for an error (JSON `{"type", "message"}`)."""
    return value[_STATUS]


def time_of(value: bytes) -> int:
    """Return when the step ended, in epoch milliseconds."""
    return int(value[_TIME])


def payload_of(value: bytes) -> bytes:
    """Return the JSON of the result or the error."""
    return value[JOURNAL_PREFIX:]


def from_json(payload: bytes) -> object:
    """Decode a recorded payload; an empty one is None. Raises WeftError if it is not JSON."""
    if not payload:
        return None
    try:
        return _decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise WeftError(f"a recorded result is not JSON: {error}; fix the program that wrote it") from error


class StepOfRun(Protocol):
    """A step as the journal and the record see it."""

    id: str
    kind: str
    name: str
    key: str
    data: bytes
    """JSON of the request."""
    digest: str

    @property
    def identified(self) -> bool:
        """Whether the digest comes from an identity instead of the name and data."""
        ...


def canonical(data: bytes) -> bytes:
    """Return the JSON with sorted keys, so that its digest does not depend on the order of a dict's keys."""
    # Without a comma no object has two members, so there is only one order.
    return codec.canonical_of(data) if b"," in data else data


class _RecordedError(msgspec.Struct):
    """The payload of a failed step."""

    type: str = ""
    message: str = ""


_decode_error = msgspec.json.Decoder(_RecordedError).decode


def recorded_error(value: bytes) -> tuple[str, str]:
    """Return type and message of the error in a failed step's journal value."""
    payload = payload_of(value)
    try:
        error = _decode_error(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Another program wrote it: show its bytes.
        return "", payload.decode(errors="replace")
    return error.type, error.message


class Journal:
    """The results by step id, and the digests of requested steps without a result (`pending`)."""

    __slots__ = ("_patches", "_places", "pending", "size", "values")

    def __init__(self, values: Mapping[str, bytes], pending: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.pending = dict(pending)
        self.size = sum(map(len, self.values.values()))
        """The bytes of all values."""
        self._places: dict[str, list[tuple[int, str]]] | None = None
        self._patches: dict[tuple[str, str], str] | None = None

    def add(self, step: str, value: bytes) -> bool:
        """Add a value unless the step has one, as the broker does. Return whether it was added."""
        if step in self.values:
            return False
        self.values[step] = value
        self.size += len(value)
        self.pending.pop(step, None)
        return True

    def digest(self, step: str) -> str:
        """Return the digest of a step; empty if the journal does not know the step."""
        if (value := self.values.get(step)) is not None:
            return value[:DIGEST_BYTES].decode("ascii", "replace")
        return self.pending.get(step, "")

    def next_step(self, prefix: str, count: int) -> str:
        """Return the first step of a branch after its place `count`; empty if there is none.

        The steps are those of the first call, since a run takes no step twice.
        """
        return next(iter(self._following(prefix, count)), "")

    def same_later(self, prefix: str, count: int, digest: str) -> str:
        """Return the first step with this digest that a branch has after its place `count`; empty if there is none."""
        return next((step for step in self._following(prefix, count) if self.digest(step) == digest), "")

    def _following(self, prefix: str, count: int) -> Iterator[str]:
        if self._places is None:
            self._places = _places(chain(self.values, self.pending))
        places = self._places.get(prefix, ())
        for at in range(bisect_right(places, count, key=itemgetter(0)), len(places)):
            yield places[at][1]

    def patch(self, prefix: str, name: str) -> str:
        """Return the mark of a patch that a branch with this prefix takes; empty if there is none."""
        if self._patches is None:
            self._patches = dict(filter(None, map(_patch, self.values)))
        return self._patches.get((prefix, name), "")


PATCHED = ".patched:"
"""Between the place of a patch's mark, which is the step before it, and the patch's name."""


def _patch(step: str) -> tuple[tuple[str, str], str] | None:
    """Return the prefix and the name of a patch with its mark; None for any other step."""
    place, found, name = step.partition(PATCHED)
    return ((place[: place.rfind(".") + 1], name), step) if found else None


def _places(steps: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Return, by the prefix of a branch, its places in order, each with the first step there or in its branches."""
    numbered = sorted((path, step) for step in steps if (path := _path(step)))
    places: dict[str, list[tuple[int, str]]] = {}
    for path, step in numbered:
        prefix = ""
        for number in path:
            here = places.setdefault(prefix, [])
            if not here or here[-1][0] < number:
                here.append((number, step))
            prefix = f"{prefix}{number}."
    return places


def _path(step: str) -> tuple[int, ...]:
    """Return the numbers in a step such as `3.0.1`; nothing for other ids, such as those of another loop."""
    parts = step.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


class State:
    """The instance's state: a dict of JSON values, decoded at its first use and written only if it has changed."""

    __slots__ = (
        "_at_start",
        "_initial",
        "_left",
        "_meanwhile",
        "_put",
        "_reported",
        "_value",
        "released",
        "snapshot",
        "used",
    )

    def __init__(self, snapshot: bytes) -> None:
        self.snapshot = snapshot
        """The state at the start of the run (JSON; empty: none)."""
        self.used = False
        """Whether the code has read or changed it."""
        self.released = False
        """Whether the run has given up its key, so that the state is other runs' to change."""
        self._put: bytes | None = None
        self._value: dict[str, Any] | None = None  # Any: JSON values of the user's choice
        self._at_start = b""
        self._initial: dict[str, object] = {}
        self._reported = b""
        self._left: bytes | None = None
        self._meanwhile = b""

    def value(self) -> dict[str, Any]:
        """Return the working copy. Each replay starts from the snapshot."""
        if self._value is None:
            decoded = from_json(self.snapshot)
            if decoded is None:
                decoded = {}
            if not isinstance(decoded, dict):
                raise WeftError(
                    f"the stored state is a JSON {type(decoded).__name__}, not an object; "
                    "delete the instance's state or repair it"
                )
            # Encoded again, since the snapshot may have other spacing.
            self._value, self.used = decoded, True
            self._at_start = self._reported = encode(decoded, "state")
        return self._value

    def replace(self, state: bytes) -> None:
        """Replace the state with a nested run's. The dict stays the same object, since the code may hold it.

        While the run has given up its key, the code has no state: `acquire` uses the last one of that time.
        """
        if self.released:
            self._meanwhile = state
            return
        value = self.value()
        decoded = from_json(state)
        value.clear()
        if isinstance(decoded, dict):
            value.update(decoded)

    def set_initial(self, values: Mapping[str, object]) -> None:
        """Add the initial values of an agent's class that the state does not have."""
        state = self.value()
        self._initial = {name: value for name, value in values.items() if name not in state}
        state.update(copy.deepcopy(self._initial))

    def lost_without_key(self) -> list[str]:
        """Return the names that the user's code has changed, so that a run without a key loses them."""
        if self._value is None:
            return []
        before = {**cast("dict[str, object]", from_json(self._at_start)), **self._initial}
        changed = (name for name, value in self._value.items() if name not in before or before[name] != value)
        return [name for name in changed if name not in _OF_WEFT]

    def release(self) -> None:
        """Leave the state to other runs until `acquire`."""
        self.released, self._meanwhile = True, b""
        self._left = None if self._value is None else encode(self._value, "state")

    def differs(self) -> bool:
        """Return whether the code has changed a state that it has left to other runs."""
        return self._left is not None and encode(self._value, "state") != self._left

    def acquire(self, state: bytes) -> None:
        """Continue with this state (JSON), which other runs have left; `false`: none could.

        An attempt after one that got the key back holds the key throughout, so its nested runs may have changed the
        state after that.
        """
        self.released = False
        if state != b"false":
            self.snapshot = state
            if self._value is not None:
                self.replace(state)
                self._at_start = self._reported = encode(self._value, "state")
        if self._meanwhile not in (b"", state):
            self.replace(self._meanwhile)

    def put(self, state: bytes) -> None:
        """Have the commit that ends the run write this state (JSON)."""
        self._put, self.used = state, True

    def changed(self) -> bytes | None:
        """Return JSON of the state; None if it is unchanged since the run's start. Raises InvalidInput (`state`)."""
        if self._value is None or self.released:
            return self._put
        now = encode(self._value, "state")
        return None if now == self._at_start else now

    def working_change(self) -> bytes | None:
        """As `changed`, since the last call of this method."""
        if self._value is None or self.released:
            return None
        now = encode(self._value, "state")
        if now == self._reported:
            return None
        self._reported = now
        return now


class Rows:
    """Collects a turn's rows for the trajectory.

    Only steps that the run performs itself have a row here: whoever answers a call, a question or a timer records it.
    `unrecorded` are journaled steps whose rows no commit has written, since their process died, with their usage
    (JSON).
    """

    __slots__ = ("_attempt", "_owner", "_run", "collected", "unrecorded")

    def __init__(self, run: str, attempt: int, owner: str, unrecorded: Mapping[str, bytes]) -> None:
        self._run = run
        self._attempt = attempt
        self._owner = owner
        self.unrecorded = dict(unrecorded)
        """Steps of the journal whose rows no commit has written, with their usage (JSON)."""
        self.collected: list[Row] = []

    def add(
        self,
        step: StepOfRun,
        *,
        started: float = 0.0,
        ended: float = 0.0,
        input: bytes = b"",
        output: bytes = b"",
        error: StepFailure | None = None,
        usage: dict[str, float] | None = None,
        attributes: dict[str, Any] | None = None,  # Any: texts, numbers, lists of them
    ) -> None:
        """Add the row of a finished step. Times are epoch milliseconds; 0: now."""
        ended = ended or time.time() * 1000
        if step.identified:
            attributes = {**(attributes or {}), DIGEST: step.digest}
        self.collected.append(
            Row(
                run=self._run,
                kind=step.kind,
                name=step.name,
                status=Status.COMPLETED if error is None else Status.FAILED,
                started=started or ended,
                ended=ended,
                step=step.id,
                attempt=self._attempt,
                key=step.key,
                input=msgspec.Raw(input) if input else NOTHING,
                output=msgspec.Raw(output) if output else NOTHING,
                error=error,
                usage=usage or {},
                attributes=attributes or {},
                owner=self._owner,
            )
        )

    def replayed(self, step: StepOfRun, value: bytes) -> bytes:
        """Add the row of an unrecorded step, and return its usage (JSON)."""
        usage = self.unrecorded.pop(step.id)
        self.journaled(step, value, usage)
        return usage

    def journaled(self, step: StepOfRun, value: bytes, used: bytes = b"") -> None:
        """Add the row of a step that another process performed, from its journal value and its usage (JSON)."""
        ended = float(time_of(value))
        if step.kind == "emit":
            self.add(step, ended=ended, output=step.data)
        elif step.kind in ("send", "publish", "message", "patch"):
            self.add(step, ended=ended, input=step.data)
        elif status_of(value) == RESULT_OK:
            answer = payload_of(value)
            usage, attributes = usage_and_attributes(answer) if step.kind == "model" else ({}, {})
            if used:
                usage = Usage.from_json(used).amounts
            self.add(step, ended=ended, input=step.data, output=answer, usage=usage, attributes=attributes)
        else:
            kind, message = recorded_error(value)
            error = StepFailure(kind, message, at=ended)
            self.add(step, ended=ended, input=step.data, error=error, usage=Usage.from_json(used).amounts)

    def take(self) -> list[Row]:
        """Return the collected rows and start over."""
        rows, self.collected = self.collected, []
        return rows


def usage_and_attributes(result: bytes) -> tuple[dict[str, float], dict[str, Any]]:  # Any: see Step.attributes
    """Return usage and attributes from a model's answer (JSON) alone: the process that made the call has died."""
    answer = answer_in(result)
    if answer is None:
        return {}, {}
    usage = {name: value for name, value in answer.usage.items() if is_amount(value)}
    return usage, gen_ai.response_attributes(msgspec.to_builtins(answer))
