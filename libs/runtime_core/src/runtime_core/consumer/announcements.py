"""What apps announce on the broker: their manifests, the work stream of each name, and what running handlers serve."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, cast

import msgspec

from runtime_core.bus.connection import fields
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, Keys
from runtime_core.bus.topics import Topics, TopicSubscription
from runtime_core.declare.manifest import RUNTIME_MANIFEST, Manifest, end_hooks
from runtime_core.errors import InvalidInput

MANIFESTS_FRESH_SECONDS = 2.0
"""How long manifests are cached. A new one takes effect after that time at the latest."""

HandledKind = Literal["agent", "tool"]
Kind = Literal["agent", "tool", "engine function"]
HANDLED: tuple[HandledKind, ...] = ("agent", "tool")


async def announce(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Publish an app's manifest and names on the broker, which checks submits and calls of other apps with them.

    The names of agents come last, all at once: a submit that finds one of them finds the others, and all about them.
    """
    data = manifest.to_json()
    streams = {name: f"agent:{agent.pool}" if agent.pool else "agent" for name, agent in manifest.agents.items()}
    end_agents = end_hooks(manifest)
    functions = manifest.engine_functions.items()
    for bus in buses:
        call, keys = bus.transport.call, bus.keys
        await call("HSET", keys.manifests, manifest.app, data)
        await _put(bus, keys.interleaved, {name: "1" for name, agent in manifest.agents.items() if agent.interleave})
        await _put(bus, keys.end_hooks, end_agents)
        if manifest.agents and not end_agents:
            await call("HDEL", keys.end_hooks, *manifest.agents)
        tools = {name: f"tool:{tool.pool}" if tool.pool else "tool" for name, tool in manifest.tools.items()}
        await _put(bus, keys.tools, tools)
        await _put(bus, keys.engine_functions, {name: function.pool for name, function in functions})
        for name, function in functions:
            if function.version:
                await call("HSETNX", keys.engine_functions, name.partition("@")[0], function.pool)
        await _put(bus, keys.agents, streams)
    topics = Topics(buses)
    for name, agent in manifest.agents.items():
        for topic in agent.topics:
            await topics.subscribe(TopicSubscription(topic.removesuffix("*"), name, prefix=topic.endswith("*")))


async def _put(bus: EventBus, key: str, values: Mapping[str, str]) -> None:
    if values:
        await bus.transport.call("HSET", key, *chain.from_iterable(values.items()))


# -- names ----------------------------------------------------------------------------------------------------------


def _hash_of(keys: Keys, kind: Kind) -> str:
    return keys.agents if kind == "agent" else keys.tools if kind == "tool" else keys.engine_functions


async def is_announced(bus: EventBus, kind: Kind, name: str) -> bool:
    """Return whether any app has this name. An engine function's name without version stands for any version."""
    return await bus.transport.call("HEXISTS", _hash_of(bus.keys, kind), name) == 1


async def announced_names(bus: EventBus, kind: Kind) -> list[str]:
    """Return all names of a kind, sorted. Those that begin with `weft.` are Weft's own."""
    return sorted(
        name.decode() for name in cast(list[bytes], await bus.transport.call("HKEYS", _hash_of(bus.keys, kind)))
    )


async def announced_streams(bus: EventBus, kind: HandledKind) -> dict[str, str]:
    """Return the work stream of each agent or tool, as `tool` or, in a pool, `tool:POOL`."""
    found = fields(await bus.transport.call("HGETALL", _hash_of(bus.keys, kind)))
    return {name: stream.decode() for name, stream in found.items()}


# -- manifests ------------------------------------------------------------------------------------------------------


async def read_manifest(bus: EventBus, app: str) -> bytes | None:
    """Return an app's manifest as it is stored (JSON); None if the broker has none."""
    return cast("bytes | None", await bus.transport.call("HGET", bus.keys.manifests, app))


async def stored_manifests(bus: EventBus) -> list[bytes]:
    """Return the manifests of all apps in a namespace as they are stored (JSON); `bus` is its first partition."""
    return cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))


async def read_manifests(bus: EventBus) -> list[Manifest]:
    """Return the manifests of all apps in a namespace, by app; `bus` is its first partition."""
    return _readable(await stored_manifests(bus))


def _readable(stored: Iterable[bytes]) -> list[Manifest]:
    found = []
    for data in stored:
        try:
            found.append(Manifest.from_json(data))
        except InvalidInput:
            continue  # written by a newer release, whose processes can read it
    return sorted(found, key=lambda manifest: manifest.app)


