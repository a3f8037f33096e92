"""The state of a runtime as JSON: agents, subscriptions and unhandled messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from runtime_core.actors.errors import check_saved
from runtime_core.actors.host import ActorHost
from runtime_core.actors.identity import Address, agent_name, instance_key, key_of, type_of
from runtime_core.bus.connection import Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import TopicSubscription
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import fingerprint
from runtime_core.wire.commands import Submission

logger = logging.getLogger(__name__)

SUBSCRIPTIONS = "weft:subscriptions"
MESSAGES = "weft:messages"
"""Reserved names in a saved state; agents' names contain a slash."""

_UNDONE = (b"accepted", b"running", b"waiting")
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
            if status not in _UNDONE or header is None or data is None:
                continue
            _, name, key = cast(bytes, header).decode().split("\n")[:3]
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
