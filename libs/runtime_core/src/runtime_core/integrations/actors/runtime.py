"""The runtime of agents: what a program calls.

async with Runtime() as runtime:
    await Writer.register(runtime, "writer", Writer)
    answer = await runtime.send_message(Draft("streams"), AgentId("writer", "default"))
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.announcements import is_announced
from runtime_core.declare.declaration import RetryPolicy, place_of
from runtime_core.errors import InvalidInput
from runtime_core.integrations.actors.actor import TURN_SECONDS, ActorDefinition, Actors, current_run
from runtime_core.integrations.actors.agents import native
from runtime_core.integrations.actors.errors import (
    agent_type_of,
    check_agent,
    check_agent_id,
    check_broker,
    check_class,
    check_factory,
    check_flags,
    check_message,
    check_seconds,
    check_serializer,
    check_settings,
    check_subscription,
    check_topic_id,
    checked_interventions,
    encoded_state,
)
from runtime_core.integrations.actors.host import ActorHost, Saved
from runtime_core.integrations.actors.identity import AgentId, AgentType, agent_name, checked_agent_type, split
from runtime_core.integrations.actors.instances import Instance, Instances
from runtime_core.integrations.actors.message import MessageEnvelope
from runtime_core.integrations.actors.messaging import Messages, Publishing, Requests
from runtime_core.integrations.actors.protocol import Vocabulary
from runtime_core.integrations.actors.serialization import MessageSerializer, SerializationRegistry
from runtime_core.integrations.actors.watch import WAIT_SECONDS, Watch

logger = logging.getLogger(__name__)

AgentT = TypeVar("AgentT")

MAX_INSTANCES = 10_000
IDLE_LOOK_SECONDS = 0.01
IDLE_LOOK_LONGEST_SECONDS = 0.1


class Runtime:
    """Runs agents, and sends and publishes messages durably: a message that the broker has accepted is handled.

    `url` is the broker's; None: WEFT_REDIS_URL, else `memory://`, a private server that ends with this process. With
    another server, this process is a worker for the types registered in it, next to other processes that register them,
    and a client for all types of the namespace.

    `intervention_handlers` see the messages that this process sends and receives. With
    `ignore_unhandled_exceptions=False`, the next `publish_message`, `stop` or `stop_when_idle` raises the error of a
    published message's handler in this process. `services=False`: no services run, so this process does their work. Up
    to `max_instances` agent objects whose state is on the broker stay in memory. A process that is silent for
    `lease_seconds` is declared dead, and others handle its messages. A stop waits `shutdown_seconds` for running
    handlers. With `replay_unheard`, a type that subscribes also gets messages that were published before it first
    appeared and had no subscriber. `own_namespace`: without `namespace` and WEFT_NAMESPACE the runtime gets its own
    namespace, which `close` erases.

    Any: messages, agents and states are the user's own types.
    """

    def __init__(
        self,
        url: str | None = None,
        namespace: str | None = None,
        *,
        intervention_handlers: Iterable[Any] | None = None,
        ignore_unhandled_exceptions: bool = True,
        serializers: Sequence[MessageSerializer[Any]] = (),
        services: bool = True,
        max_instances: int = MAX_INSTANCES,
        lease_seconds: float = 3.0,
        shutdown_seconds: float = 30.0,
        replay_unheard: bool = True,
        own_namespace: bool = False,
        vocabulary: Vocabulary | None = None,
        registry: SerializationRegistry | None = None,
    ) -> None:
        check_broker(url, namespace)
        check_flags(
            services=services,
            replay_unheard=replay_unheard,
            own_namespace=own_namespace,
            ignore_unhandled_exceptions=ignore_unhandled_exceptions,
        )
        check_settings(lease_seconds, shutdown_seconds, max_instances)
        interventions = checked_interventions(intervention_handlers)
        check_serializer(serializers)
        self._vocabulary = vocabulary or native()
        self._registry = registry or SerializationRegistry()
        self._registry.add_serializer(serializers)
        self._factories: dict[str, Callable[[], Any] | None] = {}
        self._expected: dict[str, type[Any] | None] = {}
        self._instances = Instances(self._build, self._vocabulary.keeps_state, max_instances)
        self._actors = Actors(self._vocabulary, self._registry, self._instances, self._note_unhandled)
        self._host = ActorHost(
            url,
            namespace,
            self._actors,
            lease_seconds=lease_seconds,
            shutdown_seconds=shutdown_seconds,
            services=services,
            own_namespace=own_namespace,
            on_new_loop=self._reset,
            look=self._look,
        )
        self._ignore_unhandled = ignore_unhandled_exceptions
        self._unhandled: BaseException | None = None
        self._requests = Requests(self._host, self._actors)
        self._watch = Watch(self._host, self._actors, self._requests)
        self._publishing = Publishing(self._host, self._vocabulary, replay_unheard)
        self._host.on_dropped = self._publishing.renew
        self._messages = Messages(self._requests, self._publishing, self._actors, interventions, self._ready)
        self._busy = 0
        """The number of messages that this process is about to send, or waits for an answer to."""
        self._started = False
        self._starting: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to handle messages, including those already queued. Raises RuntimeError if it has been started.

        The next call raises an error of the background start, such as a missing broker.
        """
        self._host.follow_loop()
        if self._started:
            raise RuntimeError("the runtime is already started")
        self._started = True
        self._starting = asyncio.get_running_loop().create_task(self._host.start(), name="start the runtime")

    async def stop(self) -> None:
        """Finish the current messages and stop. Queued messages stay on the broker for the next start.

        Waiting callers get RuntimeStopped. Handlers that wait for other agents are handled again later.
        """
        self._host.follow_loop()
        if not self._started:
            raise RuntimeError("the runtime is not started")
        await self._stop()
        self._raise_unhandled()

    async def stop_when_idle(self) -> None:
        """Stop when no process in the namespace has a queued or running message, and nobody here waits.

        After five seconds the log says which messages wait for whom.
        """
        self._host.follow_loop()
        if not self._started:
            raise RuntimeError("the runtime is not started")
        pause, said_at = IDLE_LOOK_SECONDS, time.monotonic() + WAIT_SECONDS
        while not await self._is_idle():
            if not self._ignore_unhandled and self._unhandled is not None:
                break
            if time.monotonic() >= said_at:
                said_at = math.inf if await self._watch.log_waiting() else time.monotonic() + WAIT_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, IDLE_LOOK_LONGEST_SECONDS)
        await self.stop()

    async def stop_when(self, condition: Callable[[], bool]) -> None:
        """Stop when the condition holds; it is checked repeatedly."""
        if not callable(condition):
            raise InvalidInput("condition", f"{condition!r} is not callable: pass a function without arguments")
        while not condition():  # noqa: ASYNC110  # the condition is the caller's, and no event says when it changes
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        await self.stop()

    async def close(self) -> None:
        """Stop, close the agent objects of this process, and disconnect from the broker."""
        self._host.follow_loop()
        try:
            if self._started:
                await self._stop()
        finally:
            await self._requests.close()
            await self._instances.close()
            await self._host.close()
        self._raise_unhandled()

    async def __aenter__(self) -> Runtime:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stop(self) -> None:
        self._started = False
        starting, self._starting = self._starting, None
        try:
            if starting is not None:
                await asyncio.wait((starting,))
            await self._host.stop()
        finally:
            self._requests.fail_waiting()
        if starting is not None:
            starting.result()

    async def _is_idle(self) -> bool:
        await self._ready()
        return not self._in_use() and await self._host.idle() and not self._in_use()

    def _in_use(self) -> bool:
        return self._busy > 0 or self._requests.waiting

    async def _ready(self) -> None:
        """Raise the error of the background start."""
        self._host.follow_loop()
        # A copy, since a concurrent stop clears it.
        starting = self._starting
        if starting is not None:
            await asyncio.wait((starting,))
            starting.result()

    def _reset(self) -> None:
        """Reset in another event loop: the work has ended with the previous one."""
        self._started, self._starting, self._busy = False, None, 0
        self._requests.forget_waiting()

    def _note_unhandled(self, error: BaseException) -> None:
        self._unhandled = self._unhandled or error

    def _raise_unhandled(self) -> None:
        error, self._unhandled = self._unhandled, None
        if error is not None and not self._ignore_unhandled:
            raise error

    async def _look(self) -> None:
        await self._watch.check()

    async def broker(self) -> Sequence[EventBus]:
        """Return the partitions of the broker, for tools that use it directly."""
        return await self._host.buses()

    # -- messages ----------------------------------------------------------------------------------------------

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        sender: AgentId | None = None,
        cancellation_token: Any = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Call an agent and wait for its answer. Raises its handler's error, of the same class.

        With `message_id`, a repeat starts nothing and gets the first request's answer. `timeout`, in seconds, also ends
        the handling of the request. Inside a handler the request is part of its run: it is sent once, even if the
        handler runs again. Raises UndeliverableException at once if no process has registered the type,
        MessageDroppedException if an intervention handler drops the message, SerializationError, RuntimeStopped.
        """
        check_agent_id("recipient", recipient)
        check_message(sender, cancellation_token, message_id)
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._host.follow_loop()
        self._busy += 1  # before the first await: a concurrent `stop_when_idle` must see it
        try:
            return await self._messages.send(message, recipient, sender, cancellation_token, message_id, timeout)
        finally:
            self._busy -= 1

    async def publish_message(
        self,
        message: Any,
        topic_id: Any,
        *,
        sender: AgentId | None = None,
        cancellation_token: Any = None,
        message_id: str | None = None,
    ) -> None:
        """Publish to every agent that subscribes to the topic, except the sender.

        Returns when the broker has the message. Inside a handler, it is sent with the handler's end, its next request,
        or after 50 ms. With `message_id`, a repeat from outside a handler reaches nobody twice. A message without a
        subscriber is kept for types of agents that are registered later with `replay_unheard`. A publication that an
        intervention handler drops raises nothing.
        """
        check_topic_id("topic_id", topic_id)
        check_message(sender, cancellation_token, message_id)
        if current_run(self._actors) is None:
            self._raise_unhandled()
        self._host.follow_loop()
        self._busy += 1
        try:
            await self._messages.publish(message, topic_id, sender, cancellation_token, message_id)
        finally:
            self._busy -= 1

    async def _operate(self, agent: AgentId, operation: str, state: bytes = b"") -> Any:
        """Run an operation on an agent in any process, in order with its messages."""
        envelope = MessageEnvelope(operation=operation, is_rpc=True)
        if state:
            envelope.state = msgspec.Raw(state)
        token = self._vocabulary.cancellation_token()
        await self._ready()
        return msgspec.json.decode(await self._requests.ask(agent, envelope, token))

    # -- agents ------------------------------------------------------------------------------------------------

    async def register_factory(
        self,
        type: str | AgentType,
        agent_factory: Callable[[], AgentT | Awaitable[AgentT]],
        *,
        expected_class: type[AgentT] | None = None,
        retry: RetryPolicy | None = None,
        timeout_seconds: float = TURN_SECONDS,
        interleave: bool = False,
    ) -> AgentType:
        """Let this process run agents of a type; the factory creates one object for each key.

        `retry` applies to published messages whose handler fails; by default the first failure makes a dead letter. A
        request's caller gets its error at once. A handler may run for `timeout_seconds`. With `interleave`, messages of
        one agent are handled concurrently. Raises ValueError if this runtime has the type.
        """
        name = checked_agent_type(agent_type_of(type))
        check_factory(name, agent_factory)
        if name in self._factories:
            raise ValueError(f"agents of type {name!r} are already registered in this runtime: register each type once")
        self._factories[name] = agent_factory
        self._expected[name] = expected_class
        await self._define(name, retry, timeout_seconds, interleave)
        return cast(AgentType, self._vocabulary.agent_type(name))

    async def register_agent_instance(
        self,
        agent_instance: Any,
        agent_id: AgentId,
        *,
        retry: RetryPolicy | None = None,
        timeout_seconds: float = TURN_SECONDS,
        interleave: bool = False,
    ) -> AgentId:
        """Let this process run one agent with this object. Raises ValueError if the agent exists."""
        check_agent_id("agent_id", agent_id)
        check_agent("the caller", agent_instance)
        name = checked_agent_type(agent_id.type)
        if self._instances.find(agent_id) is not None:
            raise ValueError(f"agent {agent_id} is already registered in this runtime: give this object another key")
        known = name in self._factories
        if known and self._factories[name] is not None:
            raise ValueError(
                f"a factory creates agents of type {name!r}: {agent_id} cannot be registered as an object; give it "
                "another type"
            )
        await agent_instance.bind_id_and_runtime(id=agent_id, runtime=self)
        self._instances.put(agent_id, agent_instance)
        if not known:
            self._factories[name] = None
            await self._define(name, retry, timeout_seconds, interleave)
        return agent_id

    async def _define(self, type: str, retry: RetryPolicy | None, timeout_seconds: float, interleave: bool) -> None:
        try:
            await self._host.register(
                ActorDefinition(
                    type,
                    self._actors,
                    place_of(None, 3),
                    retry=retry,
                    timeout_seconds=timeout_seconds,
                    interleave=interleave,
                )
            )
        except BaseException:
            self._factories.pop(type, None)
            raise

    async def _build(self, type: str, key: str) -> Any:
        vocabulary = self._vocabulary
        id = vocabulary.agent_id(type, key)
        factory = self._factories.get(type)
        if factory is None:
            raise LookupError(f"there is no agent {type}/{key} in this process, and no factory for its type")
        with vocabulary.factory_scope(self, id):
            try:
                made = factory()
                agent = await made if inspect.isawaitable(made) else made
            except Exception as error:
                logger.error("the factory of agent %s/%s failed: %s", type, key, error)
                raise
        expected = self._expected.get(type)
        if expected is not None and not isinstance(agent, expected):
            raise ValueError(
                f"the factory of agents of type {type!r} returned a {agent.__class__.__name__}, "
                f"not a {expected.__name__}"
            )
        check_agent(f"the factory of type {type!r}", agent)
        await agent.bind_id_and_runtime(id=id, runtime=self)
        return agent

    async def try_get_underlying_agent_instance(self, id: AgentId, type: type[AgentT] = object) -> AgentT:  # type: ignore[assignment]  # any class
        """Return the agent object in this process, created if needed, with the state on the broker.

        Raises NotAccessibleError if only other processes have registered the type, LookupError if none has, TypeError
        for an object of a different class.
        """
        check_agent_id("id", id)
        check_class(type)
        if id.type not in self._factories:
            if await is_announced((await self._host.buses())[0], "agent", agent_name(id.type)):
                raise self._vocabulary.not_accessible(f"agents of type {id.type!r} live in other processes")
            raise LookupError(f"agents of type {id.type!r} are not registered")
        agent = (await self._up_to_date(id)).agent
        if not isinstance(agent, type):
            raise TypeError(f"agent {id} is a {agent.__class__.__name__}, not a {type.__name__}")
        return agent

    async def get(
        self, id_or_type: AgentId | AgentType | str, /, key: str = "default", *, lazy: bool = True
    ) -> AgentId:
        """Return an agent's id. `lazy=False` creates its object now, and raises LookupError for an unknown type."""
        if isinstance(id_or_type, str):
            name = id_or_type
        else:
            name, key = agent_type_of(id_or_type), getattr(id_or_type, "key", key)
        id = self._vocabulary.agent_id(name, key)
        if not lazy:
            await self.try_get_underlying_agent_instance(id)
        return cast(AgentId, id)

    async def agent_metadata(self, agent: AgentId) -> Any:
        """Return the metadata of an agent in any process."""
        check_agent_id("agent", agent)
        if agent.type in self._factories:
            return (await self._instances.get(agent.type, agent.key)).agent.metadata
        found = await self._operate(agent, "metadata")
        return self._vocabulary.metadata(agent.type, agent.key, found["description"])

    # -- state -------------------------------------------------------------------------------------------------

    async def agent_save_state(self, agent: AgentId) -> Mapping[str, Any]:
        """Return the state (a JSON object) of an agent in any process, between two of its messages."""
        check_agent_id("agent", agent)
        if self._started or agent.type not in self._factories:
            return cast("Mapping[str, Any]", await self._operate(agent, "save_state"))
        instance = await self._up_to_date(agent)
        return cast("Mapping[str, Any]", await instance.agent.save_state())

    async def agent_load_state(self, agent: AgentId, state: Mapping[str, Any]) -> None:
        """Set and store the state of an agent in any process, between two of its messages."""
        check_agent_id("agent", agent)
        data = encoded_state(state)
        if self._started or agent.type not in self._factories:
            await self._operate(agent, "load_state", data)
            return
        await Saved(self._host).put(agent, data)
        instance = await self._instances.get(agent.type, agent.key)
        await instance.agent.load_state(state)
        if instance.keeps_state:
            instance.known = data

    async def save_state(self) -> Mapping[str, Any]:
        """Return the states of all agents in the namespace by `type/key`, its subscriptions and its queued messages."""
        state, kept = await Saved(self._host).read()
        for instance in self._instances.all():
            name = "/".join(instance.place)
            # Changes outside a handler are not on the broker; changes by other processes are only there.
            if instance.keeps_state and not instance.holders and instance.is_behind(kept.get(name, b"")):
                state[name] = await instance.agent.save_state()
        return state

    async def _up_to_date(self, agent: AgentId) -> Instance:
        """Return the object in this process with the state of its last message, whichever process handled that."""
        instance = await self._instances.get(agent.type, agent.key)
        if instance.keeps_state and not instance.holders:
            kept = await Saved(self._host).state(agent)
            if kept and not instance.is_behind(kept):
                await instance.load(kept)
        return instance

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `save_state`: agents of the types registered here, subscriptions, queued messages.

        Messages keep their ids, so one that is queued here already is not queued twice.
        """
        saved = Saved(self._host)
        saved.check(state)
        for name, value in state.items():
            if "/" in name:
                type, key = split(name)
                if type in self._factories:
                    await self.agent_load_state(cast(AgentId, self._vocabulary.agent_id(type, key)), value)
        await saved.restore(state)

    # -- subscriptions -----------------------------------------------------------------------------------------

    async def add_subscription(self, subscription: Any) -> None:
        """Add a subscription. Raises ValueError if this runtime has an equal one.

        Subscriptions by type and by prefix are stored on the broker for the whole namespace; others apply to this
        process.
        """
        check_subscription(subscription)
        await self._publishing.subscribe(subscription)

    async def remove_subscription(self, id: str) -> None:
        """Remove a subscription. Raises LookupError for an unknown id."""
        await self._publishing.unsubscribe(id)

    def add_message_serializer(self, serializer: MessageSerializer[Any] | Sequence[MessageSerializer[Any]]) -> None:
        """Add serializers, which replace earlier ones for the same type."""
        check_serializer(serializer)
        self._registry.add_serializer(serializer)
