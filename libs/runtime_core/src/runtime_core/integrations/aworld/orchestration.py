"""Swarms: agents that work together. Runs them, and gives a runner its agents and tools as objects.

Swarm(plan, [search, read], write)                       in sequence; a list runs concurrently, a tuple in sequence
Swarm(Loopable(Swarm(draft, review), max_run_times=3))   repeatedly
HandoffSwarm((triage, billing), (triage, support))       an agent's answer names the next one
TeamSwarm(leader, worker, other)                         the leader calls the others as its tools
HybridSwarm(leader, worker, other)                       a team whose members may also call one another

An Orchestration is a sequence of calls to agents: `begin` returns the first, and `after` what follows from an answer.
`Orchestration.run` makes these calls itself; TaskRunner makes them with messages. A stage with several agents (a group,
a loop, a nested swarm, the members of a team) runs inside `begin` or `after`.

The error of a single agent propagates. A group waits for all its members and then raises one AgentError that names each
failed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from runtime_core.declare.declaration import Place, RetryPolicy, label
from runtime_core.declare.tool import is_allowed, is_pattern
from runtime_core.errors import AgentError, LimitExceeded
from runtime_core.integrations.aworld.topology import (
    HANDOFF,
    HYBRID,
    TEAM,
    WORKFLOW,
    Loop,
    Member,
    Nested,
    Node,
    Parallel,
    Serial,
    Topology,
    code_in_swarm,
)
from runtime_core.runs.policy import (
    ActionModel,
    Observation,
    ObservingAgent,
    act,
    actions_in,
    call_tool,
    handoff_in,
    observation_after,
    takes_observation,
    with_info,
)
from runtime_core.wire.codec import canonical

if TYPE_CHECKING:
    from runtime_core.runs.calls import RequestStep, SendStep
    from runtime_core.runs.context import AgentContext

TopologyT = TypeVar("TopologyT", bound=Topology)

TURN_SECONDS = 3600.0
"""The time limit for one turn of a task or a swarm."""


class AgentHandle:
    """One agent of a task. `await agent.run(observation)` calls it and returns its answer (JSON)."""

    def __init__(self, scope: RunScope, name: str) -> None:
        self._ctx = scope.ctx
        self._info: dict[str, object] = scope.info
        self._whole = takes_observation(scope.functions.agent(name))
        self.name = name

    def id(self) -> str:
        """Return the name, which is also the id."""
        return self.name

    @overload
    def run(
        self,
        observation: object,
        *,
        key: str = ...,
        info: Mapping[str, object] | None = ...,
        detach: Literal[False] = ...,
    ) -> RequestStep[Any]: ...

    @overload
    def run(
        self, observation: object, *, key: str = ..., info: Mapping[str, object] | None = ..., detach: Literal[True]
    ) -> SendStep: ...

    def run(
        self, observation: object, *, key: str = "", info: Mapping[str, object] | None = None, detach: bool = False
    ) -> RequestStep[Any] | SendStep:  # Any: the agent's own JSON
        """Call the agent as a step. When awaited, return its answer, or raise AgentError if it failed permanently.

        An agent that takes an Observation gets all of it, with `info` added. Any other agent gets its content. `key`
        names the instance. With `detach`, the agent runs as a separate task: it outlives this one, whatever ends
        that, and the result is its id on the broker.
        """
        call = self._ctx.send if detach else self._ctx.agent
        return call(self.name, self.shown(Observation.of(observation), info or {}), key=key)

    def shown(self, seen: Observation, info: Mapping[str, object]) -> Any:  # Any: JSON
        """Return the agent's input: the content, or the whole Observation as JSON if the agent takes one."""
        return with_info(seen, {**self._info, **seen.info, **info}) if self._whole else seen.content

    def __repr__(self) -> str:
        return f"<agent {self.name}>"


