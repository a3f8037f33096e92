"""Requests to agents: asked inside of a handler as part of its run, else as a task of their own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from runtime_core.actors.actor import ActorRun, Actors, current_run
from runtime_core.actors.errors import RuntimeStopped
from runtime_core.actors.host import ActorHost
from runtime_core.actors.identity import Address, agent_name, instance_key
from runtime_core.actors.message import MessageEnvelope, encode_envelope
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.spans import TASKS, sending
from runtime_core.errors import BusError, InvalidInput, Rejected
from runtime_core.ids import ROOT_RUN, fingerprint
from runtime_core.telemetry.trace_context import restated
from runtime_core.wire.commands import Submission

logger = logging.getLogger(__name__)

SOURCE = "runtime"
"""The source of submits of runtimes. Their ids are unique, or derived from the message's id."""

BROKER_SECONDS = 2.0
"""How long after its time limit a request may be ended by the broker."""


class _Error(msgspec.Struct, frozen=True):
    """Why there is no response; errors of dead letters say more, such as when."""

    type: str = ""
    message: str = ""


class _End(msgspec.Struct):
    """What of a final event's data answers a request."""

    status: str
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error = _Error()


class Requests:
    """What this process waits for. Tokens are Any: another library's classes."""

    def __init__(self, host: ActorHost, actors: Actors) -> None:
        self._host = host
        self._actors = actors
        self._waiting: dict[asyncio.Future[Any], str] = {}  # Any: the futures are those of the reply stream
        self._withdrawn: set[asyncio.Task[bytes]] = set()
        """Requests that go on though their callers' tokens were cancelled."""

    @property
    def waiting(self) -> bool:
        """Whether a request from outside of any handler is not answered yet."""
        return bool(self._waiting or self._withdrawn)

    async def ask(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None = None
    ) -> bytes:
        """The response (JSON). Raises what the recipient's handler raised, CancelledError with the token.

        `timeout` is in seconds, and ends the handling too where the request is a task of its own.
        """
        run = current_run(self._actors)
        if run is not None:
            return await _until_cancelled(token, self._ask_inside(run, recipient, envelope, token, timeout))
        if self._actors.vocabulary.cancelled_is_handled:
            return await self._until_withdrawn(recipient, envelope, token, timeout)
        return await _until_cancelled(token, self._ask_outside(recipient, envelope, token, timeout))

    async def close(self) -> None:
        """Give up what goes on for nobody."""
        self.fail_waiting()
        for request in list(self._withdrawn):
            request.cancel()
        if self._withdrawn:
            await asyncio.wait(self._withdrawn)

    def fail_waiting(self) -> None:
        """Answer all who wait: nobody here reads their answers any more."""
        for future, what in list(self._waiting.items()):
            if not future.done():
                future.set_exception(
                    RuntimeStopped(f"the runtime was stopped while {what} was not answered; it stays queued")
                )

    def forget_waiting(self) -> None:
        """Those who waited ended with their event loop."""
        self._waiting.clear()
        self._withdrawn.clear()

    async def _ask_inside(
        self, run: ActorRun, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None
    ) -> bytes:
        async with asyncio.timeout(timeout):
            return await run.request(recipient, envelope, token, timeout)

    async def _until_withdrawn(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None
    ) -> bytes:
        """Ask; the token ends the caller's wait, and the request goes on."""
        withdrawn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = asyncio.create_task(self._ask_outside(recipient, envelope, token, timeout, withdrawn), name="ask")

        def withdraw() -> None:
            if not withdrawn.done():
                withdrawn.set_result(None)

        with _called_by(token, withdraw):
            try:
                await asyncio.wait((request, withdrawn), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:  # the caller itself was cancelled
                request.cancel()
                await asyncio.wait((request,))
                raise
        if request.done():
            return request.result()
        self._withdrawn.add(request)
        request.add_done_callback(self._end_withdrawn)
        raise asyncio.CancelledError("the token was cancelled")

    def _end_withdrawn(self, request: asyncio.Task[bytes]) -> None:
        self._withdrawn.discard(request)
        if not request.cancelled() and request.exception() is not None:
            logger.debug("a request that was cancelled ended with: %s", request.exception())

    async def _ask_outside(
        self,
        recipient: Address,
        envelope: MessageEnvelope,
        token: Any,
        timeout: float | None,
        withdrawn: asyncio.Future[None] | None = None,
    ) -> bytes:
        """`withdrawn` is done when the caller wants no answer any more."""
        if timeout is None:
            return await self._submit_and_wait(recipient, envelope, token, None, withdrawn)
        try:
            # The broker ends the request at its time; where nobody moves its timers, the caller must.
            async with asyncio.timeout(timeout + BROKER_SECONDS) as limit:
                return await self._submit_and_wait(recipient, envelope, token, timeout, withdrawn)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(
                    f"{recipient.type}/{recipient.key} has not answered within {timeout:g} s, and no process that "
                    "runs in this namespace has ended the request"
                ) from None
            raise

    async def _submit_and_wait(
        self,
        recipient: Address,
        envelope: MessageEnvelope,
        token: Any,
        timeout: float | None,
        withdrawn: asyncio.Future[None] | None,
    ) -> bytes:
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        bus, replies = await self._host.place(name, key)
        task = fingerprint(name, key, envelope.message_id, digits=32) if envelope.message_id else secrets.token_hex(16)
        envelope.message_id = envelope.message_id or task
        data = encode_envelope(envelope)
        new = Submission(task, SOURCE, task, fingerprint(data.decode()), name, data, key=key, replyto=replies.stream)
        if timeout is not None:
            new.timeout_ms = max(1, int(timeout * 1000))
        place = f"{task}|{ROOT_RUN}"
        self._actors.tokens[place] = token
        future = replies.expect(task)
        self._waiting[future] = f"a message to {recipient.type}/{recipient.key}"
        try:
            with sending(TASKS, message=envelope.message_id, task=task) as traceparent:
                new.context = restated(b"", traceparent)
                started = await self._submit(bus, new, recipient)
            if not started:
                reply = await bus.transport.call("HMGET", bus.keys.task(task), "status", "out")
                status, kept = cast(list[bytes | None], reply)
                if kept is not None and not future.done():
                    return self._response(place, kept)
                if status is None and not future.done():
                    raise InvalidInput(
                        "message_id",
                        f"{envelope.message_id!r} was asked before, and its answer is not kept any more: give a new id",
                    )
            if withdrawn is not None:
                await asyncio.wait((future, withdrawn), return_when=asyncio.FIRST_COMPLETED)
                if not future.done():
                    self._actors.cancel(task)
                    await _withdraw(bus, task)
            return self._response(place, (await future).value)
        except asyncio.CancelledError:
            self._actors.cancel(task)
            await _cancel(bus, task)
            raise
        finally:
            self._waiting.pop(future, None)
            self._actors.tokens.pop(place, None)
            replies.forget(task, future)

    async def _submit(self, bus: EventBus, new: Submission, recipient: Address) -> bool:
        """Whether the request is new. Waits where the broker is full."""
        while True:
            try:
                return (await bus.submit(new)).started
            except Rejected as error:
                if error.field == "data.agent":
                    raise self._actors.vocabulary.undeliverable(
                        f"no process has registered agents of type {recipient.type!r} in the namespace "
                        f"{self._host.namespace!r}"
                    ) from None
                if error.retry_after_seconds is None:
                    raise InvalidInput("message_id", error.message) from None
                await asyncio.sleep(error.retry_after_seconds)

    def _response(self, place: str, final: bytes) -> bytes:
        end = msgspec.json.decode(final, type=_End)
        if end.status == "completed":
            return bytes(end.output)
        raise self._actors.failed(place, end.error.type or end.status, end.error.message)


async def _until_cancelled(token: Any, asking: Awaitable[bytes]) -> bytes:
    task = asyncio.ensure_future(asking)
    with _called_by(token, task.cancel):
        return await task


@contextmanager
def _called_by(token: Any, act: Callable[[], object]) -> Iterator[None]:
    """Let the token act in this loop when it is cancelled, from whatever thread; at once where it has been."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def called() -> None:
        if threading.get_ident() == thread:
            act()
        else:
            loop.call_soon_threadsafe(act)

    token.add_callback(called)
    try:
        yield
    finally:
        forget: Callable[[Callable[[], None]], None] | None = getattr(token, "remove_callback", None)
        if forget is not None:
            forget(called)


async def _cancel(bus: EventBus, task: str) -> None:
    try:
        await bus.cancel(task, "the caller cancelled it")
    except BusError as error:
        logger.warning("could not cancel task %s on the broker: %s", task, error)


async def _withdraw(bus: EventBus, task: str) -> None:
    try:
        await bus.withdraw(task)
    except BusError as error:
        logger.warning("could not tell the handler of task %s that it was cancelled: %s", task, error)
