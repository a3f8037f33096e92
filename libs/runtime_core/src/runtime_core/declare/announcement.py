"""Publishes an app's manifest on the broker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.topics import Topics
from runtime_core.bus.values import TopicSubscription
from runtime_core.declare.hook_points import enders
from runtime_core.declare.manifest import Manifest


async def announce(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Publish what an app offers, so that submits can be checked and names of other apps be found."""
    data = manifest.to_json()
    of_ends = enders(manifest)
    for bus in buses:
        call, keys = bus.transport.call, bus.keys
        await call("HSET", keys.manifests, manifest.app, data)
        for name, agent in manifest.agents.items():
            await call("HSET", keys.agents, name, f"agent:{agent.pool}" if agent.pool else "agent")
            if agent.interleave:
                await call("HSET", keys.interleaved, name, "1")
        if of_ends:
            await call("HSET", keys.enders, *chain.from_iterable(of_ends.items()))
        elif manifest.agents:
            await call("HDEL", keys.enders, *manifest.agents)
        for name, tool in manifest.tools.items():
            await call("HSET", keys.tools, name, f"tool:{tool.pool}" if tool.pool else "tool")
        for name, function in manifest.engine_functions.items():
            await call("HSET", keys.engine_functions, name, function.pool)
            if function.version:
                await call("HSETNX", keys.engine_functions, name.partition("@")[0], function.pool)
    topics = Topics(buses)
    for name, agent in manifest.agents.items():
        for topic in agent.topics:
            await topics.subscribe(TopicSubscription(topic.removesuffix("*"), name, prefix=topic.endswith("*")))
