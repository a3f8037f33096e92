"""What a runner calls: agents and tools as objects, whose calls are durable steps."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime_core.aworld.swarm import Swarm, code_in_swarm
from runtime_core.declare.declaration import label
from runtime_core.runs.policy import ActionModel, Observation, call_tool, takes_observation, with_info

if TYPE_CHECKING:
    from runtime_core.runs.calls import Asked
    from runtime_core.runs.context import AgentContext


class AgentHandle:
    """One agent of a task. `await agent.run(observation)` asks it and gives its answer (JSON)."""

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        self._ctx = surroundings.ctx
        self._info: dict[str, object] = surroundings.info
        self._whole = takes_observation(surroundings.functions.agent(name))
        self.name = name

    def id(self) -> str:
        """The name too: what the runtime knows the agent by."""
        return self.name

    def run(
        self, observation: object, *, key: str = "", info: Mapping[str, object] | None = None
    ) -> Asked[Any]:  # Any: the agent's own JSON
        """A step: the agent's answer. Raises AgentError when awaited, if the agent failed for good.

        An agent that takes an Observation sees all of it, with `info` added; any other its content. `key` names the
        instance.
        """
        return self._ctx.agent(self.name, self.shown(Observation.of(observation), info or {}), key=key)

    def shown(self, seen: Observation, info: Mapping[str, object]) -> Any:  # Any: JSON
        """What the agent gets as its input: the content, or to one that takes an Observation all of it, as JSON."""
        return with_info(seen, {**self._info, **seen.info, **info}) if self._whole else seen.content

    def __repr__(self) -> str:
        return f"<agent {self.name}>"


class ToolHandle:
    """One tool of a task. `await tool.step({"query": "…"})` calls it and gives its result (JSON)."""

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        self._ctx = surroundings.ctx
        self.name = name

    def step(self, args: Mapping[str, object] | ActionModel) -> Awaitable[Any]:  # Any: the tool's own JSON
        """A step: the result. `args` are its arguments by name. Raises ToolError when awaited, if it failed."""
        given = args.params if isinstance(args, ActionModel) else args
        return call_tool(self._ctx, self.name, given)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


class Tools(Mapping[str, ToolHandle]):
    """A task's tools by name."""

    def __init__(self, surroundings: Surroundings, names: Sequence[str]) -> None:
        self._tools = {name: ToolHandle(surroundings, name) for name in names}

    def __getitem__(self, name: str) -> ToolHandle:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


class Surroundings:
    """What a task has around it inside its run: the context, and handles of its agents and tools."""

    def __init__(self, ctx: AgentContext, tools: Sequence[str], info: dict[str, object] | None = None) -> None:
        """`tools` are the names of those that the app has; `info` is what all agents see beside their observation."""
        self.info = info or {}
        self.ctx = ctx
        self.functions = ctx.functions
        self._known_tools = tools
        self._agents: dict[str, AgentHandle] = {}

    def agent(self, named: object) -> AgentHandle:
        """The handle of an agent, by name or by what was declared; the same one each time."""
        if isinstance(named, AgentHandle):
            return named
        known = self.functions.agent(named)
        name = label(named) if known is None else known.name
        return self._agents.setdefault(name, AgentHandle(self, name))

    def name_of(self, kind: str, named: object) -> str:
        """What the app has declared this under: a `tool`, or else an agent or a swarm; its own name where it has not.

        Raises InvalidInput for a swarm with a stop condition, which no other run could call.
        """
        known = self.functions.tool(named) if kind == "tool" else self.functions.agent(named)
        if known is not None:
            return known.name
        if isinstance(named, Swarm):
            raise code_in_swarm(named)
        return label(named)

    def swarm(self, given: Swarm) -> Swarm:
        """A swarm whose agents are handles."""
        return given.bound(self.agent)

    def tools(self, names: Sequence[str]) -> Tools:
        """Handles of these tools; without names, of all that the app has."""
        return Tools(self, names or self._known_tools)
