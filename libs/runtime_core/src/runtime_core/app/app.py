"""An app: the agents, tools and engine functions that one process offers, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from runtime_core.app.registry import DeclaredSubscriber, Functions
from runtime_core.declare.declaration import NAME, Place, label, note_agent, place_of, shown
from runtime_core.declare.manifest import Manifest
from runtime_core.engines.function import EngineFunction, EngineFunctionSettings
from runtime_core.errors import ConfigurationError
from runtime_core.hooks.declared import Callback, Hook, HookTable
from runtime_core.runs.agent import Agent
from runtime_core.runs.definition import AgentDefinition, AgentSettings, ClassAgent, FunctionAgent
from runtime_core.tools.tool import StepTool, Tool, ToolSettings

if TYPE_CHECKING:
    from runtime_core.llm.agent import LLMAgent
    from runtime_core.llm.budget import Price
    from runtime_core.llm.definition import ModelAgent
    from runtime_core.runs.policy import HasAsyncPolicy, HasPolicy, PolicyDefinition
    from runtime_core.tools.mcp.server import MCPServer, MCPSettings
    from runtime_core.trajectory.items import RewardFunction

Function = TypeVar("Function", bound=Callable[..., object])
Reward = TypeVar("Reward", bound="RewardFunction")
# What an agent awaits and returns is the user's; only that it is async is asked for.
AgentFunction = TypeVar("AgentFunction", bound=Callable[..., Coroutine[Any, Any, object]])


class DeclaresRunner(Protocol):
    """A class of runners, which says as what agent its runs are declared."""

    @classmethod
    def as_agent(cls, place: Place, /, *, name: str | None, pool: str, timeout_seconds: float) -> AgentDefinition: ...


class DeclaresSwarm(Protocol):
    """A swarm, which says as what agent it is declared."""

    def as_agent(self, name: str, place: Place, /, *, pool: str) -> AgentDefinition: ...


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
        self.hooks = HookTable()
        """Hooks and callbacks."""
        self.reward_function: RewardFunction | None = None
        """What scores trajectory items; see `reward`."""

    def __repr__(self) -> str:
        return f"App({self.name!r}, version={self.version!r})"

    # ------------------------------------------------------------ declare

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(self, function: None = None, /, **settings: Unpack[ToolSettings]) -> Callable[[Function], Function]: ...

    def tool(self, function: Callable[..., object] | None = None, /, **settings: Unpack[ToolSettings]) -> object:
        """Declare a tool, as `@app.tool` or `@app.tool(name=…)`; async or plain. See `ToolSettings`."""

        def declare(function: Function, depth: int = 2) -> Function:
            self.functions.tools.add(Tool(function, place_of(function, depth), **settings))
            return function

        return declare if function is None else declare(function, 3)

    @overload
    def engine_function(self, function: Function, /) -> Function: ...

    @overload
    def engine_function(
        self, function: None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> Callable[[Function], Function]: ...

    def engine_function(
        self, function: Callable[..., object] | None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> object:
        """Declare a plain function, or a class with `__call__`, that the engines may run: see `EngineFunction`.

        See `EngineFunctionSettings` for the settings. With a first argument named `spark` it is a Spark job.
        """

        def declare(function: Function, depth: int = 2) -> Function:
            self.functions.engine_functions.add(EngineFunction(function, place_of(function, depth), **settings))
            return function

        return declare if function is None else declare(function, 3)

    @overload
    def batch_job(self, function: Function, /) -> Function: ...

    @overload
    def batch_job(
        self, function: None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> Callable[[Function], Function]: ...

    def batch_job(
        self, function: Callable[..., object] | None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> object:
        """Declare a function that gives the command (a text, or a list of texts) of a batch job of Ray.

        `ctx.engine("ray").call(function, …)` runs the command on the cluster, and gives how it ended.
        """

        def declare(function: Function, depth: int = 2) -> Function:
            job = EngineFunction(function, place_of(function, depth), batch=True, **settings)
            self.functions.engine_functions.add(job)
            return function

        return declare if function is None else declare(function, 3)

    def agent(self, name: str, **settings: Unpack[AgentSettings]) -> Callable[[AgentFunction], AgentFunction]:
        """Declare `async def f(ctx: AgentContext, input: T) -> R` as an agent; the input may be left out.

        See `AgentSettings` for the settings.
        """
        if callable(name):
            raise ConfigurationError(f"@app.agent ({place_of(name, 2)}) needs a name: write @app.agent('name')")

        def declare(function: AgentFunction) -> AgentFunction:
            self.functions.agents.add(FunctionAgent(name, function, place_of(function, 2), **settings))
            note_agent(function, name)
            return function

        return declare

    def add_agent(
        self,
        name: str,
        agent: type[Agent] | LLMAgent | HasAsyncPolicy | HasPolicy,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Declare a subclass of Agent, whose `@handles` methods take its messages, under a name.

        Or an LLMAgent, which a model drives; or an object, or class, with `async_policy(observation)` or `policy`: see
        `runs.policy`.
        """
        kind = ClassAgent if isinstance(agent, type) and issubclass(agent, Agent) else _kind_of(agent)
        definition = kind(
            name,
            agent,  # type: ignore[arg-type]  # each kind says itself what it takes
            place_of(None, 2),
            **settings,
        )
        self.functions.agents.add(definition)
        note_agent(agent, name)

    def add_pydantic_agent(
        self,
        name: str,
        agent: object,
        *,
        deps: Callable[..., object] | None = None,
        stream: bool = True,
        prices: Mapping[str, Price] | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Declare an agent of pydantic-ai, as it is, with its tools: `docs/pydantic-ai.md`. Needs the extra `llm`.

        `deps`, a function `()` or `(data)`, makes its deps in each process, from the input's `deps`; None: these are
        read as the agent's `deps_type`. With `stream` the model's text is shown to the task's client while it comes.
        `prices` by a model's name or a pattern of names make its `cost`.
        """
        from runtime_core.llm.pydantic_ai.definition import PydanticAgent

        definition = PydanticAgent(
            name, agent, place_of(None, 2), deps=deps, stream=stream, prices=prices or {}, **settings
        )
        self.functions.agents.add(definition)
        for tool in definition.app_tools:
            self.functions.tools.add(tool)

    def hook(
        self,
        point: str,
        *,
        name: str | None = None,
        order: int = 0,
        guard: bool = False,
        always: bool = False,
        timeout_seconds: float = 30.0,
    ) -> Callable[[Function], Function]:
        """Declare a hook, as `@app.hook("before_tool_call")`: a function `(event)`, or a class with `exec(event)`.

        It runs for tasks that name it in their `hooks`, or with `always=True` in every run of this app's agents.
        See `Hook` for the settings.
        """

        def declare(function: Function) -> Function:
            hook = Hook(
                point,
                function,
                place_of(function, 2),
                name=name,
                order=order,
                guard=guard,
                always=always,
                timeout_seconds=timeout_seconds,
            )
            self.hooks.add(hook)
            return function

        return declare

    def callback(self, key: str, *, timeout_seconds: float = 30.0) -> Callable[[Function], Function]:
        """Declare a function `(result: ToolResult)` that looks at a tool's result before the agent has it.

        `key` is the tool's name, or `tool__action` for calls with that argument `action`. It returns None or a
        `CallbackResult`.
        """

        def declare(function: Function) -> Function:
            self.hooks.add_callback(Callback(key, function, place_of(function, 2), timeout_seconds=timeout_seconds))
            return function

        return declare

    def subscribe(
        self, event_type: str, topic: str = "", *, transformer: bool = False, order: int = 0
    ) -> Callable[[Function], Function]:
        """Declare a function that takes messages (see `weft.aworld`) of a category in all event-driven runs.

        As `EventManager.register` does for one run: `topic` is a message's topic or its receiver; empty: all of the
        category. With `transformer` it gives the message that goes on. To subscribe an agent to what others publish,
        see `topics` of `agent`.
        """

        def declare(function: Function) -> Function:
            self.functions.subscribers.append(DeclaredSubscriber(event_type, topic, function, transformer, order))
            return function

        return declare

    def add_tool(self, tool: object, *, name: str | None = None) -> None:
        """Declare an object with a `step(args)` method as a tool; None: under its own name."""
        if not callable(getattr(tool, "step", None)):
            raise ConfigurationError(f"{tool!r} has no method step(args): use @app.tool for a function")
        self.functions.tools.add(StepTool(tool, place_of(None, 2), name=label(tool) if name is None else name))

    def add_mcp(self, name: str, **settings: Unpack[MCPSettings]) -> None:
        """Declare an MCP server, as `add_mcp("files", command=[…])` or `add_mcp("docs", url="https://…/mcp")`.

        The tool-handlers of its pool connect to it; its tools are called as `ctx.tool("files.<tool>", …)`. See
        `MCPSettings`. Needs the extra `weft[mcp]` where tools run.
        """
        from runtime_core.tools.mcp.server import MCPServer

        self._add_mcp_server(MCPServer(name, place_of(None, 2), **settings))

    def _add_mcp_server(self, server: MCPServer) -> None:
        known = self.functions.mcp_servers
        for other in known.values():
            if other is server:
                return
            if server.name == other.name or server.prefix == other.prefix:
                same = "name" if server.name == other.name else "prefix"
                raise ConfigurationError(
                    f"{server.what} ({server.place}) has the {same} of {other.what} ({other.place}): give it another"
                )
        known[server.name] = server

    def add_runner(
        self, runner: type[DeclaresRunner], *, name: str | None = None, pool: str = "", timeout_seconds: float = 3600.0
    ) -> None:
        """Declare a runner, which tasks name by its class, its full name or `name`.

        `timeout_seconds` limits the running time of one turn, as for an agent. TaskRunner is there without being added.
        """
        place = place_of(runner, 2)
        if not (isinstance(runner, type) and hasattr(runner, "as_agent")):
            raise ConfigurationError(f"runner at {place}: {runner!r} is not a subclass of Runner")
        self.functions.agents.add(runner.as_agent(place, name=name, pool=pool, timeout_seconds=timeout_seconds))

    def add_swarm(self, name: str, swarm: DeclaresSwarm, *, pool: str = "") -> None:
        """Declare a swarm as an agent: it is asked, submitted to, and put into other swarms by its name."""
        place = place_of(None, 2)
        if not hasattr(swarm, "as_agent"):
            raise ConfigurationError(f"swarm {name!r} ({place}): {swarm!r} is not a Swarm")
        self.functions.agents.add(swarm.as_agent(name, place, pool=pool))

    def reward(self, function: Reward, /) -> Reward:
        """Declare how the app's trajectory items are scored: `weft trajectory export --format sar --reward` asks it.

        The function, sync or async, gets a `TrajectoryItem` and the task's end, and returns a number, an object with
        `score`, or None. There is one per app.
        """
        if not callable(function):
            raise ConfigurationError(
                f"{function!r} cannot be called: give a function of a TrajectoryItem and a task's end"
            )
        if self.reward_function is not None and self.reward_function is not function:
            raise ConfigurationError(
                f"{self!r} has the reward function {shown(self.reward_function)} already: declare one that does both"
            )
        self.reward_function = function
        return function

    def add_sessions(self, *, pool: str = "") -> None:
        """Declare the agent that keeps the contexts of sessions, for `ctx.session()`: in one app of a namespace."""
        from runtime_core.runs.state import SESSION_AGENT, keep_session

        self.functions.agents.add(FunctionAgent(SESSION_AGENT, keep_session, place_of(keep_session, 2), pool=pool))

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
        for server in other.mcp_servers.values():
            self._add_mcp_server(server)
        self.hooks.include(other.hooks)
        if other.reward_function is not None:
            self.reward(other.reward_function)
        for name, handler in other.handlers.items():
            if self.handlers.setdefault(name, handler) is not handler:
                raise ConfigurationError(f"handler {name!r} is declared by {self!r} and by {other!r}: keep one of them")
        known = self.functions.subscribers
        known += [each for each in other.functions.subscribers if each not in known]

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

    @property
    def mcp_servers(self) -> Mapping[str, MCPServer]:
        """By name."""
        return self.functions.mcp_servers

    @property
    def handlers(self) -> dict[str, type[Any]]:
        """Handlers of an event-driven run's messages: `app.handlers["tool"] = MyToolHandler` replaces the default.

        Under any other name it is one that a task may choose, with `conf.handlers`.
        """
        return self.functions.handlers

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
                from_server = isinstance(named, str) and self.functions.mcp_server_of(named) is not None
                if self.functions.tool(named) is None and not from_server:
                    raise ConfigurationError(
                        f"{agent.what} ({agent.place}) names the unknown tool {shown(named)}: "
                        f"{_suggestion(named, self.tools)}"
                    )

    def manifest(self) -> Manifest:
        """Names and schemas, for the broker. Raises ConfigurationError as `check` does."""
        manifest = Manifest(
            app=self.name,
            version=self.version,
            agents={name: agent.entry() for name, agent in self.agents.items()},
            tools={name: tool.entry() for name, tool in self.tools.items()},
            engine_functions={name: function.entry() for name, function in self.engine_functions.items()},
            hooks=self.hooks.entries(),
        )
        if self.hooks.of_ends:
            ended = self.hooks.of_ends_agent(self.name)
            manifest.agents[ended.name] = ended.entry()
        return manifest


def _kind_of(agent: object) -> type[ModelAgent] | type[PolicyDefinition]:
    """What an agent is declared as that is no class of ours. Imported here: an app without any does not need it."""
    from runtime_core.llm.agent import LLMAgent

    if isinstance(agent, LLMAgent):
        from runtime_core.llm.definition import ModelAgent

        return ModelAgent
    from runtime_core.runs.policy import PolicyDefinition

    return PolicyDefinition


def _suggestion(named: object, known: Mapping[str, Tool]) -> str:
    if not known:
        return "this app declares no tools"
    near = difflib.get_close_matches(str(named), known, n=3) if isinstance(named, str) else []
    names = ", ".join(near or sorted(known)[:10])
    return f"did you mean {names}?" if near else f"known are {names}"
