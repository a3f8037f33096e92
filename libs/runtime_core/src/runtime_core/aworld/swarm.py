"""Swarms: which agents work together, and in what shape. A Swarm is a value; `orchestration` runs it.

Swarm(plan, [search, read], write)                       one after the other; a list at once, a tuple in a row
Swarm(Loopable(Swarm(draft, review), max_run_times=3))   again and again
HandoffSwarm((triage, billing), (triage, support))       an agent's answer names the next one
TeamSwarm(leader, worker, other)                         the leader asks the others as its tools
HybridSwarm(leader, worker, other)                       a team whose members may also ask one another
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from runtime_core.declare.declaration import Place, label
from runtime_core.errors import InvalidInput
from runtime_core.runs.definition import AgentDefinition


class GraphBuildType(StrEnum):
    """The shapes of a swarm."""

    WORKFLOW = "workflow"
    HANDOFF = "handoff"
    TEAM = "team"
    HYBRID = "hybrid"


WORKFLOW, HANDOFF, TEAM, HYBRID = GraphBuildType

StopCondition = Callable[[object], bool]
"""Given the output of a round (JSON); True ends the loop."""


class Loopable:
    """An agent, a group or a swarm that runs again on its own output.

    It ends after `max_run_times` rounds, or after the round whose output `stop_condition` accepts.
    """

    def __init__(self, agent: object, max_run_times: int = 1, stop_condition: StopCondition | None = None) -> None:
        if isinstance(max_run_times, bool) or not isinstance(max_run_times, int) or max_run_times < 1:
            raise InvalidInput("max_run_times", f"{max_run_times!r} is not a whole number from 1 up")
        if stop_condition is not None and not callable(stop_condition):
            raise InvalidInput("stop_condition", f"{stop_condition!r} cannot be called: give a function of the output")
        self.agent = agent
        self.max_run_times = max_run_times
        self.stop_condition = stop_condition


@dataclass(frozen=True, slots=True)
class Member:
    """One agent at its place: an object, or a name."""

    agent: object


@dataclass(frozen=True, slots=True)
class Serial:
    """One after the other, each on the output of the one before."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """All at once on the same input; the output is the list of theirs, in this order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Its node again and again, each time on its own output."""

    node: Node
    times: int
    stop: StopCondition | None


@dataclass(frozen=True, slots=True)
class Nested:
    """A swarm inside another."""

    swarm: Swarm


Node = Member | Serial | Parallel | Loop | Nested


class Swarm:
    """Agents that work together. Raises InvalidInput (`swarm…`) for a topology that cannot run."""

    build_type = WORKFLOW

    def __init__(
        self,
        *topology: object,
        name: str = "swarm",
        build_type: GraphBuildType | str | None = None,
        max_steps: int | None = None,
        root_agent: object = None,
    ) -> None:
        """`max_steps` bounds handings over and the rounds of a leader; None: as the task's `conf.max_steps`."""
        if build_type is not None:
            self.build_type = _build_type(build_type)
        if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
            raise InvalidInput("swarm.max_steps", f"{max_steps!r} is not a whole number from 1 up")
        if not topology and root_agent is None:
            raise InvalidInput("swarm", "is empty: give at least one agent")
        self.name = name
        self.max_steps = max_steps
        self.edges: tuple[tuple[object, object], ...] = ()
        """Of a HANDOFF: who may hand over to whom."""
        if self.build_type is HANDOFF:
            self.edges = _edges(topology)
            self.node = Serial(tuple(Member(agent) for agent in _once(sum(self.edges, ()))))
        else:
            self.node = Serial(tuple(_node(part, f"swarm.{place}", ()) for place, part in enumerate(topology)))
            if self.build_type is WORKFLOW:
                _check_cycles(self.node, [])
            else:
                _check_team(self.node)
        self.root_agent = self._root(root_agent)

    def as_agent(self, name: str, place: Place, /, *, pool: str) -> AgentDefinition:
        """The agent that stands for this swarm: `App.add_swarm` declares it."""
        from runtime_core.aworld.declared import SwarmDefinition  # here: it stands on swarms

        return SwarmDefinition(name, self, place, pool=pool)

    def _root(self, given: object) -> object:
        """Who begins: the one given, else the first."""
        members = list(self._members())
        if given is None:
            return members[0]
        if not any(same(given, agent) for agent in members):
            if self.build_type in (TEAM, HYBRID):
                self.node = Serial((Member(given), *self.node.nodes))
            else:
                raise InvalidInput("swarm.root_agent", f"{label(given)} is not in the topology")
        elif self.build_type is WORKFLOW and not same(given, members[0]):
            raise InvalidInput("swarm.root_agent", f"a workflow begins with its first agent, {label(members[0])}")
        return given

    @property
    def ordered_agents(self) -> list[Any]:  # Any: what was given; inside a run, handles with `run(observation)`
        """Each agent once, in the order of the topology, those of nested swarms too; the root agent first."""
        return _once((self.root_agent, *self._members()))

    @property
    def agents(self) -> Mapping[str, object]:
        """The same by name."""
        return {label(agent): agent for agent in self.ordered_agents}

    def handoffs(self, agent: object) -> list[object]:
        """To whom `agent` may hand over."""
        return [target for source, target in self.edges if same(source, agent)]

    def bound(self, bind: Callable[[object], object]) -> Swarm:
        """The same swarm with each agent replaced by what `bind` makes of it."""
        found = Swarm.__new__(type(self))
        found.build_type, found.name, found.max_steps = self.build_type, self.name, self.max_steps
        found.edges = tuple((bind(source), bind(target)) for source, target in self.edges)
        node = _bound(self.node, bind)
        assert isinstance(node, Serial)  # as it was
        found.node, found.root_agent = node, bind(self.root_agent)
        return found

    def _members(self) -> Iterator[object]:
        return _agents(self.node)

    def __repr__(self) -> str:
        return f"<{self.build_type.value} swarm of {', '.join(self.agents)}>"


