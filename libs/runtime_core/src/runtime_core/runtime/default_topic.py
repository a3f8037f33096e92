"""The topic that a handler means where it names none."""

from __future__ import annotations

from runtime_core.runtime.context import MessageHandlerContext
from runtime_core.runtime.identity import TopicId


class DefaultTopicId(TopicId):
    """Topic type `default`, with the key of the agent whose handler runs as its source (outside: `default`)."""

    __slots__ = ()

    def __init__(self, type: str = "default", source: str | None = None) -> None:
        if source is None:
            try:
                source = MessageHandlerContext.agent_id().key
            except RuntimeError:
                source = "default"
        super().__init__(type, source)