class ManifestCache:
    """The manifests on one partition's broker, read on demand and cached for a few seconds."""

    __slots__ = ("_bus", "_manifests", "_read_at", "_stored")

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._stored: list[bytes] = []
        self._manifests: Sequence[Manifest] = ()
        self._read_at = -MANIFESTS_FRESH_SECONDS

    async def manifests(self) -> Sequence[Manifest]:
        """Return one manifest for each app, sorted by name; the same object while nothing changes. Raises BusError."""
        if time.monotonic() - self._read_at < MANIFESTS_FRESH_SECONDS:
            return self._manifests
        return await self.newest()

    async def newest(self) -> Sequence[Manifest]:
        """Return the manifests as they are now. Raises BusError."""
        stored = sorted(await stored_manifests(self._bus))
        self._read_at = time.monotonic()
        if stored != self._stored:
            self._stored, self._manifests = stored, tuple(_readable(stored))
        return self._manifests


async def announced_runtime_agents(bus: EventBus) -> list[str]:
    """Return the agents that runtimes have registered, each of which has a manifest of its own, sorted."""
    apps = cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.manifests))
    names = (app.decode() for app in apps)
    return sorted(name.removeprefix(RUNTIME_MANIFEST) for name in names if name.startswith(RUNTIME_MANIFEST))


# -- what running handlers serve --------------------------------------------------------------------------------------


async def announce_served(buses: Sequence[EventBus], kind: HandledKind, names: Sequence[str]) -> None:
    """Publish what these owners can run: names, or `prefix.*`.

    It counts while the owner is alive, so a name that no running handler has any more is noticed.
    """
    data = msgspec.json.encode({kind: sorted(names)})
    for bus in buses:
        await bus.transport.call("HSET", bus.keys.served, bus.owner, data)


async def _served(bus: EventBus) -> tuple[list[str], dict[str, dict[str, list[str]]]]:
    """Return the living owners of a partition, and what those that have said it can run: names by kind."""
    call, keys = bus.transport.call, bus.keys
    stored = fields(await call("HGETALL", keys.served))
    alive = [owner.decode() for owner in cast(list[bytes], await call("ZRANGE", keys.alive, 0, -1))]
    return alive, {
        owner: msgspec.json.decode(stored[owner], type=dict[str, list[str]]) for owner in alive if owner in stored
    }


async def handlers_of_names(bus: EventBus) -> dict[str, list[str]]:
    """Return the running handlers that have each agent and tool, by `kind name`."""
    found: dict[str, list[str]] = {}
    for owner, served in (await _served(bus))[1].items():
        for kind, names in served.items():
            for name in names:
                found.setdefault(f"{kind} {name}", []).append(owner)
    return found


@dataclass(frozen=True, slots=True)
class ServedNames:
    """What the running handlers of a partition can run; None: one of them has not said it yet."""

    agents: frozenset[str] | None
    tools: frozenset[str] | None

    def lacks(self, kind: str, name: str) -> bool:
        """Return whether no running handler has this agent or tool."""
        names = self.agents if kind == "agent" else self.tools
        if names is None or name in names:
            return False
        return not any(each.endswith(".*") and name.startswith(each[:-1]) for each in names)


async def served_by_handlers(bus: EventBus) -> ServedNames:
    """Return what the running handlers of a partition can run."""
    alive, served = await _served(bus)
    found: dict[str, frozenset[str] | None] = {}
    for kind in HANDLED:
        owners = [owner for owner in alive if owner.startswith(f"{GROUPS[kind]}@")]
        names = chain.from_iterable(served[owner].get(kind, ()) for owner in owners if owner in served)
        found[kind] = frozenset(names) if all(owner in served for owner in owners) else None
    return ServedNames(found["agent"], found["tool"])


async def forget_served(bus: EventBus) -> None:
    """Forget what dead owners could run."""
    call, keys = bus.transport.call, bus.keys
    # First, so that an owner that appears between the two reads is not mistaken for a dead one.
    stored = cast(list[bytes], await call("HKEYS", keys.served))
    alive = set(cast(list[bytes], await call("ZRANGE", keys.alive, 0, -1)))
    if gone := [owner for owner in stored if owner not in alive]:
        await call("HDEL", keys.served, *gone)
