"""Messages, where AWorld has them."""

from __future__ import annotations

from runtime_core.integrations.aworld.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    CancelMessage,
    ChunkMessage,
    Constants,
    ContextMessage,
    GroupMessage,
    HumanMessage,
    MemoryEventMessage,
    Message,
    TaskMessage,
    ToolMessage,
    TopicType,
)

__all__ = [
    "AgentMessage",
    "BackgroundTaskMessage",
    "CancelMessage",
    "ChunkMessage",
    "Constants",
    "ContextMessage",
    "GroupMessage",
    "HumanMessage",
    "MemoryEventMessage",
    "Message",
    "TaskMessage",
    "ToolMessage",
    "TopicType",
]
