"""A model call: begun on the broker with what it may use reserved, its answer journaled with what it has used."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime_core.codec import quoted
from runtime_core.consumer.effects import Failed
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput, LimitExceeded, Reserved
from runtime_core.ids import idempotency_key, step_digest
from runtime_core.record.step import StepError as RowError
from runtime_core.record.usage import Usage, total
from runtime_core.runs.local_steps import LocalStep, call_function
from runtime_core.runs.step import canonical

if TYPE_CHECKING:
    from runtime_core.bus.values import CallBegun
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch

Reserve = Mapping[str, tuple[float, float]]
"""What a call needs of the task's limits: `tokens`, `cost` → the least with which it is worth making, and the most that
it may use."""

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""The most JSON of a request: it goes to the model and the record, and into no journal."""


class ModelCall:
    """What the function of `ctx.model` is told of the call that it makes, and what it may say of it.

    Belongs to the loop that the function runs on; a plain function, which runs in a thread, may use it too.
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
        """From 1: how often this very call was begun, by processes that died too."""
        self.granted: Mapping[str, float] = begun.granted
        """What was reserved, by name: the most that the call may use. What the task does not limit is not in it."""
        self.idempotency_key = key
        """The same in every attempt of this call, and of no other call."""
        self._stream = stream
        self._begin = begin
        self._spent: list[Usage] = []
        self._attributes: dict[str, Any] = {}  # Any: as in `row`
        self._error: RowError | None = None
        self._input: bytes | None = None

    def stream(self, value: object) -> None:
        """Show the client a piece of the answer (text or any JSON value) while it is being made; does not wait.

        It travels as a delta with the call's run id, `<run>/<step>`, and this attempt: what a lower attempt of that run
        id said is replaced by it.
        """
        self._stream(self.attempt, encode(value, "piece of a model's answer"))

    async def again(self) -> None:
        """Begin this call again: `attempt` is one more, and what is streamed from now on replaces what was streamed.

        What was reserved stays reserved.
        """
        self.attempt = (await self._begin()).attempt

    def spend(self, *, model: str = "", **amounts: float) -> None:
        """Report what the call has used, as in `spend(tokens=812, cost=0.004, model="…")`; several reports add up.

        It is added to the task's usage by the write that journals the answer. Raises InvalidInput (`spend.…`).
        """
        self._spent.append(Usage.of(amounts, model))

    def row(
        self,
        *,
        attributes: Mapping[str, str | int | float | bool | Sequence[str]] | None = None,
        error: tuple[str, str] | None = None,
        input: object = ...,
    ) -> None:
        """Say what the trajectory's row of this call holds beside request and answer.

        `attributes` by the names of OpenTelemetry's conventions; `error` (type, message) where the answer says that
        the model did not answer; `input` in place of the request. Several calls add up; the last word holds.
        """
        if attributes:
            self._attributes.update(attributes)
        if error is not None:
            self._error = RowError(*error)
        if input is not ...:
            self._input = encode(input, "input of a model call's row", MAX_REQUEST_BYTES)

    def used(self) -> Usage:
        """What was reported until now."""
        return total(self._spent)


class ModelStep(LocalStep):
    """As a local step, with a ModelCall for its function."""

    __slots__ = ("_call", "_function", "_request", "_reserve", "identified")

    def __init__(
        self,
        run: Run,
        branch: Branch,
        name: str,
        request: object,
        function: Callable[..., object],
        *,
        identity: object = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Raises InvalidInput for a request that JSON cannot hold."""
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
        used = self._call.used() if self._call is not None else None
        usage = used.to_json() if used else b""
        settling = self.run.port.settle_call(self.id, self.digest, status, payload, usage, self.name)
        value, over = await self.run.of_port(settling)
        if over:
            self.run.flow.end(_over(over), over)
        return value

    def note_row(self, started: float, ended: float, output: bytes, error: RowError | None) -> None:
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
    """Whether a model function wants the ModelCall after the request."""
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
        raise InvalidInput(field, f"{quoted(amounts)} is not (least, most), two numbers from 0 on")
    return encode({name: list(amounts) for name, amounts in reserve.items()}, "reserve")
