"""The messages of a runtime: requests, in a handler's run or as separate tasks, and publications to topics."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.spans import TASKS, TOPICS, sending
from runtime_core.bus.topics import TopicSubscription, published
from runtime_core.errors import BusError, InvalidInput, JournalMoved, Rejected, WeftError
from runtime_core.integrations.actors.actor import ActorRun, Actors, current_run
from runtime_core.integrations.actors.errors import RuntimeStopped
from runtime_core.integrations.actors.host import ActorHost
from runtime_core.integrations.actors.identity import Address, AgentId, Topic, agent_name, instance_key
from runtime_core.integrations.actors.message import (
    MessageEnvelope,
    content_of,
    decode_response,
    encode_envelope,
    intervene,
)
from runtime_core.integrations.actors.protocol import Vocabulary
from runtime_core.telemetry.trace_context import restated
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import ROOT_RUN, fingerprint
from runtime_core.wire.step import ErrorText, Status

logger = logging.getLogger(__name__)

RUNTIME_SOURCE = "runtime"
"""The source of submits by runtimes. Their ids are unique, or derived from the message's id."""

BROKER_GRACE_SECONDS = 2.0
"""How long after its time limit a request waits for the broker to end it."""


class _End(msgspec.Struct):
    """The part of a final event's data that answers a request."""

    status: str
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorText = ErrorText()


