"""The declarations of an app, by name or by the declared object."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from runtime_core.declare.declaration import Place, shown
from runtime_core.declare.tool import Tool
from runtime_core.engines.function import EngineFunction
from runtime_core.engines.local import OwnEngines
from runtime_core.errors import ConfigurationError
from runtime_core.llm.models import OpenModels
from runtime_core.runs.definition import AgentDefinition
from runtime_core.runs.hooks.declared import HookTable
from runtime_core.wire.codec import quoted

if TYPE_CHECKING:
    from runtime_core.declare.declaration import RetryPolicy
    from runtime_core.declare.mcp_server import MCPServer
    from runtime_core.runs.hooks.around import DeclaredRunHooks
    from runtime_core.runs.run import Run


class _Declared(Protocol):
    """An agent, tool or engine function."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def place(self) -> Place: ...

    @property
    def source(self) -> object:
        """The declared function, or subclass of Agent."""
        ...


Item = TypeVar("Item", bound=_Declared)


class Names(Generic[Item]):
    """Declarations of one kind, by name and by declared object."""

    def __init__(self) -> None:
        self._by_name: dict[str, Item] = {}
        self._by_source: dict[object, list[Item]] = {}
        self.view: Mapping[str, Item] = MappingProxyType(self._by_name)
        """By name, in the order of declaration."""

    def __reduce__(self) -> tuple[type[Names[Item]], tuple[()], list[Item]]:
        """Pickle the items without the view, which cannot be pickled."""
        return Names, (), list(self._by_name.values())

    def __setstate__(self, items: list[Item]) -> None:
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Add a declaration. Raises ConfigurationError if its name is already used for another one."""
        there = self._by_name.get(item.name)
        if there is not None and there == item:
            return
        if there is not None:
            raise ConfigurationError(
                f"{item.what} is declared twice, at {there.place} and at {item.place}: rename one of them"
            )
        self._by_name[item.name] = item
        # An unhashable object (one that compares by value) is found only by name.
        if isinstance(item.source, Hashable):
            self._by_source.setdefault(item.source, []).append(item)

    def replace(self, item: Item, other: Item) -> None:
        """Put `other` in the place of `item`, under the same name and declared object."""
        self._by_name[item.name] = other
        if isinstance(item.source, Hashable):
            same = self._by_source[item.source]
            same[same.index(item)] = other

    def find(self, named: object) -> Item | None:
        """Find a declaration by name or declared object; return None if there is none.

        Raises ConfigurationError for an object that is declared under several names.
        """
        if isinstance(named, str):
            return self._by_name.get(named)
        try:
            found = self._by_source.get(named)
        except TypeError:  # an unhashable object
            return None
        if found is None:
            return None
        if len(found) > 1:
            names = " and ".join(repr(item.name) for item in found)
            raise ConfigurationError(f"{shown(named)} is declared as {names}: use one of these names")
        return found[0]


class EngineFunctionNames(Names[EngineFunction]):
    """Engine functions, which may have versions. `rank@2` names one; `rank` names the unversioned or only one."""

    def find(self, named: object) -> EngineFunction | None:
        """Find an engine function. Raises ConfigurationError for an unknown version or an ambiguous name."""
        found = super().find(named)
        if found is not None or not isinstance(named, str):
            return found
        base, _, version = named.partition("@")
        versions = [item for item in self.view.values() if item.base_name == base]
        if not versions:
            return None
        names = " and ".join(repr(item.name) for item in versions)
        if version:
            raise ConfigurationError(f"engine function {base!r} has no version {version!r}; this app declares {names}")
        if len(versions) > 1:
            raise ConfigurationError(f"engine function {base!r} has several versions: use one of {names}")
        return versions[0]


@dataclass(frozen=True, slots=True)
class DeclaredSubscriber:
    """A subscriber of messages, as for `EventManager.register`. Raises ConfigurationError for an invalid one."""

    category: str
    topic: str
    function: Callable[..., Any]  # Any: the user's function of a message
    transformer: bool = False
    order: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.category, str) or not self.category:
            raise ConfigurationError(
                f"subscribe({quoted(self.category)}): give the category of messages, as in "
                'app.subscribe("agent", "collector")'
            )
        if not isinstance(self.topic, str):
            raise ConfigurationError(f"subscribe: topic {quoted(self.topic)} is not text")
        if isinstance(self.order, bool) or not isinstance(self.order, int):
            raise ConfigurationError(f"subscribe: order {quoted(self.order)} is not a whole number")
        if not callable(self.function):
            raise ConfigurationError(f"subscribe: {self.function!r} is not callable: give a function of a message")


class Registry:
    """Everything that an app has declared.

    Lookups take a name or the declared object. They return None for a name that may belong to another app.
    """

    def __init__(self) -> None:
        self.agents: Names[AgentDefinition] = Names()
        self.tools: Names[Tool] = Names()
        self.engine_functions = EngineFunctionNames()
        self.engines = OwnEngines()
        """The engines that the app has declared, for `ctx.engine`."""
        self.handlers: dict[str, type[Any]] = {}
        """Handlers of messages, by category or by the app's own names."""
        self.subscribers: list[DeclaredSubscriber] = []
        """Subscribers of messages in all event-driven runs."""
        self.models = OpenModels()
        """The app's open language models in this process."""
        self.mcp_servers: dict[str, MCPServer] = {}
        """By name."""

    def all(self) -> list[AgentDefinition | Tool | EngineFunction]:
        """Return agents, tools and engine functions, in this order."""
        return [*self.agents.view.values(), *self.tools.view.values(), *self.engine_functions.view.values()]

    def agent(self, named: object, /) -> AgentDefinition | None:
        """Find an agent by name, function or Agent class."""
        return self.agents.find(named)

    def tool(self, named: object, /) -> Tool | None:
        """Find a tool by name or function."""
        return self.tools.find(named)

    def mcp_server_of(self, tool: str, /) -> MCPServer | None:
        """Find the MCP server that has a tool of this name; None for a tool of the app itself."""
        if not self.mcp_servers or tool in self.tools.view:
            return None
        owners = [server for server in self.mcp_servers.values() if server.owns(tool)]
        # The longest prefix wins: of `a` and `a.b`, `a.b` owns the tool `a.b.c`.
        return max(owners, key=lambda server: len(server.prefix), default=None)

    def engine_function(self, named: object, /) -> EngineFunction | None:
        """Find an engine function by name, with or without version, or by function or class. Raises as `find`."""
        return self.engine_functions.find(named)


class AppHookTable(HookTable):
    """An app's hooks as its runs use them; `runs.definition.AppHooks` documents the methods.

    The imports are inside the methods: a process that only declares an app need not load them.
    """

    def of_ends_agent(self, app: str) -> AgentDefinition:
        """Return the agent that runs the hooks of tasks that ended without completing."""
        from runtime_core.runs.hooks.around import TaskEnded

        return TaskEnded(app)

    def ended_task(self, input: bytes) -> str:
        """Return the id of the task that this input of that agent describes."""
        from runtime_core.runs.hooks.around import ended_task

        return ended_task(input)

    def of_run(
        self, run: Run, *, of_end: bool, retry: RetryPolicy, entry: Callable[[], str], failed: Callable[[str], None]
    ) -> DeclaredRunHooks:
        """Return the hooks of one run: those that its task names and those that always run."""
        from runtime_core.runs.hooks.around import DeclaredRunHooks, HooksOfEnd

        kind = HooksOfEnd if of_end else DeclaredRunHooks
        named = run.meta.get("hooks", {})
        return kind(run, self, named, retry=retry, entry=entry, failed=failed)
