"""Swarms, where AWorld has them."""

from __future__ import annotations

from runtime_core.integrations.aworld.orchestration import HandoffSwarm, HybridSwarm, Swarm, TeamSwarm, WorkflowSwarm
from runtime_core.integrations.aworld.topology import GraphBuildType, Loopable

__all__ = ["GraphBuildType", "HandoffSwarm", "HybridSwarm", "Loopable", "Swarm", "TeamSwarm", "WorkflowSwarm"]
