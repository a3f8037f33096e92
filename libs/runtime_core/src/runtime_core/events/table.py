"""Which handler takes the messages of a category."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, TypeAlias

from runtime_core.codec import quoted
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.events.constants import Constants
from runtime_core.events.handler import Handler

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext

HandlerClass: TypeAlias = type[Handler]

DEFAULTS: Mapping[str, str] = {
    Constants.AGENT: "agent:DefaultAgentHandler",
    Constants.TOOL: "tool:DefaultToolHandler",
    Constants.TOOL_CALLBACK: "tool_callback:ToolCallbackHandler",
    Constants.TASK: "task:DefaultTaskHandler",
    Constants.GROUP: "group:DefaultGroupHandler",
    Constants.HUMAN: "human:DefaultHumanHandler",
    Constants.HUMAN_RESPONSE: "human:DefaultHumanHandler",
    Constants.OUTPUT: "output:DefaultOutputHandler",
    Constants.CHUNK: "output:DefaultOutputHandler",
    Constants.MEMORY: "memory:DefaultMemoryHandler",
    Constants.CONTEXT: "context:DefaultContextHandler",
    Constants.BACKGROUND_TASK: "background_task:DefaultBackgroundTaskHandler",
}
"""Category → module and class below `runtime_core.events.handlers`."""


class HandlerTable(MutableMapping[str, HandlerClass]):
    """Category → handler class: the defaults, and over them what the app and the task say."""

    def __init__(self, changes: Mapping[str, HandlerClass] | None = None) -> None:
        self._changes: dict[str, HandlerClass] = {}
        for category, handler in (changes or {}).items():
            self[category] = handler

    @classmethod
    def of(cls, ctx: AgentContext, chosen: Mapping[str, str] | None = None) -> HandlerTable:
        """The table of a run: the app's `handlers`, and what the task's `conf.handlers` chooses among them by name.

        `chosen` maps a category to a name in `app.handlers`. Raises InvalidInput for a name that is not there.
        """
        known = ctx.handlers
        table = cls({name: handler for name, handler in known.items() if name in DEFAULTS})
        for category, name in (chosen or {}).items():
            handler = known.get(name)
            if handler is None:
                names = ", ".join(known) or "none"
                raise InvalidInput(
                    f"conf.handlers.{category}", f"{quoted(name)} is no handler of this app; app.handlers has {names}"
                )
            table[category] = handler
        # Categories of the user's own, where no name was chosen for them.
        for name, handler in known.items():
            table._changes.setdefault(name, handler)
        return table

    def __getitem__(self, category: str) -> HandlerClass:
        found = self._changes.get(category)
        if found is None:
            module, _, name = DEFAULTS[category].partition(":")
            found = getattr(importlib.import_module(f"runtime_core.events.handlers.{module}"), name)
            self._changes[category] = found
        return found

    def __setitem__(self, category: str, handler: HandlerClass) -> None:
        if not (isinstance(handler, type) and issubclass(handler, Handler)):
            raise ConfigurationError(f"handlers[{category!r}] = {handler!r}: give a subclass of events.Handler")
        self._changes[category] = handler

    def __delitem__(self, category: str) -> None:
        """Back to the default."""
        del self._changes[category]

    def __iter__(self) -> Iterator[str]:
        return iter({**DEFAULTS, **self._changes})

    def __len__(self) -> int:
        return len({**DEFAULTS, **self._changes})

    def __contains__(self, category: object) -> bool:
        return category in self._changes or category in DEFAULTS
