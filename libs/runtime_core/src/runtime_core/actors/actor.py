"""A handler's run: one message for one agent object, driven like any durable run.

The handler may use asyncio as it likes. What it asks of other agents is asked while its turn is in flight, and each
request is known by what it says: after a crash the handler runs again from the top, with the state as it was, and a
request that was made before gets the answer that was recorded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol, Unpack, cast
from weakref import WeakValueDictionary

import msgspec

from runtime_core.actors import errors as failures
from runtime_core.actors.errors import UNDELIVERABLE, Failures
from runtime_core.actors.identity import Address, Topic, agent_name, instance_key, key_of, pool_of, type_of
from runtime_core.actors.instances import Instance, Instances
from runtime_core.actors.message import (
    MessageEnvelope,
    decode_envelope,
    encode_envelope,
    encode_response,
    message_of,
)
from runtime_core.actors.serialization import SerializationRegistry
from runtime_core.actors.vocabulary import Vocabulary
from runtime_core.bus.replies import Answer
from runtime_core.consumer.effects import FAILED, Call, Completed, Failed, Publish, Send, TurnResult
from runtime_core.declare.declaration import Place
from runtime_core.declare.encoding import encode
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.declare.schema import Schema
from runtime_core.errors import LimitExceeded, Outcome, WeftError
from runtime_core.ids import child_run, fingerprint, step_digest
from runtime_core.record.step import Step as Row
from runtime_core.runs.definition import AgentDefinition, Coro
from runtime_core.runs.failure import failure_of, text_of
from runtime_core.runs.journal import payload_of, status_of
from runtime_core.runs.ports import RunPort, RunStart, TurnRun
from runtime_core.runs.sharing import unwrapped
from runtime_core.runs.step import recorded_error

logger = logging.getLogger(__name__)

TURN_SECONDS = 24 * 3600.0
"""How long a handler may run, unless its registration says otherwise: what it waits for counts."""
FLUSH_SECONDS = 0.05
"""How long a published message waits for the commit, where the handler goes on."""
ENDING_SECONDS = 2.0
"""How long a handler that was cancelled is waited for; one that ignores it goes on for nothing."""
REMEMBERED_ERRORS = 1000


class AskingPort(RunPort, Protocol):
    """What an actor's turn needs of the broker; `TurnPort` has it."""

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Send | Publish] = (), state: bytes = b""
    ) -> dict[str, asyncio.Future[Answer]]: ...


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
        """Called with what the handler of a published message raised, when it is not tried again."""
        self.shared = False
        """Whether other processes may run the same agents: then a call back may arrive there."""
        self.tokens: dict[str, Any] = {}
        """Cancellation tokens of callers in this process, by `task|run`. Any: another library's class."""
        self.published_tokens: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Those given with published messages, by message id: nobody can fire one that nobody holds."""
        self._runs: dict[str, set[ActorRun]] = {}
        self._raised: OrderedDict[str, BaseException] = OrderedDict()
        self._stopping = False

    def begin(self, run: ActorRun) -> None:
        self._runs.setdefault(run.task_id, set()).add(run)

    def end(self, run: ActorRun) -> None:
        there = self._runs.get(run.task_id)
        if there is not None:
            there.discard(run)
            if not there:
                del self._runs[run.task_id]

    def cancel(self, task: str, run: str = "r") -> None:
        """Tell the handlers of a request that run in this process; the broker tells the others."""
        for each in list(self._runs.get(task, ())):
            if each.run_id == run or each.run_id.startswith(f"{run}/"):
                each.cancel("the caller cancelled it")

    def stop(self) -> None:
        """Give up handlers that wait for others, which this process runs no more. Their messages are handled again."""
        self._stopping = True
        for runs in list(self._runs.values()):
            for run in list(runs):
                run.give_up_waiting()

    def cut_off(self) -> None:
        """End all handlers now. Their messages are handled again."""
        for runs in list(self._runs.values()):
            for run in list(runs):
                run.cut_off()

    def start(self) -> None:
        self._stopping = False

    def begin_anew(self) -> None:
        """The event loop is another one: no handler of the last one goes on."""
        self._runs.clear()
        self.tokens.clear()
        self.instances.release()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def note_raised(self, place: str, error: BaseException) -> None:
        """Keep the very error for a caller in this process, who gets it instead of a copy."""
        self._raised[place] = error
        if len(self._raised) > REMEMBERED_ERRORS:
            self._raised.popitem(last=False)

    def failed(self, place: str, type: str, message: str) -> BaseException:
        """The error that a request ended with."""
        if type == UNDELIVERABLE:
            return self.vocabulary.undeliverable(message)
        raised = self._raised.pop(place, None)
        if raised is not None and self.failures.name(raised) == type:
            return raised
        return self.failures.error(type, message)


class ActorDefinition(AgentDefinition):
    """A registered type of agents, as the core sees it: a name, a work stream of its own, and how a run is made."""

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

    def make_run(self, **start: Unpack[RunStart]) -> TurnRun:
        return ActorRun(self, **start)

    def input_schema(self) -> Schema:
        return {}

    def output_schema(self) -> Schema | None:
        return None

    def decode_input(self, data: bytes) -> object:
        return decode_envelope(data)

    def start(self, ctx: object, value: object) -> Coro:
        raise WeftError(f"{self.what} is run by its own kind of run")


_current: ContextVar[ActorRun | None] = ContextVar("weft actor run", default=None)


def current_run(actors: Actors) -> ActorRun | None:
    """The run whose handler calls this, if it is one of these actors and still going on."""
    run = _current.get()
    return run if run is not None and run.actors is actors and not run.over else None


class ActorRun:
    """One message in the hands of one agent object. Belongs to one event loop."""

    def __init__(self, definition: ActorDefinition, **start: Unpack[RunStart]) -> None:
        self.definition = definition
        self.actors = definition.actors
        self.task_id = start["task_id"]
        self.run_id = start["run_id"]
        self.key = start.get("key", "")
        self.over = False
        # A handler port has `ask`; the ports of other runs need not, so the general type does not name it.
        self._port = cast(AskingPort, start["port"])
        self._input = start["input"]
        self._state = start.get("state", b"")
        self._journal: Mapping[str, bytes] = start.get("journal", {})
        self._overrides = dict(start.get("overrides", {}))
        self._attempt = start.get("attempt", 1)
        self._owner = start.get("owner", "")
        self._token: Any = self.actors.tokens.get(self._place) or self.actors.vocabulary.cancellation_token()
        self._instance: Instance | None = None
        self._asked: Counter[str] = Counter()
        self._published: list[Send | Publish] = []
        self._rows: list[Row] = []
        self._waiting = 0
        self._main: asyncio.Task[TurnResult] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._lost: asyncio.Future[None] | None = None
        """Done when nothing may be committed any more."""
        self._is_rpc = False
        self._cut_off = False
        """Whether this run's handler was cancelled from here, and not by what it awaited."""

    # -- as the core drives it ---------------------------------------------------------------------------------

    async def advance(self) -> TurnResult:
        """Handle the message. Raises what the broker's port raised: then nothing may be committed."""
        if self.over:
            raise WeftError(f"run {self.run_id} of task {self.task_id} is over: make a new one to go on")
        self.actors.begin(self)
        try:
            self._main = asyncio.create_task(self._handle(), name=f"handle {self.definition.name}/{self.key}")
            limit = self.definition.timeout_seconds
            self._lost = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._main, self._lost), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None:
                await asyncio.wait((self._main,), timeout=ENDING_SECONDS)
                raise self._fault
            if not self._main.done():
                self._cut_off = True
                self._main.cancel()
                await asyncio.wait((self._main,), timeout=ENDING_SECONDS)
                result: TurnResult = Failed(
                    "TimeLimit",
                    f"a handler of {self.definition.what} ran for more than {limit:g} s; raise its timeout_seconds",
                    retryable=False,
                    rejected=self._is_rpc,
                )
            else:
                result = self._main.result()
        finally:
            self.over = True
            self._stop_flushing()
            self.actors.end(self)
        result.steps = self._rows
        return result

    def deliver(self, step: str, value: bytes) -> None:
        """An actor's turn waits for its answers itself."""

    @property
    def awaited(self) -> frozenset[str]:
        return frozenset()

    def cancel(self, reason: str) -> None:
        """Fire the handler's cancellation token."""
        self._token.cancel()

    def drop(self) -> None:
        """Forget the run: its handler is cancelled, and nothing more is asked or sent."""
        self.over = True
        self._stop_flushing()
        self._cut_off = True
        if self._main is not None and not self._main.done():
            self._main.cancel()

    def give_up_waiting(self) -> None:
        """The process stops: a handler that waits for another agent is handled again from the top, later."""
        if self._waiting:
            self.cut_off()

    def cut_off(self) -> None:
        """End the handler without a result."""
        self._cut(asyncio.CancelledError("the runtime stops"))

    # -- what the handler asks for -----------------------------------------------------------------------------

    async def request(
        self, recipient: Address, envelope: MessageEnvelope, token: Any, timeout: float | None = None
    ) -> bytes:
        """Ask another agent; returns its response (JSON). Raises the error that its handler raised.

        `token`, any library's cancellation token, is what the recipient's handler sees where it runs here. `timeout`,
        in seconds, limits a request to another partition in place of the namespace's limit.
        """
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        digest = step_digest("agent", name, key, encode_envelope(envelope))
        step = self._step("c", digest)
        if not envelope.message_id:
            envelope.message_id = fingerprint(self.task_id, self.run_id, step)
        child = child_run(self.run_id, step)
        place = f"{self.task_id}|{child}"
        value, state = self._journal.get(step), self._overrides.pop(step, b"")
        if value is None:
            call = Call("agent", step, name, encode_envelope(envelope), digest, key=key, pool=pool_of(name))
            if timeout is not None:
                call.timeout_ms = max(1, int(timeout * 1000))
            self.actors.tokens[place] = token
            self._waiting += 1
            try:
                if self.actors.stopping:
                    self.give_up_waiting()
                answers = await self._ask([call])
                value, state = await answers[step]
            finally:
                self._waiting -= 1
                self.actors.tokens.pop(place, None)
        await self._see(state)
        if status_of(value) == FAILED:
            raise self.actors.failed(place, *recorded_error(value))
        return unwrapped(payload_of(value))[0]

    def publish(self, topic: Topic, envelope: MessageEnvelope) -> None:
        """Publish with this turn's commit, with the next request, or soon, whichever comes first."""
        key = instance_key(topic.source)
        digest = step_digest("publish", topic.type, key, encode_envelope(envelope))
        self._send_out("publish", topic.type, key, envelope, digest)

    def send(self, recipient: Address, envelope: MessageEnvelope) -> None:
        """Send a published message to an agent that only this process knows to want it."""
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        self._send_out("send", name, key, envelope, step_digest("send", name, key, encode_envelope(envelope)))

    def _send_out(self, kind: str, name: str, key: str, envelope: MessageEnvelope, digest: str) -> None:
        step = self._step("p", digest)
        if not envelope.message_id:
            envelope.message_id = fingerprint(self.task_id, self.run_id, step)
        data = encode_envelope(envelope)
        now = time.time() * 1000
        self._rows.append(
            Row(self.run_id, kind, name, "completed", now, now, step, self._attempt, key, msgspec.Raw(data),
                owner=self._owner)
        )  # fmt: skip
        if step in self._journal:
            return  # it left with a request of an earlier attempt
        message = Publish if kind == "publish" else Send
        self._published.append(message(step, name, key, data, digest))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_soon(), name="publish in mid-turn")

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        self._flushing = None
        if self._published and not self.over:
            try:
                await self._ask([])
            except (WeftError, asyncio.CancelledError):
                return  # the run has been told

    async def _ask(self, calls: list[Call]) -> dict[str, asyncio.Future[Answer]]:
        state = await self._state_now() if calls and self.actors.shared else b""
        sends, self._published = self._published, []
        try:
            return await self._port.ask(calls, sends, state)
        except LimitExceeded:
            raise
        except WeftError as error:
            # The turn is lost, or the broker is: whatever the handler makes of it, nothing may be committed.
            self._abort(error)

    async def _state_now(self) -> bytes:
        """What a call back sees that another process handles."""
        instance = self._instance
        if instance is None or not instance.keeps_state:
            return b""
        state = await instance.state()
        if not self.definition.interleave:
            instance.known = state
        return state

    async def _see(self, state: bytes) -> None:
        """A call back has changed this agent's state: the object must agree, if it was handled elsewhere."""
        instance = self._instance
        if state and instance is not None and instance.keeps_state and instance.known != state:
            await instance.load(state)

    def _abort(self, fault: BaseException) -> NoReturn:
        self._cut(fault)
        raise asyncio.CancelledError("the turn is lost")

    def _cut(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self._cut_off = True
        if self._main is not None and not self._main.done():
            self._main.cancel()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    def _step(self, letter: str, digest: str) -> str:
        """The n-th of equal requests has the same id in every execution."""
        name = letter + digest
        self._asked[name] += 1
        return f"{name}.{self._asked[name] - 1}"

    def _stop_flushing(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    # -- the handler -------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"{self.task_id}|{self.run_id}"

    async def _handle(self) -> TurnResult:
        _current.set(self)
        type, key = type_of(self.definition.name), key_of(self.key)
        instances = self.actors.instances
        try:
            envelope = decode_envelope(self._input)
            self._is_rpc = envelope.is_rpc or bool(envelope.operation)
            self._token = self.actors.published_tokens.get(envelope.message_id) or self._token
            self._instance = await instances.enter(
                type,
                key,
                self.task_id,
                self.run_id,
                self._state,
                alone=not self.definition.interleave,
                shared=self.actors.shared,
            )
        except Exception as error:
            return self._failed(error)
        instance = self._instance
        try:
            output = await self._call(instance, envelope)
            state = await instance.state() if instance.keeps_state else b""
        except asyncio.CancelledError:
            self._undo(instance)
            if self._cut_off:
                raise
            # Something that it awaited was cancelled, most often by the caller's token: an answer like any other.
            await self._publish_the_rest()
            return Failed("CancelledError", "the handler was cancelled", retryable=False, rejected=True)
        except BaseException as error:
            self._undo(instance)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            failed = self._failed(error)
            if self._is_last(failed):
                await self._publish_the_rest()
            return failed
        finally:
            instances.leave(instance, (self.task_id, self.run_id))
        instance.known = state if instance.keeps_state else b""
        sends, self._published = self._published, []
        # Beside this handler another one may have written the same instance's state.
        changed = state if state and (self.definition.interleave or state != self._state) else None
        return Completed(output, sends=sends, state=changed)

    async def _call(self, instance: Instance, envelope: MessageEnvelope) -> bytes:
        if envelope.operation:
            return await _operate(instance, envelope)
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
        with vocabulary.handler_scope(id, message, context):
            response = await instance.agent.on_message(message, ctx=context)
        return encode_response(response, self.actors.registry) if envelope.is_rpc else b"null"

    def _undo(self, instance: Instance) -> None:
        """What a failed handler has changed does not count: the next one begins with what is on the broker.

        Where handlers run beside each other, nobody can tell whose changes those were: the object stays as it is.
        """
        if instance.keeps_state and not self.definition.interleave:
            instance.known = None

    async def _publish_the_rest(self) -> None:
        """What a handler published before it failed for good, of its failure most often, is published."""
        if self._published:
            await self._ask([])

    def _is_last(self, failed: Failed) -> bool:
        """Whether the message is not handled again."""
        return not failed.retryable or self._attempt >= self.definition.retry.attempts

    def _failed(self, error: BaseException) -> Failed:
        if isinstance(error, Outcome):
            failed = failure_of(error)
        else:
            name = self.actors.failures.name(error)
            failed = Failed(name, failures.text_of(error), text_of(error))
        if self._is_rpc:
            if failed.retry_after_seconds is None:
                # The caller has the error at once, and decides; it is an answer, not a defect of the runtime.
                failed.retryable, failed.rejected = False, True
                self.actors.note_raised(self._place, error)
        elif self._is_last(failed):
            logger.error("a handler of %s failed for %s: %s", self.definition.what, self._place, failed.type)
            self.actors.on_unhandled(error)
        return failed


async def _operate(instance: Instance, envelope: MessageEnvelope) -> bytes:
    agent = instance.agent
    match envelope.operation:
        case "save_state":
            return encode(await agent.save_state(), "state")
        case "load_state":
            await agent.load_state(msgspec.json.decode(envelope.state))
            return b"null"
        case "metadata":
            metadata = agent.metadata
            found = metadata if isinstance(metadata, dict) else {"description": metadata.description}
            return encode({"description": found["description"]}, "metadata")
    raise WeftError(f"no operation is named {envelope.operation!r}")


def split(address: str) -> tuple[str, str]:
    """Type and the rest of `type/rest`."""
    type, _, rest = address.partition("/")
    return type, rest
