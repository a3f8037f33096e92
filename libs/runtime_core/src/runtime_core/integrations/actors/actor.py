"""A handler's run: one message for one agent object.

The handler may use asyncio freely. Its requests to other agents are sent in mid-turn. Each request is
identified by its content. After a crash the handler runs again from the top, with the state at its start, and a
repeated request gets the recorded answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from runtime_core.bus.deliveries import RunFields
from runtime_core.bus.replies import Answer
from runtime_core.consumer.effects import Completed, Failed, TurnResult
from runtime_core.consumer.settle import failure_of, traceback_of
from runtime_core.declare.declaration import Place, RetryPolicy
from runtime_core.declare.schema import Schema
from runtime_core.errors import JournalMoved, LimitExceeded, Outcome, WeftError, error_of_exit
from runtime_core.integrations.actors import errors as failures
from runtime_core.integrations.actors.errors import UNDELIVERABLE, Failures
from runtime_core.integrations.actors.identity import (
    Address,
    Topic,
    agent_name,
    instance_key,
    key_of,
    pool_of,
    split,
    type_of,
)
from runtime_core.integrations.actors.instances import Instance, Instances, Stepping, done
from runtime_core.integrations.actors.message import (
    MessageEnvelope,
    decode_envelope,
    encode_envelope,
    encode_response,
    message_of,
)
from runtime_core.integrations.actors.protocol import Vocabulary
from runtime_core.integrations.actors.serialization import SerializationRegistry
from runtime_core.runs.calls import Outgoing, PublishStep, SendStep
from runtime_core.runs.definition import AgentDefinition, Coro
from runtime_core.runs.effects import Call
from runtime_core.runs.journal import payload_of, recorded_error, status_of
from runtime_core.runs.ports import Attempt, Meta, RunPort, Workplace
from runtime_core.runs.run import Run, RunDefinition
from runtime_core.runs.scheduler import Branch
from runtime_core.runs.shared_context import unwrapped
from runtime_core.runs.step import DurableStep
from runtime_core.wire.ids import ROOT_RUN, child_run, fingerprint, step_digest
from runtime_core.wire.step import RESULT_ERROR

logger = logging.getLogger(__name__)

TURN_SECONDS = 24 * 3600.0
"""The default limit of a handler, including the time that it waits for others."""
FLUSH_SECONDS = 0.05
"""How long a published message waits for the commit while its handler continues."""


class Actors:
    """What all actors of one runtime share in this process."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        registry: SerializationRegistry,
        instances: Instances,
        on_unhandled: Callable[[BaseException], None],
    ) -> None:
        self.vocabulary = vocabulary
        self.registry = registry
        self.instances = instances
        self.failures = Failures()
        self.on_unhandled = on_unhandled
        """Called with the error of a published message's handler if the message is not retried."""
        self.shared = False
        """Whether other processes may run the same agents, so that a reentrant call may arrive there."""
        self.stepping: Stepping | None = None
        """Set while the program steps through its messages."""
        self.tokens: dict[str, Any] = {}
        """Cancellation tokens of callers in this process, by `task|run`. Any: another library's class."""
        self.published_tokens: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Tokens given with published messages, by message id, while a program holds them."""
        self._runs: dict[str, set[ActorRun]] = {}
        self.stopping = False
        """Whether this process stops running the agents."""

    def begin(self, run: ActorRun) -> None:
        self._runs.setdefault(run.task_id, set()).add(run)

    def end(self, run: ActorRun) -> None:
        there = self._runs.get(run.task_id)
        if there is not None:
            there.discard(run)
            if not there:
                del self._runs[run.task_id]

    @property
    def begun(self) -> int:
        """The number of handlers in this process that have begun and not ended."""
        return len(self.running()) - (0 if self.stepping is None else len(self.stepping))

    def running(self) -> list[ActorRun]:
        """The handlers of this process, with those that wait to begin."""
        return [run for runs in self._runs.values() for run in runs]

    def cancel(self, task: str, run: str = ROOT_RUN) -> None:
        """Cancel the handlers of a request in this process; the broker informs other processes."""
        for each in list(self._runs.get(task, ())):
            if each.run_id == run or each.run_id.startswith(f"{run}/"):
                each.cancel("the caller cancelled it")

    def stop(self) -> None:
        """Stop the handlers that wait for agents that this process no longer runs. Their messages are handled again."""
        self.stopping = True
        for run in self.running():
            run.give_up_waiting()

    def cut_off(self) -> None:
        """Cancel all handlers now. Their messages are handled again."""
        for run in self.running():
            run.cut_off()

    def start(self) -> None:
        self.stopping = False

    def reset(self) -> None:
        """Forget all handlers: they ended with their event loop."""
        self._runs.clear()
        self.stepping = None
        self.tokens.clear()
        self.instances.release()

    def failed(self, place: str, type: str, message: str) -> BaseException:
        """Return the error that ended a request."""
        if type == UNDELIVERABLE:
            return self.vocabulary.undeliverable(message)
        return self.failures.raised(place, type) or self.failures.error(type, message)


class ActorRun(Run):
    """One message for one agent object: a run whose code is the object's handler.

    Its steps are requests and messages that are sent in mid-turn. A step's id comes from its content, not
    from its place.
    """

    def __init__(
        self,
        definition: RunDefinition,
        attempt: Attempt,
        stored: RunFields,
        port: RunPort,
        workplace: Workplace,
        meta: Meta,
    ) -> None:
        super().__init__(definition, attempt, stored, port, workplace, meta)
        assert isinstance(definition, ActorDefinition)
        self.actor = definition
        self.actors = definition.actors
        self.began_at = time.monotonic()
        self.handling = False
        """Whether the handler is running. Messages that it sends later do not belong to this run."""
        self._token: Any = self.actors.tokens.get(self._place) or self.actors.vocabulary.cancellation_token()
        self._instance: Instance | None = None
        self._asked: Counter[str] = Counter()
        self._waiting = 0
        self.asked: dict[str, tuple[Address, float]] = {}
        """By place, each open request's recipient and when it was made."""
        self._begun: asyncio.Future[None] | None = None
        """Done when the handler has begun, if the program steps through its messages."""
        self._queued = False
        """Whether it waits for its step."""
        self._shared_state = False
        """Whether a request of this turn has carried the object's state."""
        self._sharing = asyncio.Lock()
        """Held by the request that carries the state."""
        self._flushing: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[object] | None = None
        """The running write of publications."""
        self._is_rpc = False

    # -- as the core drives it ---------------------------------------------------------------------------------

    async def advance(self) -> TurnResult:
        """Handle the message. A handler's run has one turn."""
        self.handling = True
        self.actors.begin(self)
        try:
            result = await super().advance()
            if isinstance(result, Completed):
                result.answered = self.answered
            return result
        finally:
            if self._begun is not None:
                done(self._begun)
            self.handling = False
            self._stop_flushing()
            self.actors.end(self)

    def code(self) -> Coro:
        return self._handle()

    def take_id(self, branch: Branch, kind: str = "", digest: str = "") -> str:
        """Return an id from the step's content and the number of equal steps before it."""
        self.steps_taken += 1
        name = ("c" if kind == "agent" else "p") + digest
        self._asked[name] += 1
        return f"{name}.{self._asked[name] - 1}"

    def timed_out(self, seconds: float) -> Failed:
        return Failed(
            "TimeLimit",
            f"a handler of {self.actor.what} ran for more than {seconds:g} s; raise its timeout_seconds",
            retryable=False,
            rejected=self._is_rpc,
        )

    def cancel(self, reason: str) -> None:
        """Fire the handler's cancellation token. The handler decides what follows."""
        self._token.cancel()

    def drop(self) -> None:
        self.handling = False
        self._stop_flushing()
        super().drop()

    def give_up_waiting(self) -> None:
        """Stop a handler that waits for another agent or for its step, since the process stops. It runs again later."""
        if self._waiting or self._queued:
            self.cut_off()

    def cut_off(self) -> None:
        """End the handler without a result."""
        self.flow.abandon(asyncio.CancelledError("the runtime stops"))

    # -- requests of the handler -------------------------------------------------------------------------------

    async def request(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None = None
    ) -> bytes:
        """Call another agent and return its response (JSON). Raises its handler's error.

        The recipient's handler sees `token`, any library's cancellation token, if it runs in this process. `timeout`,
        in seconds, replaces the namespace's limit of a request to another partition.
        """
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        data = encode_envelope(envelope)
        step: DurableStep[bytes] = DurableStep(
            self, self.branch, "agent", name, key, data, step_digest("agent", name, key, data)
        )
        self._name_message(step, envelope)
        asked_run = child_run(self.run_id, step.id)
        place = f"{self.task_id}|{asked_run}"
        state = self.overrides.pop(step.id, b"")
        value = self.find(step)
        if value is None:
            call = Call("agent", step.id, name, step.data, step.digest, key=key, pool=pool_of(name))
            if timeout is not None:
                call.timeout_ms = max(1, int(timeout * 1000))
            self.actors.tokens[place] = token
            self.asked[place] = (recipient, time.monotonic())
            self._waiting += 1
            if self._instance is not None:
                self._instance.freed.set()
            try:
                if self.actors.stopping:
                    self.cut_off()
                    self.flow.check_going()
                answers = await self._ask([call])
                value, state = await answers[step.id]
            except JournalMoved as moved:
                raise self.flow.abandon(moved) from moved
            finally:
                self._waiting -= 1
                self.asked.pop(place, None)
                self.actors.tokens.pop(place, None)
        self.answered.append(step.id)
        state = self.later_state(state)
        if self._instance is not None:
            await self._end_copies(self._instance, asked_run)
            await self._instance.catch_up(state)
        if status_of(value) == RESULT_ERROR:
            raise self.actors.failed(place, *recorded_error(value))
        return unwrapped(payload_of(value))[0]

    async def _end_copies(self, instance: Instance, run: str) -> None:
        """End the handlers of an answered request that still change this handler's object.

        A recreated group delivers a reentrant call to this process while another one handles it.
        """
        while copies := [
            place
            for place in instance.holders
            if place[0] == self.task_id and (place[1] == run or place[1].startswith(f"{run}/"))
        ]:
            for each in self.actors.running():
                if (each.task_id, each.run_id) in copies:
                    each.cut_off()
            instance.freed.clear()
            await instance.freed.wait()

    def publish(self, topic: Topic, envelope: MessageEnvelope) -> None:
        """Publish with the next request, with this turn's commit, or soon, whichever comes first."""
        name, key, data = topic.type, instance_key(topic.source), encode_envelope(envelope)
        digest = step_digest("publish", name, key, data)
        self._send_out(PublishStep(self, self.branch, name, key, data, digest), envelope)

    def send(self, recipient: Address, envelope: MessageEnvelope) -> None:
        """Send a published message to an agent whose subscription only this process knows."""
        name, key, data = agent_name(recipient.type), instance_key(recipient.key), encode_envelope(envelope)
        digest = step_digest("send", name, key, data)
        self._send_out(SendStep(self, self.branch, name, key, data, digest), envelope)

    def _name_message(self, step: DurableStep[Any], envelope: MessageEnvelope) -> None:
        """Give a message without an id an id that every execution repeats."""
        if not envelope.message_id:
            envelope.message_id = fingerprint(self.task_id, self.run_id, step.id)
            step.data = encode_envelope(envelope)

    def _send_out(self, step: Outgoing[Any], envelope: MessageEnvelope) -> None:
        self._name_message(step, envelope)
        if self.find(step) is not None:  # sent with a request of an earlier attempt, which no commit has recorded
            step.go()
            self.note_sent([self.sends.pop()])
            return
        step.perform(self.branch)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_soon(), name="publish in mid-turn")

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        self._flushing = None
        if self.sends:
            self._writing = asyncio.current_task()
            try:
                await self._ask([])
            except (WeftError, asyncio.CancelledError):
                return  # over a limit the commit publishes them; any other error ends the run
            finally:
                self._writing = None

    async def _ask(self, calls: list[Call]) -> Mapping[str, asyncio.Future[Answer]]:
        if not calls or not self.actors.shared:
            return await self._send(calls, b"")
        async with self._sharing:
            # Later requests carry no state, so they wait until the broker has it.
            had_shared = self._shared_state
            if state := await self._state_now():
                try:
                    return await self._send(calls, state)
                except BaseException:
                    self._shared_state = had_shared
                    raise
        return await self._send(calls, b"")

    async def _send(self, calls: list[Call], state: bytes) -> Mapping[str, asyncio.Future[Answer]]:
        self.flow.check_going()
        sends, self.sends = self.sends, []
        answered = self.answered[-1] if self.answered else ""
        try:
            answers = await self.after_others(partial(self.port.ask, calls, sends, state, answered=answered))
            self.note_sent(sends)
            return answers
        except LimitExceeded:
            self.sends[:0] = sends  # nothing was written: the commit publishes them
            raise
        except WeftError as error:
            # The turn or the broker is lost: nothing may be committed, whatever the handler does with the error.
            raise self.flow.abandon(error) from error

    async def _state_now(self) -> bytes:
        """Return the state for a reentrant call in another process; nothing if the broker has it from this run."""
        instance = self._instance
        if instance is None or not instance.keeps_state:
            return b""
        state = await instance.state()
        if not self.actor.interleave:
            if self._shared_state and instance.known == state:
                return b""  # it would replace what a reentrant call has changed since
            self._shared_state = True
            instance.known = state
        return state

    def _stop_flushing(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    # -- the handler -------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"{self.task_id}|{self.run_id}"

    async def _handle(self) -> bytes:
        """Call the handler and return its response (JSON). An error ends the run."""
        _current.set(self)
        instances = self.actors.instances
        try:
            envelope = decode_envelope(self.input)
            self._is_rpc = envelope.is_rpc or bool(envelope.operation)
            if not envelope.operation:
                await self._step()
            self._token = self.actors.published_tokens.get(envelope.message_id) or self._token
            instance = self._instance = await instances.enter(
                type_of(self.actor.name),
                key_of(self.key),
                self.task_id,
                self.run_id,
                self.state.snapshot,
                alone=not self.actor.interleave,
                shared=self.actors.shared,
                holders=self.holders,
                waits=lambda: self.handling and self._waiting > 0,
            )
        except Exception as error:
            raise self._end(self._failed(error)) from error
        try:
            output = await self._call(instance, envelope)
            await self._written()
            state = await instance.state() if instance.keeps_state else b""
        except asyncio.CancelledError:
            self._undo(instance)
            self.flow.check_going()
            # Something that the handler awaited was cancelled, usually by the caller's token: return that as the
            # answer.
            await self._publish_the_rest()
            failed = Failed("CancelledError", "the handler was cancelled", retryable=False, rejected=True)
            raise self._end(failed) from None
        except KeyboardInterrupt:
            self._undo(instance)
            raise
        except BaseException as error:
            self._undo(instance)
            if isinstance(error, SystemExit):
                # It would end the event loop, and with it all other handlers of this process.
                error = error_of_exit("the handler", error)
            failed = self._failed(error)
            if self._is_last(failed):
                await self._publish_the_rest()
            raise self._end(failed) from error
        finally:
            instances.leave(instance, (self.task_id, self.run_id))
        instance.known = state
        # Another handler may have written the same instance's state concurrently.
        if state and (self.actor.interleave or state != self.state.snapshot):
            self.state.put(state)
        return output

    async def _step(self) -> None:
        """Wait for this handler's step if the program steps through its messages."""
        stepping = self.actors.stepping
        if stepping is not None:
            self._queued = True
            try:
                self._begun = await stepping.enter()
            finally:
                self._queued = False

    def _end(self, failed: Failed) -> asyncio.CancelledError:
        return self.flow.end(failed, f"{failed.type}: {failed.message}")

    async def _call(self, instance: Instance, envelope: MessageEnvelope) -> bytes:
        if envelope.operation:
            return await instance.operate(envelope.operation, envelope.state)
        vocabulary = self.actors.vocabulary
        if envelope.content is None:
            raise vocabulary.cant_handle(f"the message {envelope.message_id!r} has no content")
        id = vocabulary.agent_id(*instance.place)
        message = message_of(envelope.content, self.actors.registry)
        context = vocabulary.message_context(
            sender=vocabulary.agent_id(*split(envelope.sender)) if envelope.sender else None,
            topic_id=vocabulary.topic_id(*split(envelope.topic)) if envelope.topic else None,
            is_rpc=envelope.is_rpc,
            cancellation_token=self._token,
            message_id=envelope.message_id or self.task_id,
        )
        if self._begun is not None:
            done(self._begun)
        with vocabulary.handler_scope(id, message, context):
            response = await instance.agent.on_message(message, ctx=context)
        return encode_response(response, self.actors.registry) if envelope.is_rpc else b"null"

    def _undo(self, instance: Instance) -> None:
        """Discard the changes of a failed handler: the next one begins with the state on the broker.

        With concurrent handlers the changes cannot be separated, so the object stays as it is.
        """
        if instance.keeps_state and not self.actor.interleave:
            instance.known = None

    async def _publish_the_rest(self) -> None:
        """Publish the messages of a handler that failed for good, which often report its failure."""
        await self._written()
        if self.sends:
            await self._ask([])

    async def _written(self) -> None:
        """Wait for a running write: the commit publishes what it cannot write."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    def _is_last(self, failed: Failed) -> bool:
        """Whether the message is not handled again."""
        return not failed.retryable or self.attempt >= self.actor.retry.attempts

    def _failed(self, error: BaseException) -> Failed:
        if isinstance(error, Outcome):
            failed = failure_of(error)
        else:
            name = self.actors.failures.name(error)
            failed = Failed(name, failures.text_of(error), traceback_of(error))
        if self._is_rpc:
            if failed.retry_after_seconds is None:
                # The caller gets the error at once and decides. It is an answer, not a defect of the runtime.
                failed.retryable, failed.rejected = False, True
                self.actors.failures.note_raised(self._place, error)
                logger.warning(
                    "a request to %s failed, %s: %s", self.actor.what, self._place, failed.type, exc_info=error
                )
        elif self._is_last(failed):
            logger.error("a handler of %s failed for %s: %s", self.actor.what, self._place, failed.type, exc_info=error)
            self.actors.on_unhandled(error)
        return failed


class ActorDefinition(AgentDefinition):
    """A registered type of agents as an agent definition: its name, its work stream, and its runs."""

    run_type = ActorRun
    hooked = False  # its messages pass the runtime's intervention handlers instead

    def __init__(
        self,
        type: str,
        actors: Actors,
        place: Place,
        *,
        retry: RetryPolicy | None = None,
        timeout_seconds: float = TURN_SECONDS,
        interleave: bool = False,
    ) -> None:
        name = agent_name(type)
        super().__init__(
            name,
            None,
            place,
            retry=retry or RetryPolicy(attempts=1),
            pool=pool_of(name),
            timeout_seconds=timeout_seconds,
            interleave=interleave,
        )
        self.type = type
        self.actors = actors

    def input_schema(self) -> Schema:
        return {}

    def output_schema(self) -> Schema | None:
        return None

    def decode_input(self, data: bytes) -> object:
        return decode_envelope(data)

    def encode_output(self, value: object) -> bytes:
        assert isinstance(value, bytes)  # already encoded by the handler's run
        return value

    def start(self, ctx: object, value: object) -> Coro:
        raise WeftError(f"{self.what} needs a run of class {self.run_type.__name__}")


_current: ContextVar[ActorRun | None] = ContextVar("weft actor run", default=None)


def current_run(actors: Actors) -> ActorRun | None:
    """Return the run whose handler calls this, if it belongs to these actors and has not ended."""
    run = _current.get()
    return run if run is not None and run.actors is actors and run.handling else None