class ToolHandle:
    """One tool of a task. `await tool.step({"query": "…"})` calls it and returns its result (JSON)."""

    def __init__(self, scope: RunScope, name: str) -> None:
        self._ctx = scope.ctx
        self.name = name

    def step(self, args: Mapping[str, object] | ActionModel) -> Awaitable[Any]:  # Any: the tool's own JSON
        """Call the tool as a step, with its arguments by name. Raises ToolError when awaited, if the tool failed."""
        given = args.params if isinstance(args, ActionModel) else args
        return call_tool(self._ctx, self.name, given)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


class Tools(Mapping[str, ToolHandle]):
    """A task's tools by name."""

    def __init__(self, scope: RunScope, names: Sequence[str]) -> None:
        self._tools = {name: ToolHandle(scope, name) for name in names}

    def __getitem__(self, name: str) -> ToolHandle:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


class RunScope:
    """The scope of a task inside its run: the run's context, and handles of agents and tools."""

    def __init__(self, ctx: AgentContext, tools: Sequence[str], info: dict[str, object] | None = None) -> None:
        """`tools` are the names of the app's tools. `info` is added to the observation of every agent."""
        self.info = info or {}
        self.ctx = ctx
        self.functions = ctx.functions
        self._known_tools = tools
        self._agents: dict[str, AgentHandle] = {}

    def agent(self, named: object) -> AgentHandle:
        """Return the handle of an agent, given its name or its declared object; always the same handle."""
        if isinstance(named, AgentHandle):
            return named
        known = self.functions.agent(named)
        name = label(named) if known is None else known.name
        return self._agents.setdefault(name, AgentHandle(self, name))

    def name_of(self, kind: str, named: object) -> str:
        """Return the declared name of a `tool`, an agent or a swarm; an undeclared object's own name.

        Raises InvalidInput for a swarm with a stop condition: no other run could call it.
        """
        known = self.functions.tool(named) if kind == "tool" else self.functions.agent(named)
        if known is not None:
            return known.name
        if isinstance(named, Topology):
            raise code_in_swarm(named)
        return label(named)

    def swarm(self, given: TopologyT) -> TopologyT:
        """Return the swarm with handles as its agents."""
        return given.bound(self.agent)

    def tools(self, names: Sequence[str]) -> Tools:
        """Return the handles of these tools, given by name or pattern; without names, those of all tools of the app."""
        plain = [name for name in names if not is_pattern(name)]
        found = [name for name in self._known_tools if is_allowed(self.ctx.tool_limits, name)]
        return Tools(self, [*dict.fromkeys((*plain, *found))])


