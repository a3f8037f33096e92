"""Event-driven runs by AWorld's names: messages, their manager, handlers."""

from __future__ import annotations

from runtime_core.aworld.events.loop import EventLoop, run_events
from runtime_core.aworld.events.manager import EventManager, Handler, HandlerTable
from runtime_core.aworld.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    CancelMessage,
    ChunkMessage,
    Constants,
    ContextMessage,
    EventOutcome,
    GroupMessage,
    HandlerError,
    HumanMessage,
    MemoryEventMessage,
    Message,
    Priority,
    TaskMessage,
    ToolMessage,
    TopicType,
    UnknownReceiver,
)

__all__ = [
    "AgentMessage",
    "BackgroundTaskMessage",
    "CancelMessage",
    "ChunkMessage",
    "Constants",
    "ContextMessage",
    "EventLoop",
    "EventManager",
    "EventOutcome",
    "GroupMessage",
    "Handler",
    "HandlerError",
    "HandlerTable",
    "HumanMessage",
    "MemoryEventMessage",
    "Message",
    "Priority",
    "TaskMessage",
    "ToolMessage",
    "TopicType",
    "UnknownReceiver",
    "run_events",
]
