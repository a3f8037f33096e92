"""Requests to agents: asked inside of a handler as part of its run, else as a task of their own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import NewTask
from runtime_core.errors import BusError, InvalidInput, Rejected
from runtime_core.identifiers import ROOT_RUN, fingerprint
from runtime_core.runtime.actor import ActorRun, Actors, current_run
from runtime_core.runtime.errors import RuntimeStopped
from runtime_core.runtime.host import Host
from runtime_core.runtime.identity import Address, agent_name, instance_key
from runtime_core.runtime.message import MessageEnvelope, encode_envelope

logger = logging.getLogger(__name__)

SOURCE = "runtime"
"""The source of submits of runtimes. Their ids are unique, or derived from the message's id."""


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

    def __init__(self, host: Host, actors: Actors) -> None:
        self._host = host
        self._actors = actors
        self._waiting: dict[asyncio.Future[Any], str] = {}  # Any: the futures are those of the reply stream

    @property
    def waiting(self) -> bool:
        """Whether somebody in this process, outside of any handler, waits for an answer."""
        return bool(self._waiting)

    async def ask(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None = None
    ) -> bytes:
        """The response (JSON). Raises what the recipient's handler raised, CancelledError with the token.

        `timeout` is in seconds, and ends the handling too where the request is a task of its own.
        """
        run = current_run(self._actors)
        if run is not None:
            return await _until_cancelled(token, self._ask_inside(run, recipient, envelope, token, timeout))
        return await _until_cancelled(token, self._ask_outside(recipient, envelope, token, timeout))

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

    async def _ask_inside(
        self, run: ActorRun, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None
    ) -> bytes:
        async with asyncio.timeout(timeout):
            return await run.request(recipient, envelope, token)

    async def _ask_outside(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None
    ) -> bytes:
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        bus, replies = await self._host.place(name, key)
        task = fingerprint(name, key, envelope.message_id, digits=32) if envelope.message_id else secrets.token_hex(16)
        envelope.message_id = envelope.message_id or task
        data = encode_envelope(envelope)
        new = NewTask(task, SOURCE, task, fingerprint(data.decode()), name, data, key=key, reply=replies.stream)
        if timeout is not None:
            new.timeout_ms = max(1, int(timeout * 1000))
        place = f"{task}|{ROOT_RUN}"
        self._actors.tokens[place] = token
        future = replies.expect(task)
        self._waiting[future] = f"a message to {recipient.type}/{recipient.key}"
        try:
            if not await self._submit(bus, new, recipient):
                reply = await bus.transport.call("HMGET", bus.keys.task(task), "status", "out")
                status, kept = cast(list[bytes | None], reply)
                if kept is not None and not future.done():
                    return self._response(place, kept)
                if status is None and not future.done():
                    raise InvalidInput(
                        "message_id",
                        f"{envelope.message_id!r} was asked before, and its answer is not kept any more: give a new id",
                    )
            return self._response(place, (await future).value)
        except asyncio.CancelledError:
            self._actors.cancel(task)
            await _cancel(bus, task)
            raise
        finally:
            self._waiting.pop(future, None)
            self._actors.tokens.pop(place, None)
            replies.forget(task, future)

    async def _submit(self, bus: EventBus, new: NewTask, recipient: Address) -> bool:
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
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def cancel() -> None:
        if threading.get_ident() == thread:
            task.cancel()
        else:
            loop.call_soon_threadsafe(task.cancel)

    token.add_callback(cancel)
    try:
        return await task
    finally:
        forget: Callable[[Callable[[], None]], None] | None = getattr(token, "remove_callback", None)
        if forget is not None:
            forget(cancel)


async def _cancel(bus: EventBus, task: str) -> None:
    try:
        await bus.cancel(task, "the caller cancelled it")
    except BusError as error:
        logger.warning("could not cancel task %s on the broker: %s", task, error)
