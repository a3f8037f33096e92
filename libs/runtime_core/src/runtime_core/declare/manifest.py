"""The names and schemas of an app, which handlers publish on the broker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import TopicSubscription
from runtime_core.bus.topics import Topics
from runtime_core.declare.hook_points import AFTER_FAILED_TASK
from runtime_core.errors import InvalidInput

FORMAT = 1
"""The version of the manifest's format."""

RUNTIME_MANIFEST = "actor."
"""The manifest of an agent type of a runtime begins with this, and ends with the type."""
END_AGENTS = "weft.task-ended."
"""The name of an agent that runs the hooks of ended tasks begins with this."""

Schema = dict[str, object]


class AgentEntry(msgspec.Struct, omit_defaults=True):
    """One agent."""

    input: Schema | None = None
    """JSON schema of the input; None: any input."""
    output: Schema | None = None
    """JSON schema of the output; None: not declared."""
    pool: str = ""
    description: str = ""
    interleave: bool = False
    """True: an instance handles events concurrently, not one at a time."""
    topics: list[str] = []
    """Topics that the agent subscribes to; `…*` is a prefix."""
    internal: bool = False
    """True: only other agents may call it; no submit or schedule starts it."""


class ToolEntry(msgspec.Struct, omit_defaults=True):
    """One tool."""

    arguments: Schema | None = None
    """JSON schema of the arguments, an object; None: any object."""
    result: Schema | None = None
    """JSON schema of the result; None: not declared."""
    pool: str = ""
    description: str = ""
    repeatable: bool = True
    """False: an attempt with an unknown outcome is not repeated."""


class EngineFunctionEntry(msgspec.Struct, omit_defaults=True):
    """One engine function."""

    arguments: Schema | None = None
    result: Schema | None = None
    pool: str = ""
    description: str = ""
    version: str = ""
    """Also the end of its name, after `@`; empty: no version."""
    kind: str = "function"
    """`function`, `spark_job` (runs in the driver with a session), or `batch_job` (returns a command)."""
    resources: dict[str, object] = {}
    """The cluster resources of one call, if declared."""
    actors: int = 0
    """The number of long-lived workers for it; 0: any worker runs it."""


class HookEntry(msgspec.Struct, omit_defaults=True):
    """One hook."""

    order: int = 0
    guard: bool = False
    always: bool = False
    description: str = ""


class Manifest(msgspec.Struct):
    """An app's names and schemas, stored on the broker as JSON. Unknown fields of later formats are ignored."""

    app: str
    version: str
    format: int = FORMAT
    agents: dict[str, AgentEntry] = {}
    tools: dict[str, ToolEntry] = {}
    engine_functions: dict[str, EngineFunctionEntry] = {}
    hooks: dict[str, dict[str, HookEntry]] = {}
    """Point → name → hook."""

    def to_json(self) -> bytes:
        """Return the manifest as JSON; the same app has the same bytes in every process."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read a manifest from JSON. Raises InvalidInput if it is not one."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("manifest", f"cannot be read: {error}") from None


def agent_of_ends(app: str) -> str:
    """Return the name of the agent that runs an app's hooks of ended tasks."""
    return END_AGENTS + app


def end_hooks(manifest: Manifest) -> dict[str, str]:
    """Return, for each agent, the agent that runs the hooks of its ended tasks; empty if the app has no such hooks.

    Its name has the prefix `!` if some of these hooks always run, or `?` if only hooks that a task names run.
    """
    there = [hook for point in AFTER_FAILED_TASK for hook in manifest.hooks.get(point, {}).values()]
    if not there:
        return {}
    own = agent_of_ends(manifest.app)
    mark = "!" if any(hook.always for hook in there) else "?"
    return {name: mark + own for name in manifest.agents if name != own}


async def announce(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Publish an app's manifest and names on the broker, which checks submits and calls of other apps with them."""
    data = manifest.to_json()
    end_agents = end_hooks(manifest)
    for bus in buses:
        call, keys = bus.transport.call, bus.keys
        await call("HSET", keys.manifests, manifest.app, data)
        for name, agent in manifest.agents.items():
            await call("HSET", keys.agents, name, f"agent:{agent.pool}" if agent.pool else "agent")
            if agent.interleave:
                await call("HSET", keys.interleaved, name, "1")
        if end_agents:
            await call("HSET", keys.end_hooks, *chain.from_iterable(end_agents.items()))
        elif manifest.agents:
            await call("HDEL", keys.end_hooks, *manifest.agents)
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


async def announce_served(buses: Sequence[EventBus], kind: str, names: Sequence[str]) -> None:
    """Publish what these owners can run: names of `kind` (`agent` or `tool`), or `prefix.*`.

    It counts while the owner is alive, so a name that no running handler has any more is noticed.
    """
    data = msgspec.json.encode({kind: sorted(names)})
    for bus in buses:
        await bus.transport.call("HSET", bus.keys.served, bus.owner, data)
