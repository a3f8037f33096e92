"""The broker of a runtime, the host that runs its agents in this process, and its state as JSON."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.base.periodic import Periodic
from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.connector import MEMORY
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import OWN_NAMESPACE, Keys
from runtime_core.bus.namespace import connect, erase_own, note_own
from runtime_core.bus.private_server import drop_database, new_database, why_lost
from runtime_core.bus.replies import Replies
from runtime_core.bus.topics import Topics, TopicSubscription
from runtime_core.client.client import Client
from runtime_core.consumer.announcements import announce, announce_served
from runtime_core.consumer.in_flight import DeliveryHandler
from runtime_core.consumer.leader import Leader
from runtime_core.declare.manifest import RUNTIME_MANIFEST, Manifest
from runtime_core.errors import BusError, ConfigurationError, InvalidInput, Rejected
from runtime_core.host.host import Host
from runtime_core.integrations.actors.actor import ActorDefinition, Actors
from runtime_core.integrations.actors.errors import check_saved
from runtime_core.integrations.actors.identity import Address, agent_name, instance_key, key_of, type_of
from runtime_core.runs.turn import TurnHandler
from runtime_core.state_manager.keeper import Keeper
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import RunHeader, fingerprint, instance_address, partition_of
from runtime_core.wire.step import OPEN_AS_STORED

logger = logging.getLogger(__name__)

MAX_TURNS_IN_FLIGHT = 10_000
"""The most turns at once. A handler that waits for another one keeps its place, so leave room for the others."""
LOOK_SECONDS = 1.0
NOTE_SECONDS = 600.0
"""How often a program notes that it still uses its own namespace, even while it handles no messages."""


class ActorHost:
    """Connects at the first use. It can be started and stopped repeatedly.

    `url` None: WEFT_REDIS_URL, else `memory://`, where each host has its own database. With `own_namespace`, a host
    without a named namespace gets one that no other has, and erases it when it closes.
    """

    def __init__(
        self,
        url: str | None,
        namespace: str | None,
        actors: Actors,
        *,
        lease_seconds: float,
        shutdown_seconds: float,
        services: bool,
        own_namespace: bool,
        on_new_loop: Callable[[], None],
        look: Callable[[], Awaitable[None]],
    ) -> None:
        """`look` is called every second while there is a connection."""
        self.url = url or os.environ.get("WEFT_REDIS_URL") or MEMORY
        self.private = self.url.startswith(MEMORY)
        if self.private:
            self.url = new_database()
        named = namespace or os.environ.get("WEFT_NAMESPACE")
        self.own = own_namespace and not named and not self.private
        """Whether the namespace is this host's own, on a broker that others use too."""
        self.namespace = f"{OWN_NAMESPACE}{secrets.token_hex(8)}" if self.own else named or "weft"
        self._actors = actors
        self._actors.shared = not self.private
        self._lease = lease_seconds
        self._shutdown = shutdown_seconds
        self._on_new_loop = on_new_loop
        self._look = look
        self._services = services and not (self.private or self.own)
        self._app = App("actors")
        self._metrics = Metrics(CollectorRegistry(), "runtime")
        self._client: Client | None = None
        self._opening: asyncio.Task[Client] | None = None
        self._host: Host | None = None
        """The running parts, from `start` to `stop`."""
        self.on_dropped: Callable[[Sequence[str]], Awaitable[None]] | None = None
        """Subscribes agents again that `weft agents drop` has forgotten since they were registered here."""
        self._opened = False
        """Whether the broker may have keys of this host."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._periodic: list[Periodic] = []
        self._lock = asyncio.Lock()

    # -- connections -------------------------------------------------------------------------------------------

    def follow_loop(self) -> None:
        """Start over in another event loop: everything of the previous loop has ended with it.

        Raises RuntimeError if the previous loop still runs in another thread.
        """
        loop, before = asyncio.get_running_loop(), self._loop
        if loop is before:
            return
        if before is not None and before.is_running():
            raise RuntimeError("another thread's event loop uses this runtime: create one runtime for each loop")
        self._loop = loop
        if before is None:
            return
        self._client, self._opening, self._host, self._periodic = None, None, None, []
        self._lock = asyncio.Lock()
        self._actors.reset()
        self._on_new_loop()

    async def client(self) -> Client:
        """Return the client of this runtime. Raises ConfigurationError if no broker answers."""
        self.follow_loop()
        if self._client is None:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open(), name="open the runtime")
            # Several callers may wait, and one of them may be cancelled.
            self._client = await asyncio.shield(self._opening)
        return self._client

    async def topics(self) -> Topics:
        return (await self.client()).topics

    async def place(self, name: str, key: str) -> tuple[EventBus, Replies]:
        """Return an instance's partition: its bus, and its stream of answers."""
        client = await self.client()
        replies = client.replies[partition_of(instance_address(name, key), len(client.replies), "key")]
        return replies.bus, replies

    async def buses(self) -> Sequence[EventBus]:
        return (await self.client()).buses

    async def _open(self) -> Client:
        try:
            partitions = 1 if self.private or self.own else None
            client = Client.connect(self.url, namespace=self.namespace, partitions=partitions)
            await client.open()
            self._opened = True
            bus = client.buses[0]
            self._periodic = [Periodic("check waiting messages", LOOK_SECONDS, self._look, _ignore)]
            if self.own:
                await self._note_own(bus)  # first, so that a later program finds what a killed one left
                self._periodic.append(Periodic("note the namespace", NOTE_SECONDS, partial(self._note_own, bus)))
            for bus in client.buses:
                await bus.load_library()
                await bus.make_groups(())
            for periodic in self._periodic:
                periodic.start()
            return client
        except BaseException:
            self._opening = None
            raise

    async def _transport(self) -> Transport:
        return await connect(self.url)

    # -- types -------------------------------------------------------------------------------------------------

    def definition(self, name: str) -> ActorDefinition | None:
        """Return what is registered here under an agent's name."""
        found = self._app.agents.get(name)
        return found if isinstance(found, ActorDefinition) else None

    async def register(self, definition: ActorDefinition) -> None:
        """Announce a type in the namespace. A running host reads its stream at once."""
        await self.client()
        self._app.functions.agents.add(definition)
        await self._announce_one(definition)
        for bus in await self.buses():
            await bus.note_agent(definition.name)
        async with self._lock:
            if self._host is not None:
                await self._consume(self._host, [f"agent:{definition.pool}"])

    async def _announce(self) -> None:
        names = [name for name in self._app.agents if self.definition(name) is not None]
        buses = await self.buses()
        dropped = [name for name in names if not await buses[0].knows_subscriber(name)]
        for name in names:
            definition = self.definition(name)
            if definition is not None:
                await self._announce_one(definition)
        for name in dropped:
            logger.warning("agents of type %s were dropped before they ran here: registering them again", name)
            for bus in buses:
                await bus.note_agent(name)
        if dropped and self.on_dropped is not None:
            await self.on_dropped(dropped)

    async def _announce_one(self, definition: ActorDefinition) -> None:
        # One manifest for each type: processes that serve different types would otherwise replace each other's
        # manifest.
        whole = self._app.manifest()
        entry = {definition.name: whole.agents[definition.name]}
        manifest = Manifest(RUNTIME_MANIFEST + definition.name, whole.version, agents=entry)
        await announce(await self.buses(), manifest)

    # -- work --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Run the registered agents."""
        async with self._lock:
            if self._host is not None:
                return
            await self.client()
            self._actors.start()
            host = self._host = Host(self._transport, self._metrics, lease_seconds=self._lease)
            if self._services:
                await self._look_for_services()
            else:
                await self._keep(host)
            host.announce(self._announce)
            await host.start()
            await self._consume(host, [f"agent:{agent.pool}" for agent in self._app.agents.values()])

    async def stop(self) -> None:
        """Finish running handlers, hand back those that wait for others, and leave. Queued messages stay."""
        self.follow_loop()
        async with self._lock:
            if self._host is None:
                return
            host, self._host = self._host, None
            self._actors.stop()
            # A handler that takes too long is cancelled, and its message handled again.
            late = asyncio.get_running_loop().call_later(self._shutdown, self._cut_off)
            try:
                await host.stop()
            finally:
                late.cancel()
            await host.run()  # raises the error that ended a consumer

    def _cut_off(self) -> None:
        logger.warning("handlers did not end within %g s: their messages will be handled again", self._shutdown)
        self._actors.cut_off()

    async def close(self) -> None:
        """Stop and disconnect."""
        await self.stop()
        ending, self._periodic = self._periodic, []
        for periodic in ending:
            await periodic.stop()
        client, self._client, self._opening = self._client, None, None
        if client is not None:
            if self.own:
                await self._erase(client)
            await client.close()
        if self.private and self._opened:
            await self._forget()

    async def _note_own(self, bus: EventBus) -> None:
        await note_own(bus.transport, self.namespace, await bus.time_ms())

    async def _erase(self, client: Client) -> None:
        try:
            await erase_own(client.buses[0].transport, self.namespace)
        except BusError as error:
            logger.warning("could not erase the namespace %r, which a later program does: %s", self.namespace, error)

    async def _forget(self) -> None:
        """Delete this host's data on the private server. A later use starts over."""
        if not why_lost():
            transport = await connect(self.url)
            await drop_database(self.url, transport)
            await transport.close()
        self.url, self._opened = new_database(), False

    async def count_open(self) -> int:
        """Return the number of messages that no handler has finished, over a separate connection."""
        if not self._opened:
            return 0
        transport = await self._transport()
        try:
            bus = EventBus(transport, Keys(self.namespace, 0))
            (running, _), waiting = await bus.idle(), await bus.mailbox_events()
            return running + waiting
        finally:
            await transport.close()

    async def idle(self) -> bool:
        """Whether the broker has no work in this namespace."""
        return await (await self.topics()).idle()

    async def _consume(self, host: Host, streams: Sequence[str]) -> None:
        if not streams:
            return
        if host.consumers:
            for consumer in host.consumers:
                await consumer.add_streams(streams)
            return
        replies = (await self.client()).replies
        buses = await host.open([each.bus.keys for each in replies])

        def handler(bus: EventBus) -> DeliveryHandler:
            partition = replies[bus.keys.partition]
            return TurnHandler(bus, self._app, self._metrics, partitions=len(replies), replies=partition)

        host.consume(buses, streams, handler, service="agent-handler", in_flight=MAX_TURNS_IN_FLIGHT * len(buses))
        await host.join()
        # The processes of a type are known by its stream: these handlers serve no other names.
        await announce_served(buses, "agent", ())

    async def _keep(self, host: Host) -> None:
        buses = await self.buses()
        if len(buses) > 1:
            raise ConfigurationError(
                f"the namespace {self.namespace!r} has {len(buses)} partitions, and services=False: start the "
                "services (`weft up`), which carry messages between partitions"
            )
        [bus] = await host.open([buses[0].keys])
        keeper = Keeper(bus)
        leader = Leader(bus, "admit", "state-manager", self._lease, lambda _: keeper.run())
        host.add(start=leader.start, stop=leader.stop)

    async def _look_for_services(self) -> None:
        """Warn if no process trims the namespace's record, which then grows until submits are refused."""
        bus = (await self.buses())[0]
        leader = await bus.transport.call("HGET", f"{bus.keys.base}leader:admit", "owner")
        alive = leader is not None and await bus.transport.call("ZSCORE", bus.keys.alive, cast(bytes, leader))
        if not alive:
            logger.warning(
                "no state-manager runs for the namespace %r: start the services (`weft up`), or let this runtime keep "
                "the namespace with Runtime(services=False)",
                self.namespace,
            )


