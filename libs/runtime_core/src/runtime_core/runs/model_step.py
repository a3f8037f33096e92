"""Model calls: reserve usage on the broker, then journal the answer together with the usage."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import Failed
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput, LimitExceeded, Reserved
from runtime_core.runs.journal import canonical
from runtime_core.runs.step import LocalStep, call_function
from runtime_core.telemetry.spans import PROVIDER, REQUEST_MODEL, TIME_TO_FIRST_CHUNK
from runtime_core.wire.codec import quoted
from runtime_core.wire.ids import idempotency_key, step_digest
from runtime_core.wire.step import Step as Row
from runtime_core.wire.step import StepFailure, Usage, total_usage

if TYPE_CHECKING:
    from runtime_core.bus.commits import CallBegun
    from runtime_core.runs.execution import Execution
    from runtime_core.runs.ports import Reserve
    from runtime_core.runs.scheduler import Branch
    from runtime_core.telemetry.metrics import Metrics

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""The most bytes of a request as JSON. It goes to the model and the record, not into the journal."""


class ModelCall:
    """The current model call, for the function of `ctx.model`: its attempt, and reports of pieces and usage.

    Belongs to the event loop of the function; a plain function, which runs in a thread, may use it, too.
    """

    __slots__ = (
        "_attributes",
        "_begin",
        "_error",
        "_input",
        "_spent",
        "_stream",
        "attempt",
        "granted",
        "idempotency_key",
    )

    def __init__(
        self,
        begun: CallBegun,
        key: str,
        stream: Callable[[int, bytes], None],
        begin: Callable[[], Awaitable[CallBegun]],
    ) -> None:
        self.attempt = begun.attempt
        """How often this call was begun, from 1, including by processes that died."""
        self.granted: Mapping[str, float] = begun.granted
        """The reserved amounts by name: the most that the call may use. Only limits of the task are in it."""
        self.idempotency_key = key
        """The same in every attempt of this call, and different for every other call."""
        self._stream = stream
        self._begin = begin
        self._spent: list[Usage] = []
        self._attributes: dict[str, Any] = {}  # Any: as in `row`
        self._error: StepFailure | None = None
        self._input: bytes | None = None

    def stream(self, value: object) -> None:
        """Send a piece of the answer (text or any JSON value) to the client, without waiting.

        It is a delta with the call's run id, `<run>/<step>`, and this attempt. It replaces the deltas of lower attempts
        with that run id.
        """
        self._stream(self.attempt, encode(value, "piece of a model's answer"))

    async def again(self) -> None:
        """Begin the next attempt of this call. Its pieces replace those streamed so far; the reservation stays."""
        self.attempt = (await self._begin()).attempt

    def spend(self, *, model: str = "", **amounts: float) -> None:
        """Report usage, as in `spend(tokens=812, cost=0.004, model="…")`. Several reports add up.

        The write that journals the answer adds it to the task's usage. Raises InvalidInput (`spend.…`).
        """
        self._spent.append(Usage.of(amounts, model))

    def row(
        self,
        *,
        attributes: Mapping[str, str | int | float | bool | Sequence[str]] | None = None,
        error: tuple[str, str] | None = None,
        input: object = ...,
    ) -> None:
        """Add to this call's row in the trajectory.

        `attributes` have the names of OpenTelemetry's conventions. `error` is (type, message) if the answer is an
        error. `input` replaces the request. Later calls add to earlier ones and override them.
        """
        if attributes:
            self._attributes.update(attributes)
        if error is not None:
            self._error = StepFailure(*error)
        if input is not ...:
            self._input = encode(input, "input of a model call's row", MAX_REQUEST_BYTES)

    def used(self) -> Usage:
        """Return the usage reported so far."""
        return total_usage(self._spent)


