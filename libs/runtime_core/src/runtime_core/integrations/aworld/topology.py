"""The shape of a swarm's work: nodes of agents, in sequence, concurrently or repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from runtime_core.declare.declaration import label
from runtime_core.errors import InvalidInput


class GraphBuildType(StrEnum):
    """The shapes of a swarm."""

    WORKFLOW = "workflow"
    HANDOFF = "handoff"
    TEAM = "team"
    HYBRID = "hybrid"


WORKFLOW, HANDOFF, TEAM, HYBRID = GraphBuildType

StopCondition = Callable[[object], bool]
"""Takes the output of a round (JSON) and returns True to end the loop."""


class Loopable:
    """An agent, a group or a swarm that runs repeatedly, each time on its own output.

    It ends after `max_run_times` rounds, or when `stop_condition` accepts the output of a round. All loops of a swarm
    together may take its `max_steps` rounds; one more is a LimitExceeded.
    """

    def __init__(self, agent: object, max_run_times: int = 1, stop_condition: StopCondition | None = None) -> None:
        if isinstance(max_run_times, bool) or not isinstance(max_run_times, int) or max_run_times < 1:
            raise InvalidInput("max_run_times", f"{max_run_times!r} is not a whole number of at least 1")
        if stop_condition is not None and not callable(stop_condition):
            raise InvalidInput("stop_condition", f"{stop_condition!r} is not callable: pass a function of the output")
        self.agent = agent
        self.max_run_times = max_run_times
        self.stop_condition = stop_condition


@dataclass(frozen=True, slots=True)
class Member:
    """One agent of a topology, as an object or a name."""

    agent: object


@dataclass(frozen=True, slots=True)
class Serial:
    """Nodes in sequence, each on the output of the previous one."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Concurrent nodes on the same input. The output is the list of their outputs, in this order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A node that runs repeatedly, each time on its own output."""

    node: Node
    times: int
    stop: StopCondition | None


@dataclass(frozen=True, slots=True)
class Nested:
    """A swarm inside another."""

    swarm: Topology


Node = Member | Serial | Parallel | Loop | Nested


class Topology:
    """The agents of a swarm and their order. Raises InvalidInput (`swarm…`) for an invalid one."""

    build_type = WORKFLOW

    def __init__(
        self,
        *topology: object,
        name: str = "swarm",
        build_type: GraphBuildType | str | None = None,
        max_steps: int | None = None,
        root_agent: object = None,
    ) -> None:
        """`max_steps` limits handoffs and rounds of a leader and of loops; None: `conf.max_steps` of the task."""
        if build_type is not None:
            self.build_type = _build_type(build_type)
        if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
            raise InvalidInput("swarm.max_steps", f"{max_steps!r} is not a whole number of at least 1")
        if not topology and root_agent is None:
            raise InvalidInput("swarm", "is empty: pass at least one agent")
        self.name = name
        self.max_steps = max_steps
        self.edges: tuple[tuple[object, object], ...] = ()
        """The allowed handoffs of a HANDOFF swarm, as (from, to)."""
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

    def _root(self, given: object) -> object:
        """Return the first agent to run: `given`, or else the first one of the topology."""
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
        """Each agent once, in the order of the topology with nested swarms; the root agent comes first."""
        return _once((self.root_agent, *self._members()))

    @property
    def agents(self) -> Mapping[str, object]:
        """The agents by name."""
        return {label(agent): agent for agent in self.ordered_agents}

    def handoffs(self, agent: object) -> list[object]:
        """Return the agents to which `agent` may hand off."""
        return [target for source, target in self.edges if same(source, agent)]

    def bound(self, bind: Callable[[object], object]) -> Self:
        """Return a copy of the swarm with `bind` applied to each agent."""
        found = type(self).__new__(type(self))
        found.build_type, found.name, found.max_steps = self.build_type, self.name, self.max_steps
        found.edges = tuple((bind(source), bind(target)) for source, target in self.edges)
        node = _bound(self.node, bind)
        assert isinstance(node, Serial)  # as `self.node`
        found.node, found.root_agent = node, bind(self.root_agent)
        return found

    def _members(self) -> Iterator[object]:
        return _agents(self.node)

    def __repr__(self) -> str:
        return f"<{self.build_type.value} swarm of {', '.join(self.agents)}>"


def same(one: object, other: object) -> bool:
    """Whether two members are the same agent: equal names, or the same object."""
    return one is other or (isinstance(one, str) and one == other)


def code_in_swarm(swarm: Topology) -> InvalidInput:
    """Return the error for a swarm that cannot be sent to another process."""
    return InvalidInput(
        "swarm",
        f"{swarm!r} has a stop condition, which is code: declare the swarm with app.add_swarm(name, swarm) where the "
        "task runs, and give the task its name",
    )


def _build_type(given: GraphBuildType | str) -> GraphBuildType:
    try:
        return GraphBuildType(given)
    except ValueError:
        allowed = ", ".join(kind.value for kind in GraphBuildType)
        raise InvalidInput("swarm.build_type", f"{given!r} is not one of {allowed}") from None


def _node(part: object, path: str, above: tuple[int, ...]) -> Node:
    """Return a part of a topology as a node. `above` holds the ids of the lists around it."""
    match part:
        case Member() | Serial() | Parallel() | Loop() | Nested():
            return part
        case Topology():
            return Nested(part)
        case Loopable():
            return Loop(_node(part.agent, path, above), part.max_run_times, part.stop_condition)
        case list() | tuple():
            if id(part) in above:
                raise InvalidInput(path, "a list that contains itself is a cycle: use Loopable")
            if not part:
                raise InvalidInput(path, "is empty: pass at least one agent")
            inner = (*above, id(part))
            nodes = tuple(_node(each, f"{path}.{place}", inner) for place, each in enumerate(part))
            return Parallel(nodes) if isinstance(part, list) else Serial(nodes)
        case None | bool() | int() | float() | dict():
            raise InvalidInput(path, f"{part!r} is not an agent: pass an agent, its name, a list or a tuple")
        case "":
            raise InvalidInput(path, "an agent's name is empty")
    return Member(part)


def _edges(topology: tuple[object, ...]) -> tuple[tuple[object, object], ...]:
    edges: list[tuple[object, object]] = []
    for place, part in enumerate(topology):
        if not isinstance(part, list | tuple) or len(part) != 2:
            raise InvalidInput(f"swarm.{place}", f"{part!r} is not a pair: a HANDOFF takes (from, to) pairs")
        for agent in part:
            if not isinstance(_node(agent, f"swarm.{place}", ()), Member):
                raise InvalidInput(f"swarm.{place}", "a HANDOFF connects agents, not groups: name a swarm instead")
        edges.append((part[0], part[1]))
    if not edges:
        raise InvalidInput("swarm", "is empty: pass at least one pair (from, to)")
    return tuple(edges)


def _check_cycles(node: Node, before: list[object]) -> list[object]:
    """Return the agents of a node. Raises InvalidInput if one of them is also in `before`, on the same path."""
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
    return []  # a nested swarm has checked itself


def _check_team(node: Serial) -> None:
    for place, each in enumerate(node.nodes):
        if not isinstance(each, Member):
            raise InvalidInput(f"swarm.{place}", "a team consists of a leader and its members: add a swarm by its name")


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