@dataclass(frozen=True, slots=True)
class AskAgent:
    """Call this agent next, and pass its answer to `after`."""

    agent: AgentHandle
    seen: Observation
    info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The swarm is done."""

    output: Any  # Any: the JSON of the last agent's answer


class Orchestration(ABC):
    """Runs one swarm, whose agents are handles, once."""

    def __init__(self, ctx: AgentContext, swarm: Topology, max_steps: int, endless_threshold: int) -> None:
        self.ctx = ctx
        self.swarm = swarm
        self.max_steps = max_steps
        self.endless_threshold = endless_threshold
        self.calls: list[dict[str, Any]] = []  # Any: JSON
        """The agents that were called, in order: `agent`, `input`, `output`. Those of a group are not among them."""

    @abstractmethod
    async def begin(self, seen: Observation) -> AskAgent | Done:
        """Return the first call."""

    @abstractmethod
    async def after(self, output: Any) -> AskAgent | Done:  # Any: JSON
        """Return what follows the last answer. Raises AgentError and LimitExceeded."""

    async def run(self, seen: Observation) -> Any:  # Any: JSON
        """Run the swarm to its end and return its output. Raises AgentError and LimitExceeded."""
        step = self.noted(await self.begin(seen))
        while isinstance(step, AskAgent):
            step = await self.answered(await step.agent.run(step.seen, info=step.info))
        return step.output

    def noted(self, step: AskAgent | Done) -> AskAgent | Done:
        """Add a call to `calls`."""
        if isinstance(step, AskAgent):
            self.calls.append({"agent": step.agent.name, "input": step.agent.shown(step.seen, step.info)})
        return step

    async def answered(self, output: Any) -> AskAgent | Done:  # Any: JSON
        """Add the answer to `calls`, and return what follows from it. Raises as `after`."""
        self.calls[-1]["output"] = output
        return self.noted(await self.after(output))


def orchestration(ctx: AgentContext, swarm: Topology, *, max_steps: int, endless_threshold: int) -> Orchestration:
    """Return the Orchestration for the swarm's shape. The swarm's own `max_steps` takes precedence."""
    kind = Workflow if swarm.build_type is WORKFLOW else HandoffRelay if swarm.build_type is HANDOFF else Team
    return kind(ctx, swarm, swarm.max_steps or max_steps, endless_threshold)


class Workflow(Orchestration):
    """Runs a workflow stage by stage. A stage that is not a single agent runs inside `begin` or `after`."""

    async def begin(self, seen: Observation) -> AskAgent | Done:
        self._stages = iter(self.swarm.node.nodes)
        self._rounds = 0
        """The rounds of all loops so far."""
        return await self._next(seen)

    async def after(self, output: Any) -> AskAgent | Done:  # Any: JSON
        return await self._next(Observation(output, observer=label(self._asked), info=self._info))

    async def _next(self, seen: Observation) -> AskAgent | Done:
        self._info = seen.info
        for node in self._stages:
            if isinstance(node, Member):
                self._asked = _handle(node.agent)
                return AskAgent(self._asked, seen)
            seen = Observation(await self._stage(node, seen), observer=_name(node), info=seen.info)
        return Done(seen.content)

    async def _stage(self, node: Node, seen: Observation) -> Any:  # Any: JSON
        match node:
            case Member(agent):
                return await _handle(agent).run(seen)
            case Serial(nodes):
                for each in nodes:
                    seen = Observation(await self._stage(each, seen), observer=_name(each), info=seen.info)
                return seen.content
            case Parallel(nodes):
                return await self._at_once(nodes, seen)
            case Loop(inner, times, stop):
                for _ in range(times):
                    self._rounds += 1
                    if self._rounds > self.max_steps:
                        raise LimitExceeded(
                            f"the loop of {_name(inner)} has not finished after max_steps={self.max_steps} rounds"
                        )
                    seen = Observation(await self._stage(inner, seen), observer=_name(inner), info=seen.info)
                    if stop is not None and await self.ctx.step(stop, seen.content, name="stop_condition"):
                        break
                return seen.content
            case Nested(swarm):
                inside = orchestration(
                    self.ctx, swarm, max_steps=self.max_steps, endless_threshold=self.endless_threshold
                )
                return await inside.run(seen)

    async def _at_once(self, nodes: Sequence[Node], seen: Observation) -> list[Any]:  # Any: JSON
        parts: list[Awaitable[Any]] = [  # Any: JSON
            _handle(node.agent).run(seen) if isinstance(node, Member) else self._stage(node, seen) for node in nodes
        ]
        found = await self.ctx.gather(*parts, return_exceptions=True)
        failed = [
            f"{_name(node)}: {part if str(part) else type(part).__name__}"
            for node, part in zip(nodes, found, strict=True)
            if isinstance(part, BaseException)
        ]
        if failed:
            raise AgentError("GroupFailed", f"{len(failed)} of {len(nodes)} members failed: {'; '.join(failed)}")
        return found


class HandoffRelay(Orchestration):
    """Runs a HANDOFF: an agent's answer names the next one, until an answer names none."""

    async def begin(self, seen: Observation) -> AskAgent | Done:
        self._hops = 0
        self._again: Counter[tuple[str, str, bytes]] = Counter()
        return self._ask(_handle(self.swarm.root_agent), seen)

    def _ask(self, agent: AgentHandle, seen: Observation) -> AskAgent:
        self._agent, self._seen = agent, seen
        self._targets = {_handle(each).name: _handle(each) for each in self.swarm.handoffs(agent)}
        return AskAgent(agent, seen, {"handoffs": list(self._targets)})

    async def after(self, output: Any) -> AskAgent | Done:  # Any: JSON
        handoff = handoff_in(output)
        if handoff is None:
            return Done(output)
        agent, to = self._agent.name, handoff.handoff
        if to not in self._targets:
            allowed = ", ".join(self._targets) or "no agent"
            raise AgentError("UnknownHandoff", f"agent {agent!r} hands off to {to!r}; it may hand off to {allowed}")
        content = self._seen.content if handoff.content is None else handoff.content
        hop = (agent, to, canonical(content))
        self._again[hop] += 1
        if self._again[hop] >= self.endless_threshold:
            raise LimitExceeded(
                f"agents hand off in an endless loop: {agent!r} to {to!r} with the same content {self._again[hop]} "
                f"times, which endless_threshold={self.endless_threshold} does not allow"
            )
        self._hops += 1
        if self._hops >= self.max_steps:
            raise LimitExceeded(f"the agents have not finished after max_steps={self.max_steps} handoffs")
        return self._ask(self._targets[to], Observation(content, observer=agent, info=self._seen.info))