class Requests:
    """The requests of this process. Tokens are Any: another library's classes."""

    def __init__(self, host: ActorHost, actors: Actors) -> None:
        self._host = host
        self._actors = actors
        self._waiting: dict[asyncio.Future[Any], tuple[Address, float]] = {}
        """Each open request's recipient, and when it was made. (Any: the futures are those of the reply stream.)"""
        self._withdrawn: set[asyncio.Task[bytes]] = set()
        """Requests that continue although their callers' tokens were cancelled."""

    @property
    def waiting(self) -> bool:
        """Whether a request from outside any handler is unanswered."""
        return bool(self._waiting or self._withdrawn)

    def older_than(self, seconds: float) -> list[Address]:
        """Return the recipients of this process's requests, inside handlers and outside, that have waited so long."""
        latest = time.monotonic() - seconds
        inside = [asked for run in self._actors.running() for asked in run.asked.values()]
        return [recipient for recipient, since in (*self._waiting.values(), *inside) if since <= latest]

    async def ask(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None = None
    ) -> bytes:
        """Send a request and return its response (JSON). Raises the handler's error; CancelledError with the token.

        `timeout` is in seconds. It also ends the handling of a request that is a separate task.
        """
        run = current_run(self._actors)
        if run is not None:
            return await _until_cancelled(token, self._ask_inside(run, recipient, envelope, token, timeout))
        if self._actors.vocabulary.cancelled_is_handled:
            return await self._until_withdrawn(recipient, envelope, token, timeout)
        return await _until_cancelled(token, self._ask_outside(recipient, envelope, token, timeout))

    async def close(self) -> None:
        """Cancel the requests that nobody waits for."""
        self.fail_waiting()
        for request in list(self._withdrawn):
            request.cancel()
        if self._withdrawn:
            await asyncio.wait(self._withdrawn)

    def fail_waiting(self) -> None:
        """Raise RuntimeStopped in all waiting callers: this process no longer reads their answers."""
        for future, (recipient, _) in list(self._waiting.items()):
            if not future.done():
                to = f"{recipient.type}/{recipient.key}"
                future.set_exception(
                    RuntimeStopped(f"the runtime was stopped while a message to {to} was not answered; it stays queued")
                )

    def forget_waiting(self) -> None:
        """Forget all waiting callers: they ended with their event loop."""
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
        """Send a request. The token ends the caller's wait, and the request continues."""
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
        """Ask from outside a handler. `withdrawn` is done when the caller no longer wants an answer."""
        if timeout is None:
            return await self._submit_and_wait(recipient, envelope, token, None, withdrawn)
        try:
            # The broker ends the request at its time limit, but if nobody promotes its timers, the caller must.
            async with asyncio.timeout(timeout + BROKER_GRACE_SECONDS) as limit:
                return await self._submit_and_wait(recipient, envelope, token, timeout, withdrawn)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(
                    f"{recipient.type}/{recipient.key} has not answered within {timeout:g} s, and no process "
                    "in this namespace has ended the request"
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
        new = Submission(
            task, RUNTIME_SOURCE, task, fingerprint(data.decode()), name, data, key=key, replyto=replies.stream
        )
        if timeout is not None:
            new.timeout_ms = max(1, int(timeout * 1000))
        place = f"{task}|{ROOT_RUN}"
        self._actors.tokens[place] = token
        future = replies.expect(task)
        self._waiting[future] = (recipient, time.monotonic())
        try:
            with sending(TASKS, message=envelope.message_id, task=task) as traceparent:
                new.context = restated(b"", traceparent)
                started = await self._submit(bus, new, recipient)
            replies.mark_requested((task,))
            if not started:
                reply = await bus.transport.call("HMGET", bus.keys.task(task), "status", "out")
                status, kept = cast(list[bytes | None], reply)
                if kept is not None and not future.done():
                    return self._response(place, kept)
                if status is None and not future.done():
                    raise InvalidInput(
                        "message_id",
                        f"{envelope.message_id!r} was used before, and its answer is no longer stored: pass a new id",
                    )
            if withdrawn is not None:
                await asyncio.wait((future, withdrawn), return_when=asyncio.FIRST_COMPLETED)
                if not future.done():
                    self._actors.cancel(task)
                    await _withdraw(bus, task)
            return self._response(place, (await future).value)
        except JournalMoved:
            raise WeftError(
                f"the broker has lost the request to {recipient.type}/{recipient.key}, or no longer stores its answer: "
                "send it again"
            ) from None
        except asyncio.CancelledError:
            self._actors.cancel(task)
            await _cancel(bus, task)
            raise
        finally:
            self._waiting.pop(future, None)
            self._actors.tokens.pop(place, None)
            replies.forget(task, future)

    async def _submit(self, bus: EventBus, new: Submission, recipient: Address) -> bool:
        """Return whether the request is new. Waits while the broker is full."""
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
        if end.status == Status.COMPLETED:
            return bytes(end.output)
        raise self._actors.failed(place, end.error.type or end.status, end.error.message)


async def _until_cancelled(token: Any, asking: Awaitable[bytes]) -> bytes:
    task = asyncio.ensure_future(asking)
    with _called_by(token, task.cancel):
        return await task


@contextmanager
def _called_by(token: Any, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in this loop when the token is cancelled, in any thread; at once if it is cancelled."""
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
        await bus.withdraw_request(task)
    except BusError as error:
        logger.warning("could not inform the handler of task %s of its cancellation: %s", task, error)


class Publishing:
    """The subscriptions and publications of this process. Subscriptions are Any: they have `id`, `is_match`,
    `map_to_agent`. With `replay_unheard`, subscribers also get earlier messages that had no subscriber.
    """

    def __init__(self, host: ActorHost, vocabulary: Vocabulary, replay_unheard: bool) -> None:
        self._replay_unheard = replay_unheard
        self._host = host
        self._vocabulary = vocabulary
        self._subscriptions: list[Any] = []

    # -- subscriptions -----------------------------------------------------------------------------------------

    async def subscribe(self, subscription: Any) -> None:
        """Add a subscription. Raises ValueError if this process has an equal one; another process may."""
        if any(known == subscription or known.id == subscription.id for known in self._subscriptions):
            raise ValueError("Subscription already exists")
        self._subscriptions.append(subscription)
        wanted = self._vocabulary.topic_of(subscription)
        if wanted is None:
            return
        try:
            await (await self._host.topics()).subscribe(wanted, replay=self._replay_unheard)
        except InvalidInput:
            logger.debug("%r matches no topic, since its text is not a valid topic", subscription)
        except BaseException:
            self._subscriptions.remove(subscription)
            raise

    async def renew(self, agents: Sequence[str]) -> None:
        """Subscribe these agents again, as this process has subscribed them."""
        for subscription in self._subscriptions:
            wanted = self._vocabulary.topic_of(subscription)
            if wanted is not None and wanted.agent in agents:
                await (await self._host.topics()).subscribe(wanted, replay=self._replay_unheard)

    async def unsubscribe(self, id: str) -> None:
        """Remove a subscription. Raises LookupError for an unknown id."""
        found = [subscription for subscription in self._subscriptions if subscription.id == id]
        if not found:
            raise LookupError(f"this runtime has no subscription {id!r}")
        self._subscriptions.remove(found[0])
        unwanted = self._vocabulary.topic_of(found[0])
        if unwanted is not None:
            await (await self._host.topics()).unsubscribe(unwanted)

    # -- messages ----------------------------------------------------------------------------------------------

    async def publish(
        self, run: ActorRun | None, topic: Topic, sender: Address | None, envelope: MessageEnvelope
    ) -> None:
        """Publish; inside a handler as part of its run. The envelope has an id, or gets one from the run."""
        only_here = await self._recipients_only_here(topic, sender)
        if run is None:
            await self._publish_outside(topic, sender, envelope, only_here)
            return
        run.publish(topic, envelope)
        for recipient in only_here:
            run.send(recipient, envelope)

    async def _publish_outside(
        self, topic: Topic, sender: Address | None, envelope: MessageEnvelope, only_here: Sequence[Address]
    ) -> None:
        data, source = encode_envelope(envelope), instance_key(topic.source)
        address = "" if sender is None else f"{agent_name(sender.type)}/{instance_key(sender.key)}"
        with sending(TOPICS, message=envelope.message_id) as traceparent:
            context = published(b"", topic.type, address, traceparent)
            await self._publish_to_all(topic, source, address, envelope.message_id, data, context)
        for recipient in only_here:
            await self._send(envelope.message_id, recipient, data, context)

    async def _publish_to_all(
        self, topic: Topic, source: str, address: str, id: str, data: bytes, context: bytes
    ) -> None:
        topics = await self._host.topics()
        while True:
            try:
                await topics.publish(id, topic.type, source, data, context=context, sender=address)
                return
            except Rejected as error:
                if error.retry_after_seconds is None:
                    raise
                await asyncio.sleep(error.retry_after_seconds)

    async def _send(self, id: str, recipient: Address, data: bytes, context: bytes) -> None:
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        bus, _ = await self._host.place(name, key)
        task = fingerprint(id, name, key, digits=32)
        new = Submission(task, RUNTIME_SOURCE, task, fingerprint(data.decode()), name, data, key=key, context=context)
        while True:
            try:
                await bus.submit(new)
                return
            except Rejected as error:
                if error.retry_after_seconds is None:
                    # As on the broker, an unknown recipient does not keep the message from the others.
                    logger.warning(
                        "a subscription names the recipient %s/%s: %s", recipient.type, recipient.key, error.message
                    )
                    return
                await asyncio.sleep(error.retry_after_seconds)

    async def _recipients_only_here(self, topic: Topic, sender: Address | None) -> list[Address]:
        """Return the agents that get the message only by subscriptions that the broker does not store."""
        found: dict[tuple[str, str], Address] = {}
        for subscription in self._subscriptions:
            if self._vocabulary.topic_of(subscription) is None and subscription.is_match(topic):
                agent = subscription.map_to_agent(topic)
                found[agent_name(agent.type), agent.key] = agent
        if sender is not None:
            found.pop((agent_name(sender.type), sender.key), None)
        if found:
            for kept in await (await self._host.topics()).subscriptions():
                if _matches(kept, topic.type):
                    found.pop((kept.agent, topic.source), None)
        return list(found.values())


def _matches(kept: TopicSubscription, topic: str) -> bool:
    return topic.startswith(kept.topic) if kept.prefix else topic == kept.topic


class Messages:
    """The messages that this process sends: each passes the intervention handlers, and so does its answer.

    Any: messages, tokens and topics are the user's own types, or another library's.
    """

    def __init__(
        self,
        requests: Requests,
        publishing: Publishing,
        actors: Actors,
        interventions: Sequence[Any],
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        """`ready` raises the error of the runtime's start."""
        self._requests = requests
        self._publishing = publishing
        self._actors = actors
        self._interventions = interventions
        self._ready = ready

    async def send(
        self,
        message: Any,
        recipient: AgentId,
        sender: AgentId | None,
        cancellation_token: Any,
        message_id: str | None,
        timeout: float | None,
    ) -> Any:
        """Call an agent and return its answer, as `Runtime.send_message` does."""
        vocabulary = self._actors.vocabulary
        token = cancellation_token or vocabulary.cancellation_token()
        if token.is_cancelled() and not vocabulary.cancelled_is_handled:
            raise asyncio.CancelledError("the token was cancelled before the message was sent")
        context = self._context(sender, token, message_id)
        message = await self._intervened(
            message,
            lambda handler, now: handler.on_send(now, message_context=context, recipient=recipient),
            f"the message to {recipient}",
        )
        envelope = self._envelope(message, sender, message_id)
        await self._ready()
        output = await self._requests.ask(recipient, envelope, token, timeout)
        response = decode_response(output, self._actors.registry)
        return await self._intervened(
            response,
            lambda handler, now: handler.on_response(now, sender=recipient, recipient=sender),
            f"the response of {recipient}",
        )

    async def _intervened(self, message: Any, ask: Callable[[Any, Any], Awaitable[Any]], what: str) -> Any:
        """Return the message after all intervention handlers. `what` describes it in the error if one drops it."""
        vocabulary = self._actors.vocabulary
        changed = await intervene(self._interventions, message, ask, vocabulary.drop_message)
        if changed is vocabulary.drop_message:
            raise vocabulary.dropped(f"an intervention handler dropped {what}")
        return changed

    async def publish(
        self,
        message: Any,
        topic_id: Any,
        sender: AgentId | None,
        cancellation_token: Any,
        message_id: str | None,
    ) -> None:
        """Publish to a topic, as `Runtime.publish_message` does."""
        vocabulary = self._actors.vocabulary
        token = cancellation_token or vocabulary.cancellation_token()
        context = self._context(sender, token, message_id, topic_id)
        message = await intervene(
            self._interventions,
            message,
            lambda handler, now: handler.on_publish(now, message_context=context),
            vocabulary.drop_message,
        )
        if message is vocabulary.drop_message:
            logger.info("an intervention handler dropped a message to topic %s", topic_id)
            return
        envelope = self._envelope(message, sender, message_id, topic_id)
        run = current_run(self._actors)
        if run is None:
            envelope.message_id = envelope.message_id or secrets.token_hex(16)
            # Before publishing, since a handler may begin at once.
            self._actors.published_tokens[envelope.message_id] = token
        await self._publishing.publish(run, topic_id, sender, envelope)
        self._actors.published_tokens[envelope.message_id] = token

    def _context(self, sender: AgentId | None, token: Any, message_id: str | None, topic_id: Any = None) -> Any:
        """Return the context that intervention handlers see; without a topic, of a request."""
        return self._actors.vocabulary.message_context(
            sender=sender,
            topic_id=topic_id,
            is_rpc=topic_id is None,
            cancellation_token=token,
            message_id=message_id or secrets.token_hex(16),
        )

    def _envelope(
        self, message: Any, sender: AgentId | None, message_id: str | None, topic_id: Any = None
    ) -> MessageEnvelope:
        """Return a message as it is sent; without a topic, a request."""
        return MessageEnvelope(
            content_of(message, self._actors.registry),
            sender="" if sender is None else f"{sender.type}/{sender.key}",
            topic="" if topic_id is None else f"{topic_id.type}/{topic_id.source}",
            message_id=message_id or "",
            is_rpc=topic_id is None,
        )
