"""Runs a swarm, one question to an agent after the other: `begin` gives the first, `after` what follows from an answer.

Who asks is the caller's choice: `Orchestration.run` asks at once, TaskRunner by messages. What happens within one stage
(a group, a loop, a nested swarm, the members of a team) is done here.

A single agent's failure passes as it is; in a group all members are waited for, and then the group ends with one
AgentError that names each that has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from runtime_core.aworld.swarm import HANDOFF, HYBRID, WORKFLOW, Loop, Member, Nested, Node, Parallel, Serial, Swarm
from runtime_core.codec import canonical
from runtime_core.declare.declaration import label
from runtime_core.errors import AgentError, LimitExceeded
from runtime_core.runs.policy import Observation, act, actions_in, handoff_in, observation_after

if TYPE_CHECKING:
    from runtime_core.aworld.handles import AgentHandle
    from runtime_core.runs.context import AgentContext


@dataclass(frozen=True, slots=True)
class Ask:
    """An agent is to be asked; its answer goes to `after`."""

    agent: AgentHandle
    seen: Observation
    info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The swarm has its output."""

    output: Any  # Any: the JSON of the last agent's answer


class Orchestration(ABC):
    """One swarm, whose agents are handles, at work in one run. Used once."""

    def __init__(self, ctx: AgentContext, swarm: Swarm, max_steps: int, endless_threshold: int) -> None:
        self.ctx = ctx
        self.swarm = swarm
        self.max_steps = max_steps
        self.endless_threshold = endless_threshold

    @abstractmethod
    async def begin(self, seen: Observation) -> Ask | Done:
        """Whom to ask first."""

    @abstractmethod
    async def after(self, output: Any) -> Ask | Done:  # Any: JSON
        """What follows from the answer to the last question. Raises AgentError and LimitExceeded."""

    async def run(self, seen: Observation) -> Any:  # Any: JSON
        """Ask until it is done; the output. Raises AgentError and LimitExceeded."""
        step = await self.begin(seen)
        while isinstance(step, Ask):
            step = await self.after(await step.agent.run(step.seen, info=step.info))
        return step.output


def orchestration(ctx: AgentContext, swarm: Swarm, *, max_steps: int, endless_threshold: int) -> Orchestration:
    """The one for the swarm's shape. `max_steps` counts where the swarm itself says nothing."""
    kind = Workflow if swarm.build_type is WORKFLOW else Relay if swarm.build_type is HANDOFF else Team
    return kind(ctx, swarm, swarm.max_steps or max_steps, endless_threshold)


class Workflow(Orchestration):
    """Stage by stage; a stage that is not a single agent is done within `begin` or `after`."""

    async def begin(self, seen: Observation) -> Ask | Done:
        self._stages = iter(self.swarm.node.nodes)
        return await self._next(seen)

    async def after(self, output: Any) -> Ask | Done:  # Any: JSON
        return await self._next(Observation(output, observer=label(self._asked), info=self._info))

    async def _next(self, seen: Observation) -> Ask | Done:
        self._info = seen.info
        for node in self._stages:
            if isinstance(node, Member):
                self._asked = _handle(node.agent)
                return Ask(self._asked, seen)
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


class Relay(Orchestration):
    """An agent's answer names the next one, until one names nobody."""

    async def begin(self, seen: Observation) -> Ask | Done:
        self._hops = 0
        self._again: Counter[tuple[str, str, bytes]] = Counter()
        return self._ask(_handle(self.swarm.root_agent), seen)

    def _ask(self, agent: AgentHandle, seen: Observation) -> Ask:
        self._agent, self._seen = agent, seen
        self._targets = {_handle(each).name: _handle(each) for each in self.swarm.handoffs(agent)}
        return Ask(agent, seen, {"handoffs": list(self._targets)})

    async def after(self, output: Any) -> Ask | Done:  # Any: JSON
        handoff = handoff_in(output)
        if handoff is None:
            return Done(output)
        agent, to = self._agent.name, handoff.handoff
        if to not in self._targets:
            allowed = ", ".join(self._targets) or "nobody"
            raise AgentError("UnknownHandoff", f"agent {agent!r} hands over to {to!r}; it may to {allowed}")
        content = self._seen.content if handoff.content is None else handoff.content
        hop = (agent, to, canonical(content))
        self._again[hop] += 1
        if self._again[hop] >= self.endless_threshold:
            raise LimitExceeded(
                f"agents hand over in an endless loop: {agent!r} to {to!r} with the same content {self._again[hop]} "
                f"times, which endless_threshold={self.endless_threshold} does not allow"
            )
        self._hops += 1
        if self._hops >= self.max_steps:
            raise LimitExceeded(f"the agents have not finished after max_steps={self.max_steps} handings over")
        return self._ask(self._targets[to], Observation(content, observer=agent, info=self._seen.info))


class Team(Orchestration):
    """The leader is asked, what it asks for is done, and it sees the results, until it asks for nothing more."""

    async def begin(self, seen: Observation) -> Ask | Done:
        self._leader, *others = [_handle(agent) for agent in self.swarm.ordered_agents]
        self._team = [agent.name for agent in others]
        self._peers = self._team if self.swarm.build_type is HYBRID else []
        self._rounds = 0
        return self._ask(seen)

    def _ask(self, seen: Observation) -> Ask:
        self._seen = seen
        return Ask(self._leader, seen, {"team": self._team, "peers": self._peers})

    async def after(self, output: Any) -> Ask | Done:  # Any: JSON
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
    return cast("AgentHandle", agent)  # Swarm holds objects of any kind; those of a bound one are handles


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
