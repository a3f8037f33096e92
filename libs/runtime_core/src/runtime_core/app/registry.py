"""What an app has declared, found by name or by the declared object."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from runtime_core.codec import quoted
from runtime_core.declare.declaration import Place, shown
from runtime_core.engines.function import EngineFunction
from runtime_core.errors import ConfigurationError
from runtime_core.llm.models import OpenModels
from runtime_core.runs.definition import AgentDefinition
from runtime_core.tools.tool import Tool

if TYPE_CHECKING:
    from runtime_core.tools.mcp.server import MCPServer


class _Declared(Protocol):
    """What agents, tools and engine functions have in common."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def place(self) -> Place: ...

    @property
    def source(self) -> object:
        """What was declared: a function, or a subclass of Agent."""
        ...


Item = TypeVar("Item", bound=_Declared)


class Names(Generic[Item]):
    """Items of one kind by name, and by what they were declared from."""

    def __init__(self) -> None:
        self._by_name: dict[str, Item] = {}
        self._by_source: dict[object, list[Item]] = {}
        self.view: Mapping[str, Item] = MappingProxyType(self._by_name)
        """By name, in the order of declaration."""

    def __reduce__(self) -> tuple[type[Names[Item]], tuple[()], list[Item]]:
        """Without the view, which cannot be sent to another process; that one makes its own."""
        return Names, (), list(self._by_name.values())

    def __setstate__(self, items: list[Item]) -> None:
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Raises ConfigurationError for a name that stands for something else already."""
        there = self._by_name.get(item.name)
        if there is not None and there == item:
            return
        if there is not None:
            raise ConfigurationError(
                f"{item.what} is declared twice, at {there.place} and at {item.place}: give one of them another name"
            )
        self._by_name[item.name] = item
        # What cannot be hashed (an object that compares by value) is found by its name only.
        if isinstance(item.source, Hashable):
            self._by_source.setdefault(item.source, []).append(item)

    def find(self, named: object) -> Item | None:
        """What a name, or the declared object itself, stands for; None if it is not declared here.

        Raises ConfigurationError for an object that was declared under several names.
        """
        if isinstance(named, str):
            return self._by_name.get(named)
        found = self._by_source.get(named) if isinstance(named, Hashable) else None
        if found is None:
            return None
        if len(found) > 1:
            names = " and ".join(repr(item.name) for item in found)
            raise ConfigurationError(f"{shown(named)} is declared as {names}: name it by one of these texts")
        return found[0]


class EngineFunctionNames(Names[EngineFunction]):
    """Engine functions, which may have versions: `rank@2` is one of them, and `rank` the one without, or the only."""

    def find(self, named: object) -> EngineFunction | None:
        """As of other names. Raises ConfigurationError for a version that is not there, or for one of several."""
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
            raise ConfigurationError(f"engine function {base!r} has several versions: name one of {names}")
        return versions[0]


@dataclass(frozen=True, slots=True)
class DeclaredSubscriber:
    """As `EventManager.register` takes it. Raises ConfigurationError for what can take no message."""

    category: str
    topic: str
    function: Callable[..., Any]  # Any: the user's own function of a message
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
            raise ConfigurationError(f"subscribe: {self.function!r} cannot be called; give a function of a message")


class Functions:
    """Everything that an app has declared, as its code names it: by a text or by the declared object.

    None stands for what this app has not declared; a text may then still be another app's.
    """

    def __init__(self) -> None:
        self.agents: Names[AgentDefinition] = Names()
        self.tools: Names[Tool] = Names()
        self.engine_functions = EngineFunctionNames()
        self.handlers: dict[str, type[Any]] = {}
        """Handlers of messages, by category or by a name of the app's own."""
        self.subscribers: list[DeclaredSubscriber] = []
        """Functions of messages, for all event-driven runs."""
        self.models = OpenModels()
        """The language models that this process has open for the app."""
        self.mcp_servers: dict[str, MCPServer] = {}
        """By name."""

    def all(self) -> list[AgentDefinition | Tool | EngineFunction]:
        """Agents, tools and engine functions, in this order."""
        return [*self.agents.view.values(), *self.tools.view.values(), *self.engine_functions.view.values()]

    def agent(self, named: object, /) -> AgentDefinition | None:
        """By name, function or Agent class."""
        return self.agents.find(named)

    def tool(self, named: object, /) -> Tool | None:
        """By name or function."""
        return self.tools.find(named)

    def mcp_server_of(self, tool: str, /) -> MCPServer | None:
        """The declared MCP server whose tool this name is, if it is anybody's and not the app's own."""
        if not self.mcp_servers or tool in self.tools.view:
            return None
        owners = [server for server in self.mcp_servers.values() if server.owns(tool)]
        # Of `a` and `a.b`, a tool `a.b.c` is the second one's.
        return max(owners, key=lambda server: len(server.prefix), default=None)

    def engine_function(self, named: object, /) -> EngineFunction | None:
        """By name, with or without its version, or by function or class. Raises ConfigurationError as `find`."""
        return self.engine_functions.find(named)
