"""An app: the agents, tools and engine functions that one process offers, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, overload

from runtime_core.agents.agent import Agent
from runtime_core.agents.definition import AgentDefinition, ClassAgent, FunctionAgent
from runtime_core.declaration import NAME, Place, place_of
from runtime_core.engines.function import EngineFunction
from runtime_core.errors import ConfigurationError
from runtime_core.manifest import AgentEntry, EngineFunctionEntry, Manifest, ToolEntry
from runtime_core.policy import RetryPolicy
from runtime_core.tools.tool import Tool

Function = TypeVar("Function", bound=Callable[..., object])
# What an agent awaits and returns is the user's; only that it is async is asked for.
AgentFunction = TypeVar("AgentFunction", bound=Callable[..., Coroutine[Any, Any, object]])


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

    def add(self, item: Item) -> None:
        """Raises ConfigurationError for a name that stands for something else already."""
        there = self._by_name.get(item.name)
        if there is item:
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
            raise ConfigurationError(f"{_shown(named)} is declared as {names}: name it by one of these texts")
        return found[0]


class Functions:
    """Everything that an app has declared, as its code names it: by a text or by the declared object.

    None stands for what this app has not declared; a text may then still be another app's.
    """

    def __init__(self) -> None:
        self.agents: Names[AgentDefinition] = Names()
        self.tools: Names[Tool] = Names()
        self.engine_functions: Names[EngineFunction] = Names()

    def agent(self, named: object, /) -> AgentDefinition | None:
        """By name, function or Agent class."""
        return self.agents.find(named)

    def tool(self, named: object, /) -> Tool | None:
        """By name or function."""
        return self.tools.find(named)

    def engine_function(self, named: object, /) -> EngineFunction | None:
        """By name or function."""
        return self.engine_functions.find(named)


class App:
    """A registry without globals: `WEFT_APP=package.module:app` names it to the services.

    The decorators give the function back as it was, so that it can be called and tested as any other; what is
    declared of it is found by the function or by its name.
    """

    def __init__(self, name: str, *, version: str = "0") -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"app name {name!r} cannot be used: start with a letter or _, go on with letters, digits, _ . or -"
            )
        if not isinstance(version, str) or not version:
            raise ConfigurationError(f"app {name!r} has version={version!r}: give a text, such as '2025.1'")
        self.name = name
        self.version = version
        self.functions = Functions()
        """Finds what is declared, by a text or by the declared object."""

    def __repr__(self) -> str:
        return f"App({self.name!r}, version={self.version!r})"

    # ------------------------------------------------------------ declare

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        timeout_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        repeatable: bool = True,
        pool: str = "",
    ) -> Callable[[Function], Function]: ...

    def tool(
        self,
        function: Callable[..., object] | None = None,
        /,
        *,
        name: str | None = None,
        timeout_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        repeatable: bool = True,
        pool: str = "",
    ) -> object:
        """Declare a tool, as `@app.tool` or `@app.tool(name=…)`; async or plain. See `Tool` for the settings."""

        def declare(function: Function, depth: int = 2) -> Function:
            tool = Tool(
                function,
                place_of(function, depth),
                name=name,
                timeout_seconds=timeout_seconds,
                retry=retry,
                repeatable=repeatable,
                pool=pool,
            )
            self.functions.tools.add(tool)
            return function

        return declare if function is None else declare(function, 3)

    @overload
    def engine_function(self, function: Function, /) -> Function: ...

    @overload
    def engine_function(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        timeout_seconds: float = 3600.0,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> Callable[[Function], Function]: ...

    def engine_function(
        self,
        function: Callable[..., object] | None = None,
        /,
        *,
        name: str | None = None,
        timeout_seconds: float = 3600.0,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> object:
        """Declare a plain function that the engines may run. See `EngineFunction` for the settings."""

        def declare(function: Function, depth: int = 2) -> Function:
            engine_function = EngineFunction(
                function,
                place_of(function, depth),
                name=name,
                timeout_seconds=timeout_seconds,
                retry=retry,
                pool=pool,
            )
            self.functions.engine_functions.add(engine_function)
            return function

        return declare if function is None else declare(function, 3)

    def agent(
        self,
        name: str,
        *,
        retry: RetryPolicy | None = None,
        pool: str = "",
        timeout_seconds: float = 600.0,
        tools: Sequence[str | Callable[..., object]] = (),
    ) -> Callable[[AgentFunction], AgentFunction]:
        """Declare `async def f(ctx: AgentContext, input: T) -> R` as an agent; the input may be left out.

        See `AgentDefinition` for the settings.
        """
        if callable(name):
            raise ConfigurationError(f"@app.agent ({place_of(name, 2)}) needs a name: write @app.agent('name')")

        def declare(function: AgentFunction) -> AgentFunction:
            agent = FunctionAgent(
                name,
                function,
                place_of(function, 2),
                retry=retry,
                pool=pool,
                timeout_seconds=timeout_seconds,
                tools=tools,
            )
            self.functions.agents.add(agent)
            return function

        return declare

    def add_agent(
        self,
        name: str,
        agent: type[Agent],
        *,
        retry: RetryPolicy | None = None,
        pool: str = "",
        timeout_seconds: float = 600.0,
        tools: Sequence[str | Callable[..., object]] = (),
    ) -> None:
        """Declare a subclass of Agent, whose `@handles` methods take its messages, under a name."""
        definition = ClassAgent(
            name,
            agent,
            place_of(None, 2),
            retry=retry,
            pool=pool,
            timeout_seconds=timeout_seconds,
            tools=tools,
        )
        self.functions.agents.add(definition)

    def include(self, other: App) -> None:
        """Add what another app has declared until now. The same declaration reached by two ways is one."""
        if not isinstance(other, App):
            raise ConfigurationError(f"{self!r} cannot include {other!r}: give an App")
        for tool in other.tools.values():
            self.functions.tools.add(tool)
        for engine_function in other.engine_functions.values():
            self.functions.engine_functions.add(engine_function)
        for agent in other.agents.values():
            self.functions.agents.add(agent)

    # ------------------------------------------------------------ look up

    @property
    def agents(self) -> Mapping[str, AgentDefinition]:
        """By name."""
        return self.functions.agents.view

    @property
    def tools(self) -> Mapping[str, Tool]:
        """By name."""
        return self.functions.tools.view

    @property
    def engine_functions(self) -> Mapping[str, EngineFunction]:
        """By name."""
        return self.functions.engine_functions.view

    # ------------------------------------------------------------ check

    def check(self) -> None:
        """Look at everything that a run would find: types, schemas, names of tools. Raises ConfigurationError.

        It also makes what reads arguments and inputs, so that the first event does not wait for it.
        """
        for tool in self.tools.values():
            tool.check()
        for engine_function in self.engine_functions.values():
            engine_function.check()
        for agent in self.agents.values():
            agent.check()
            for named in agent.tools:
                if self.functions.tool(named) is None:
                    raise ConfigurationError(
                        f"{agent.what} ({agent.place}) names the unknown tool {_shown(named)}: "
                        f"{_suggestion(named, self.tools)}"
                    )

    def manifest(self) -> Manifest:
        """Names and schemas, for the broker. Raises ConfigurationError as `check` does."""
        return Manifest(
            app=self.name,
            version=self.version,
            agents={
                name: AgentEntry(
                    input=agent.input_schema(),
                    output=agent.output_schema(),
                    pool=agent.pool,
                    description=agent.description,
                )
                for name, agent in self.agents.items()
            },
            tools={
                name: ToolEntry(
                    arguments=tool.arguments.schema(),
                    result=tool.result_schema,
                    pool=tool.pool,
                    description=tool.description,
                    repeatable=tool.repeatable,
                )
                for name, tool in self.tools.items()
            },
            engine_functions={
                name: EngineFunctionEntry(
                    arguments=item.arguments.schema(),
                    result=item.result_schema,
                    pool=item.pool,
                    description=item.description,
                )
                for name, item in self.engine_functions.items()
            },
        )


def _shown(named: object) -> str:
    return repr(named) if isinstance(named, str) else str(getattr(named, "__qualname__", repr(named)))


def _suggestion(named: object, known: Mapping[str, Tool]) -> str:
    if not known:
        return "this app declares no tools"
    near = difflib.get_close_matches(str(named), known, n=3) if isinstance(named, str) else []
    names = ", ".join(near or sorted(known)[:10])
    return f"did you mean {names}?" if near else f"known are {names}"