class Team(Orchestration):
    """Runs a team: calls the leader, does what it requests, and shows it the results, until it requests nothing."""

    async def begin(self, seen: Observation) -> AskAgent | Done:
        self._leader, *others = [_handle(agent) for agent in self.swarm.ordered_agents]
        self._team = [agent.name for agent in others]
        self._peers = self._team if self.swarm.build_type is HYBRID else []
        self._rounds = 0
        return self._ask(seen)

    def _ask(self, seen: Observation) -> AskAgent:
        self._seen = seen
        return AskAgent(self._leader, seen, {"team": self._team, "peers": self._peers})

    async def after(self, output: Any) -> AskAgent | Done:  # Any: JSON
        actions = actions_in(output)
        if not actions:
            return Done(output)
        self._rounds += 1
        if self._rounds >= self.max_steps:
            name = self._leader.name
            raise LimitExceeded(f"leader {name!r} has not finished after max_steps={self.max_steps} rounds")
        results = await act(self.ctx, actions, team=self._team, peers=self._peers)
        return self._ask(observation_after(self._seen, results))


def _handle(agent: object) -> AgentHandle:
    return cast("AgentHandle", agent)  # a bound swarm holds handles


def _name(node: Node) -> str:
    match node:
        case Member(agent):
            return label(agent)
        case Serial(nodes):
            return _name(nodes[-1])
        case Parallel(nodes):
            return ", ".join(_name(each) for each in nodes)
        case Loop(inner):
            return _name(inner)
        case Nested(swarm):
            return swarm.name


class Swarm(Topology):
    """Agents that work together. Raises InvalidInput (`swarm…`) for an invalid topology."""

    def as_agent(self, name: str, place: Place, /, *, pool: str) -> SwarmDefinition:
        """Return this swarm as an agent, which `App.add_swarm` declares."""
        return SwarmDefinition(name, self, place, pool=pool)


class WorkflowSwarm(Swarm):
    """Agents in a fixed order."""

    build_type = WORKFLOW


class HandoffSwarm(Swarm):
    """Pairs `(from, to)`: an agent's answer names the next agent, or ends the swarm."""

    build_type = HANDOFF


class TeamSwarm(Swarm):
    """A leader, given first, and the agents that it calls as its tools."""

    build_type = TEAM


class HybridSwarm(Swarm):
    """A team whose members may also call one another."""

    build_type = HYBRID


class SwarmDefinition(ObservingAgent):
    """A swarm as an agent. Its input is the first observation; its output is that of its last agent."""

    def __init__(self, name: str, swarm: Swarm, place: Place, *, pool: str = "") -> None:
        super().__init__(
            name,
            swarm,
            place,
            retry=RetryPolicy(attempts=1),
            pool=pool,
            timeout_seconds=TURN_SECONDS,
            description=repr(swarm),
        )
        self.swarm = swarm

    async def observe(self, ctx: AgentContext, observation: Observation) -> object:
        bound = RunScope(ctx, ()).swarm(self.swarm)
        return await orchestration(ctx, bound, max_steps=100, endless_threshold=3).run(observation)