class WorkflowSwarm(Swarm):
    """Agents in a fixed order."""

    build_type = WORKFLOW


class HandoffSwarm(Swarm):
    """Pairs `(from, to)`: an agent's answer names the next agent, or ends the work."""

    build_type = HANDOFF


class TeamSwarm(Swarm):
    """A leader, first, and those whom it asks as its tools."""

    build_type = TEAM


class HybridSwarm(Swarm):
    """A team whose members may also ask one another."""

    build_type = HYBRID


def same(one: object, other: object) -> bool:
    """Whether two members are one agent: equal names, or the same object."""
    return one is other or (isinstance(one, str) and one == other)


def code_in_swarm(swarm: Swarm) -> InvalidInput:
    """The refusal of a swarm that cannot travel."""
    return InvalidInput(
        "swarm",
        f"{swarm!r} has a stop condition, which is code: declare it with app.add_swarm(name, swarm) where the task "
        "runs, and give the task its name",
    )


def _build_type(given: GraphBuildType | str) -> GraphBuildType:
    try:
        return GraphBuildType(given)
    except ValueError:
        allowed = ", ".join(kind.value for kind in GraphBuildType)
        raise InvalidInput("swarm.build_type", f"{given!r} is not one of {allowed}") from None


def _node(part: object, path: str, above: tuple[int, ...]) -> Node:
    """A part of a topology as a node. `above` are the lists that it is in."""
    match part:
        case Member() | Serial() | Parallel() | Loop() | Nested():
            return part
        case Swarm():
            return Nested(part)
        case Loopable():
            return Loop(_node(part.agent, path, above), part.max_run_times, part.stop_condition)
        case list() | tuple():
            if id(part) in above:
                raise InvalidInput(path, "a list that contains itself is a cycle: use Loopable")
            if not part:
                raise InvalidInput(path, "is empty: give at least one agent")
            inner = (*above, id(part))
            nodes = tuple(_node(each, f"{path}.{place}", inner) for place, each in enumerate(part))
            return Parallel(nodes) if isinstance(part, list) else Serial(nodes)
        case None | bool() | int() | float() | dict():
            raise InvalidInput(path, f"{part!r} is no agent: give an agent, its name, a list or a tuple")
        case "":
            raise InvalidInput(path, "an agent's name is empty")
    return Member(part)


def _edges(topology: tuple[object, ...]) -> tuple[tuple[object, object], ...]:
    edges: list[tuple[object, object]] = []
    for place, part in enumerate(topology):
        if not isinstance(part, list | tuple) or len(part) != 2:
            raise InvalidInput(f"swarm.{place}", f"{part!r} is no pair: a HANDOFF is given as (from, to) pairs")
        for agent in part:
            if not isinstance(_node(agent, f"swarm.{place}", ()), Member):
                raise InvalidInput(f"swarm.{place}", "a HANDOFF is between agents, not groups: name a swarm instead")
        edges.append((part[0], part[1]))
    if not edges:
        raise InvalidInput("swarm", "is empty: give at least one pair (from, to)")
    return tuple(edges)


def _check_cycles(node: Node, before: list[object]) -> list[object]:
    """The agents of a node, which must be none of those `before` it in the same row."""
    match node:
        case Member(agent):
            if any(same(agent, other) for other in before):
                way = " → ".join(label(each) for each in (*before, agent))
                raise InvalidInput("swarm", f"a workflow has no cycles, but {way}: use Loopable")
            return [agent]
        case Serial(nodes):
            found: list[object] = []
            for each in nodes:
                found += _check_cycles(each, [*before, *found])
            return found
        case Parallel(nodes):
            return [agent for each in nodes for agent in _check_cycles(each, before)]
        case Loop(inner):
            return _check_cycles(inner, before)
    return []  # a nested swarm has looked at itself


def _check_team(node: Serial) -> None:
    for place, each in enumerate(node.nodes):
        if not isinstance(each, Member):
            raise InvalidInput(f"swarm.{place}", "a team is a leader and its members: name a swarm to add one")


def _agents(node: Node) -> Iterator[object]:
    match node:
        case Member(agent):
            yield agent
        case Serial(nodes) | Parallel(nodes):
            for each in nodes:
                yield from _agents(each)
        case Loop(inner):
            yield from _agents(inner)
        case Nested(swarm):
            yield from swarm.ordered_agents


def _bound(node: Node, bind: Callable[[object], object]) -> Node:
    match node:
        case Member(agent):
            return Member(bind(agent))
        case Serial(nodes):
            return Serial(tuple(_bound(each, bind) for each in nodes))
        case Parallel(nodes):
            return Parallel(tuple(_bound(each, bind) for each in nodes))
        case Loop(inner, times, stop):
            return Loop(_bound(inner, bind), times, stop)
        case Nested(swarm):
            return Nested(swarm.bound(bind))


def _once(agents: tuple[object, ...]) -> list[object]:
    found: list[object] = []
    for agent in agents:
        if not any(same(agent, other) for other in found):
            found.append(agent)
    return found