class ModelStep(LocalStep):
    """A local step whose function gets a ModelCall."""

    __slots__ = ("_call", "_function", "_request", "_reserve", "identified")

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        name: str,
        request: object,
        function: Callable[..., object],
        *,
        identity: object = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Raises InvalidInput for a request without JSON."""
        data = encode(request, "request of ctx.model", MAX_REQUEST_BYTES)
        digest = ""
        if identity is not None:
            digest = step_digest("model", "", "", canonical(encode(identity, "identity of ctx.model")))
        super().__init__(run, branch, "model", name, self._ask, data, digest=digest)
        self.identified = identity is not None
        self._request = request
        self._function = function
        self._reserve = _checked(reserve) if reserve else b""
        self._call: ModelCall | None = None

    async def _ask(self) -> object:
        run = self.run
        begun = await self._begin(self._reserve)
        key = f"{idempotency_key(run.task_id, run.run_id)}/{self.id}"
        self._call = ModelCall(begun, key, partial(run.port.stream, self.id), partial(self._begin, b""))
        arguments = (self._request, self._call) if takes_call(self._function) else (self._request,)
        return await call_function(self._function, arguments, {})

    async def _begin(self, reserve: bytes) -> CallBegun:
        run = self.run
        try:
            return await run.port.begin_call(self.id, reserve)
        except Reserved:
            raise
        except LimitExceeded as error:
            raise run.flow.end(_over(str(error)), str(error)) from None
        except Exception as error:
            raise run.flow.abandon(error) from error

    async def journal(self, status: bytes, payload: bytes) -> bytes:
        settle = partial(self.run.port.settle_call, self.id, self.digest, status, payload, self.usage(), self.name)
        value, over = await self.run.of_port(self.run.after_others(settle))
        if over:
            self.run.flow.end(_over(over), over)
        return value

    def usage(self) -> bytes:
        used = self._call.used() if self._call is not None else None
        return used.to_json() if used else b""

    def note_row(self, started: float, ended: float, output: bytes, error: StepFailure | None) -> None:
        call = self._call
        if call is None:
            super().note_row(started, ended, output, error)
            return
        self.run.rows.add(
            self,
            started=started,
            ended=ended,
            input=self.data if call._input is None else call._input,
            output=output,
            error=error or call._error,
            usage=call.used().amounts,
            attributes=call._attributes,
        )


def takes_call(function: Callable[..., object]) -> bool:
    """Whether a model function takes the ModelCall after the request."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _over(message: str) -> Failed:
    return Failed("LimitExceeded", message, retryable=False, rejected=True, ends_task=True)


def _checked(reserve: Reserve) -> bytes:
    for name, amounts in reserve.items():
        field = f"reserve.{name}"
        match amounts:
            case (int() | float() as least, int() | float() as most) if 0 <= least <= most:
                continue
        raise InvalidInput(field, f"{quoted(amounts)} is not (least, most): pass two numbers, 0 <= least <= most")
    return encode({name: list(amounts) for name, amounts in reserve.items()}, "reserve")


_ANSWERED = "answered"
_TOKEN_TYPES = {
    "input_tokens": "input",
    "output_tokens": "output",
    "cached_tokens": "cached",
    "reasoning_tokens": "reasoning",
}


def count_model_calls(metrics: Metrics, rows: Iterable[Row]) -> None:
    """Count the rows that are model calls. A deferred or failed call counts by its error type."""
    for row in rows:
        if row.kind != "model":
            continue
        provider, model = str(row.attributes.get(PROVIDER, "")), str(row.attributes.get(REQUEST_MODEL, row.name))
        outcome = row.error.type if row.error is not None else _ANSWERED
        metrics.model_calls[provider, model, outcome].inc()
        metrics.model_call_seconds[provider, model].observe(max(row.ended - row.started, 0.0) / 1000)
        if isinstance(first := row.attributes.get(TIME_TO_FIRST_CHUNK), int | float):
            metrics.model_first_chunk_seconds[provider, model].observe(first)
        for name, kind in _TOKEN_TYPES.items():
            if amount := row.usage.get(name):
                metrics.model_tokens[model, kind].inc(amount)
        if cost := row.usage.get("cost"):
            metrics.model_cost[model].inc(cost)
