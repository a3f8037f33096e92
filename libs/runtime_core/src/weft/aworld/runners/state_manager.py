"""Nodes of work, where AWorld has them."""

from __future__ import annotations

from runtime_core.integrations.aworld.nodes.state_manager import StateManager
from runtime_core.integrations.aworld.nodes.store import (
    HandleResult,
    NodeGroup,
    RunNode,
    RunNodeBusiType,
    RunNodeStatus,
)

__all__ = ["HandleResult", "NodeGroup", "RunNode", "RunNodeBusiType", "RunNodeStatus", "StateManager"]
