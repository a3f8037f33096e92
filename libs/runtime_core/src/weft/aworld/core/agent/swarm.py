"""Swarms, where AWorld has them."""

from __future__ import annotations

from runtime_core.aworld.swarm import (
    GraphBuildType,
    HandoffSwarm,
    HybridSwarm,
    Loopable,
    Swarm,
    TeamSwarm,
    WorkflowSwarm,
)

__all__ = ["GraphBuildType", "HandoffSwarm", "HybridSwarm", "Loopable", "Swarm", "TeamSwarm", "WorkflowSwarm"]
