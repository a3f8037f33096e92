"""Swarms: agents that work together. A Swarm is a value; `orchestration` runs it.

Swarm(plan, [search, read], write)                       in sequence; a list runs concurrently, a tuple in sequence
Swarm(Loopable(Swarm(draft, review), max_run_times=3))   repeatedly
HandoffSwarm((triage, billing), (triage, support))       an agent's answer names the next one
TeamSwarm(leader, worker, other)                         the leader calls the others as its tools
HybridSwarm(leader, worker, other)                       a team whose members may also call one another
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.aworld.orchestration import TURN_SECONDS, RunScope, orchestration
from runtime_core.aworld.topology import HANDOFF, HYBRID, TEAM, WORKFLOW, Topology
from runtime_core.declare.declaration import Place, RetryPolicy
from runtime_core.errors import ConfigurationError
from runtime_core.runs.policy import Observation, ObservingAgent

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


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
        if not isinstance(swarm, Swarm):
            raise ConfigurationError(f"swarm {name!r} ({place}): {swarm!r} is not a Swarm")
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
