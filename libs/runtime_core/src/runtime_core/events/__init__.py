"""Events of a durable run, with AWorld's names: messages, their manager, handlers, replay and fork.

1. constants.py, message.py    what travels
2. handler.py, table.py        who takes it; `handlers/` has one file for each default
3. manager.py                  the line, the registrations; questions.py what was emitted
4. loop.py, outcome.py         round by round until a message ends the task
5. history.py                  the messages of recorded tasks
6. recorded.py                 the runs of a recorded task, with the results of their steps
7. fork.py                     a new task that begins with another's results
8. replay.py, replayed.py      a recorded task again: its messages to others, or its code on its results
9. replay_run.py, replay_code.py, replay_handlers.py    how
"""

from __future__ import annotations

from runtime_core.events.constants import Constants, Priority, TopicType
from runtime_core.events.errors import HandlerError, UnknownReceiver
from runtime_core.events.handler import Handler
from runtime_core.events.loop import EventLoop, run_events
from runtime_core.events.manager import EventManager
from runtime_core.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    CancelMessage,
    ChunkMessage,
    ContextMessage,
    GroupMessage,
    HumanMessage,
    MemoryEventMessage,
    Message,
    TaskMessage,
    ToolMessage,
)
from runtime_core.events.outcome import EventOutcome
from runtime_core.events.table import HandlerTable

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