def _ignore(error: Exception) -> None:
    """Say nothing: a broker that does not answer is in the log already."""
    logger.debug("could not check for waiting messages: %s", error)


SUBSCRIPTIONS = "weft:subscriptions"
MESSAGES = "weft:messages"
"""Reserved names in a saved state; agents' names contain a slash."""

_SCAN = 500
_OF_SUBSCRIPTION = ("topic", "agent_type", "prefix")
_OF_MESSAGE = ("id", "agent_type", "key", "input")


class Saved:
    """Reads and writes a runtime's state on the broker. Any: JSON."""

    def __init__(self, host: ActorHost) -> None:
        self._host = host

    async def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the state of the namespace, and the agents' states by `type/key` as the broker has them."""
        kept: dict[str, bytes] = {}
        messages: list[dict[str, Any]] = []
        for bus in await self._host.buses():
            kept.update(await self._states(bus))
            messages += await self._undone(bus)
        state: dict[str, Any] = {name: msgspec.json.decode(data) for name, data in kept.items()}
        subscriptions = await (await self._host.topics()).subscriptions()
        state[SUBSCRIPTIONS] = [
            {"topic": each.topic, "agent_type": type_of(each.agent), "prefix": each.prefix} for each in subscriptions
        ]
        state[MESSAGES] = messages
        return state, kept

    async def state(self, agent: Address) -> bytes:
        """Return an agent's state (JSON); empty if it has none."""
        name, key = agent_name(agent.type), instance_key(agent.key)
        bus, _ = await self._host.place(name, key)
        kept = await bus.transport.call("HGET", bus.keys.instance(name, key), "state")
        return b"" if kept is None else cast(bytes, kept)

    async def put(self, agent: Address, state: bytes) -> None:
        """Set an agent's state. Raises InvalidInput while it handles a message."""
        name, key = agent_name(agent.type), instance_key(agent.key)
        bus, _ = await self._host.place(name, key)
        if not await bus.put_state(f"{name}/{key}", state):
            raise InvalidInput("agent", f"{agent.type}/{agent.key} is handling a message: start the runtime, or wait")

    def check(self, state: object) -> None:
        """Raise InvalidInput for a value that `read` cannot have returned."""
        check_saved(state, _OF_SUBSCRIPTION, _OF_MESSAGE, (SUBSCRIPTIONS, MESSAGES))

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Restore subscriptions and queued messages from a result of `read`."""
        topics = await self._host.topics()
        for each in state.get(SUBSCRIPTIONS, ()):
            await topics.subscribe(TopicSubscription(each["topic"], agent_name(each["agent_type"]), each["prefix"]))
        for each in state.get(MESSAGES, ()):
            await self._queue(each)

    async def _queue(self, message: Mapping[str, Any]) -> None:
        name, key, task = agent_name(message["agent_type"]), instance_key(message["key"]), message["id"]
        bus, _ = await self._host.place(name, key)
        data = msgspec.json.encode(message["input"])
        context = msgspec.json.encode(message["context"]) if message.get("context") else b""
        new = Submission(task, "runtime", task, fingerprint(data.decode()), name, data, key=key, context=context)
        try:
            await bus.submit(new)
        except Rejected as error:
            if error.field == "data.agent":
                logger.warning("a saved message to %s/%s has no recipient: %s", message["agent_type"], key, error)
            elif error.field not in ("id", "task_id"):  # those errors mean that it is already queued here
                raise

    async def _states(self, bus: EventBus) -> dict[str, bytes]:
        prefix = f"{bus.keys.base}inst:"
        found: dict[str, bytes] = {}
        cursor: bytes = b"0"
        while True:
            reply = await bus.transport.call("SCAN", cursor, "MATCH", f"{_literal(prefix)}*", "COUNT", _SCAN)
            cursor, keys = cast(tuple[bytes, list[bytes]], reply)
            for key in keys:
                kept = await bus.transport.call("HGET", key, "state")
                name, _, instance = key.decode()[len(prefix) :].partition("/")
                if kept is not None:
                    found[f"{type_of(name)}/{key_of(instance)}"] = cast(bytes, kept)
            if cursor == b"0":
                return found

    async def _undone(self, bus: EventBus) -> list[dict[str, Any]]:
        """Return the messages that no handler has finished, oldest first."""
        call, keys = bus.transport.call, bus.keys
        found = []
        for task in cast(list[bytes], await call("ZRANGE", keys.index, 0, -1)):
            fields = cast(list[Reply], await call("HMGET", keys.task(task.decode()), "status", "h", "d", "x"))
            status, header, data, context = fields
            if status not in OPEN_AS_STORED or header is None or data is None:
                continue
            _, name, key, *_ = RunHeader.parse(cast(bytes, header))
            if not key:
                continue  # the task of another kind of agent
            found.append(
                {
                    "id": task.decode(),
                    "agent_type": type_of(name),
                    "key": key_of(key),
                    "input": msgspec.json.decode(cast(bytes, data)),
                    "context": msgspec.json.decode(cast(bytes, context)) if context else None,
                }
            )
        return found


def _literal(text: str) -> str:
    """Escape text for a pattern that matches exactly this text."""
    return "".join(f"\\{character}" if character in "*?[]\\^-" else character for character in text)
