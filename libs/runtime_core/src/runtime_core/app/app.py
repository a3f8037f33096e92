"""An app: the agents, tools and engine functions that a process offers, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from runtime_core.app.registry import AppHookTable, DeclaredSubscriber, Registry
from runtime_core.declare.declaration import NAME, Agent, Place, check_options, label, note_agent, place_of, shown
from runtime_core.declare.manifest import Manifest
from runtime_core.declare.schema import check_limited
from runtime_core.declare.tool import StepTool, Tool, ToolSettings, is_pattern
from runtime_core.engines.function import EngineFunction, EngineFunctionSettings
from runtime_core.engines.local import engine_name
from runtime_core.engines.runtime_engine import RunConfig, RuntimeEngine
from runtime_core.errors import ConfigurationError
from runtime_core.runs.calls import SESSION_AGENT, SessionRequest
from runtime_core.runs.definition import NO_VERSION, AgentDefinition, AgentSettings, ClassAgent, FunctionAgent
from runtime_core.runs.hooks.declared import Callback, Hook
from runtime_core.runs.shared_context import Context

if TYPE_CHECKING:
    from runtime_core.declare.mcp_server import MCPServer, MCPSettings
    from runtime_core.llm.agent import LLMAgent, ModelAgent
    from runtime_core.llm.tokens import Price
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.policy import HasAsyncPolicy, HasPolicy, PolicyDefinition
    from runtime_core.trajectory.items import RewardFunction

Function = TypeVar("Function", bound=Callable[..., object])
Reward = TypeVar("Reward", bound="RewardFunction")
# Any async function: what an agent awaits and returns is up to the user.
AgentFunction = TypeVar("AgentFunction", bound=Callable[..., Coroutine[Any, Any, object]])


class DeclaresRunner(Protocol):
    """A runner class, which returns the agent that its runs are declared as."""

    @classmethod
    def as_agent(cls, place: Place, /, *, name: str | None, pool: str, timeout_seconds: float) -> AgentDefinition: ...


class DeclaresSwarm(Protocol):
    """A swarm, which returns the agent that it is declared as."""

    def as_agent(self, name: str, place: Place, /, *, pool: str) -> AgentDefinition: ...


class App:
    """A registry of declarations. Services load it by `WEFT_APP=package.module:app`.

    The decorators return the function unchanged, so you can call and test it like any other.
    """

    def __init__(self, name: str, *, version: str = NO_VERSION) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"app name {name!r} is invalid: start with a letter or _, followed by letters, digits, _ . or -"
            )
        if not isinstance(version, str) or not version:
            raise ConfigurationError(f"app {name!r} has version={version!r}: give text, such as '2025.1'")
        self.name = name
        self.version = version
        self.functions = Registry()
        """Finds declarations by name or by the declared object."""
        self.hooks = AppHookTable()
        """Hooks and callbacks."""
        self.reward_function: RewardFunction | None = None
        """The function that scores trajectory items; see `reward`."""

    def __repr__(self) -> str:
        return f"App({self.name!r}, version={self.version!r})"

    # ------------------------------------------------------------ declare

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(self, function: None = None, /, **settings: Unpack[ToolSettings]) -> Callable[[Function], Function]: ...

    def tool(self, function: Callable[..., object] | None = None, /, **settings: Unpack[ToolSettings]) -> object:
        """Declare a sync or async function as a tool: `@app.tool` or `@app.tool(name=…)`.

        Args:
            function: The function. It takes typed arguments, and a ToolContext if it declares one.
            name (str | None): The tool's name. Default: None, the function's own name.
            timeout_seconds (float): The limit of one attempt, in seconds. Default: 60.0.
            retry (RetryPolicy | None): How often and when a failed attempt is repeated. Default: None, a RetryPolicy()
                with its defaults.
            pool (str): The pool of tool-handlers that run it. Default: '', the default pool.
            repeatable (bool): Whether to repeat an attempt whose outcome is unknown, as after a crash. False: the call
                fails instead. Default: True.
            limit (Limit | Sequence[Limit] | None): How many of its calls may be open, or start in a time, for each key.
                Default: None.

        Raises:
            ConfigurationError: An option is unknown or wrong, or Weft cannot call the function.
        """

        def declare(function: Function, depth: int = 2) -> Function:
            place = place_of(function, depth)
            check_options(f"tool {label(function)!r}", settings, ToolSettings.__annotations__, place)
            self.functions.tools.add(Tool(function, place, **settings))
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
        """Declare a sync function, or a class with `__call__`, for engines to run.

        A function whose first argument is named `spark` is a Spark job.

        Args:
            function: The function. It takes typed arguments, and an EngineContext if it declares one.
            name (str | None): Its name. Default: None, the function's own name.
            timeout_seconds (float): The limit of one attempt, in seconds. Default: 3600.0.
            retry (RetryPolicy | None): How often and when a failed attempt is repeated. Default: None, a RetryPolicy()
                with its defaults.
            pool (str): The pool of handlers that run it. Default: '', the default pool.
            version (str): The end of its name, as in `rank@2`. An app may declare several versions. Default: '', none.
            resources (Resources | None): The cluster's resources for one call. The local engine ignores them. Default:
                None, one CPU.
            actors (int): The number of long-lived Ray workers for this function, which keep what they load. Default: 0,
                any worker.

        Raises:
            ConfigurationError: An option is unknown or wrong, or engines cannot call the function.
        """

        def declare(function: Function, depth: int = 2) -> Function:
            self._add_engine_function(function, place_of(function, depth), settings)
            return function

        return declare if function is None else declare(function, 3)

    def add_engine(self, engine: type[RuntimeEngine], config: RunConfig | None = None) -> None:
        """Declare your own engine, for `ctx.engine("package.module:Class")` and `conf.engine`.

        Each process that runs the app's agents creates one object of it with `config` at the first call. Raises
        ConfigurationError.
        """
        if not (isinstance(engine, type) and issubclass(engine, RuntimeEngine)):
            raise ConfigurationError(f"{self!r} cannot add the engine {engine!r}: give a subclass of RuntimeEngine")
        if config is not None and not isinstance(config, RunConfig):
            raise ConfigurationError(f"{self!r}: config={config!r} of engine {engine.__name__} is not a RunConfig")
        self._add_engine(engine_name(engine), (engine, config or RunConfig(name=engine_name(engine))))

    def _add_engine(self, name: str, declared: tuple[type[RuntimeEngine], RunConfig]) -> None:
        if self.functions.engines.declared.setdefault(name, declared) != declared:
            raise ConfigurationError(f"{self!r} has the engine {name!r} with another config: declare it once")

    @overload
    def batch_job(self, function: Function, /) -> Function: ...

    @overload
    def batch_job(
        self, function: None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> Callable[[Function], Function]: ...

    def batch_job(
        self, function: Callable[..., object] | None = None, /, **settings: Unpack[EngineFunctionSettings]
    ) -> object:
        """Declare a function that returns the command (text or a list of texts) of a Ray batch job.

        `ctx.engine("ray").call(function, …)` runs the command on the cluster and returns its outcome. The options are
        those of `engine_function`.
        """

        def declare(function: Function, depth: int = 2) -> Function:
            self._add_engine_function(function, place_of(function, depth), settings, batch=True)
            return function

        return declare if function is None else declare(function, 3)

    def _add_engine_function(
        self, function: Callable[..., object], place: Place, settings: EngineFunctionSettings, *, batch: bool = False
    ) -> None:
        check_options(f"engine function {label(function)!r}", settings, EngineFunctionSettings.__annotations__, place)
        self.functions.engine_functions.add(EngineFunction(function, place, batch=batch, **settings))

    def agent(self, name: str, **settings: Unpack[AgentSettings]) -> Callable[[AgentFunction], AgentFunction]:
        """Declare `async def f(ctx: AgentContext, input: T) -> R` as an agent; the input is optional.

        Args:
            name: The agent's name.
            retry (RetryPolicy | None): How often and when a failed turn is repeated. Default: None, a RetryPolicy()
                with its defaults.
            pool (str): The pool of agent-handlers that run it. Default: '', the default pool.
            timeout_seconds (float): The limit of one turn, in seconds. The waits between turns do not count. Default:
                600.0.
            tools (Sequence[str | Callable]): The only tools that its runs may call, or that it offers to a model.
                Default: (), all that its task allows.
            topics (Sequence[str]): The topics that it subscribes to. `name*` matches all topics with that prefix.
                Default: (), none.
            interleave (bool): Whether one instance handles several events at a time. If two change its state, the later
                commit wins. Default: False.
            internal (bool): Whether only other agents may call it. Submits and schedules that name it are then
                rejected. Default: False.
            limit (Limit | Sequence[Limit] | None): How many of its runs may be open, or start in a time, for each key.
                Default: None.

        Raises:
            ConfigurationError: An option is unknown or wrong, or the function does not have this form.
        """
        if callable(name):
            raise ConfigurationError(f"@app.agent ({place_of(name, 2)}) needs a name: write @app.agent('name')")

        def declare(function: AgentFunction) -> AgentFunction:
            place = place_of(function, 2)
            check_options(f"agent {name!r}", settings, AgentSettings.__annotations__, place)
            self.functions.agents.add(FunctionAgent(name, function, place, **settings))
            note_agent(function, name)
            return function

        return declare

    def add_agent(
        self,
        name: str,
        agent: type[Agent] | LLMAgent | HasAsyncPolicy | HasPolicy,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Declare an agent that is not a function.

        Args:
            name: The agent's name.
            agent: A subclass of Agent, whose `@handles` methods take its messages; an LLMAgent, which a model drives;
                or an object or class with `async_policy(observation)` or `policy(observation)` (see `runs.policy`).
            settings: The options of `agent`.
        """
        place = place_of(None, 2)
        check_options(f"agent {name!r}", settings, AgentSettings.__annotations__, place)
        kind = ClassAgent if isinstance(agent, type) and issubclass(agent, Agent) else _kind_of(agent)
        definition = kind(
            name,
            agent,  # type: ignore[arg-type]  # each kind checks its own argument
            place,
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
        memory: object = ...,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Declare a pydantic-ai agent with its tools (the page "Agents of pydantic-ai"). Needs the extra `llm`.

        Args:
            name: The agent's name.
            agent: The pydantic-ai agent.
            deps: A function `()` or `(data)` that builds the deps in each process from the input's `deps`. None: the
                input's `deps` are read as the agent's `deps_type`.
            stream: Whether the task's client gets the model's text while it arrives.
            prices: Prices by model name or pattern, from which `cost` is computed.
            memory: What an instance with a key keeps of its conversation, as for LLMAgent.
            settings: The options of `agent`.
        """
        from runtime_core.llm.pydantic_ai.definition import PydanticAgent
        from runtime_core.llm.tokens import REMEMBERED

        place = place_of(None, 2)
        check_options(f"agent {name!r}", settings, AgentSettings.__annotations__, place)
        definition = PydanticAgent(
            name,
            agent,
            place,
            deps=deps,
            stream=stream,
            prices=prices or {},
            memory=REMEMBERED if memory is ... else memory,
            **settings,
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
        """Declare a hook, as in `@app.hook("before_tool_call")`: a function `(event)`, or a class with `exec(event)`.

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
        """Declare a function `(result: ToolResult)` that gets a tool's result before the agent does.

        `key` is the tool's name, or `tool__action` for its calls with that `action` argument. The function returns None
        or a `CallbackResult`.
        """

        def declare(function: Function) -> Function:
            self.hooks.add_callback(Callback(key, function, place_of(function, 2), timeout_seconds=timeout_seconds))
            return function

        return declare

    def subscribe(
        self, event_type: str, topic: str = "", *, transformer: bool = False, order: int = 0
    ) -> Callable[[Function], Function]:
        """Declare a function that gets messages (see `weft.aworld`) of a category in all event-driven runs.

        `EventManager.register` does the same for one run. `topic` is a message's topic or receiver; empty: all messages
        of the category. A `transformer` returns the message that is passed on. To subscribe an agent to published
        messages, use `topics` of `agent`.
        """

        def declare(function: Function) -> Function:
            self.functions.subscribers.append(DeclaredSubscriber(event_type, topic, function, transformer, order))
            return function

        return declare

    def add_tool(self, tool: object, *, name: str | None = None) -> None:
        """Declare an object with a method `step(args)` as a tool; without `name`, under its own name."""
        if not callable(getattr(tool, "step", None)):
            raise ConfigurationError(f"{tool!r} has no method step(args): declare a function with @app.tool")
        self.functions.tools.add(StepTool(tool, place_of(None, 2), name=label(tool) if name is None else name))

    def add_mcp(self, name: str, **settings: Unpack[MCPSettings]) -> None:
        """Declare an MCP server, as in `add_mcp("files", command=[…])` or `add_mcp("docs", url="https://…/mcp")`.

        The tool-handlers of its pool connect to it. Agents call its tools with `ctx.tool("files.<tool>", …)`.
        Tool-handlers need the extra `mcp`. Give either `command` or `url`.

        Args:
            name: The server's name.
            command (Sequence[str] | None): A program and its arguments. Each tool-handler starts one; it speaks MCP on
                stdin and stdout. Default: None.
            env (Mapping[str, str] | Callable): Variables of the program, or a function that returns them at each start.
                Of the handler's own variables, it only inherits HOME, PATH and the like. Default: None.
            cwd (str | None): The program's working directory. Default: None, the handler's.
            url (str | None): The URL of a remote server (streamable HTTP). Default: None.
            headers (Mapping[str, str] | Callable): Headers of each request, such as Authorization, or a function that
                returns them at each connect. Default: None.
            tools (Sequence[str]): Patterns of the server's tool names, as in `("read_*", "list_files")`. Default:
                ('*',), all tools.
            prefix (str | None): The prefix of its tools in the app, as in `<prefix>.<tool>`. Default: None, the
                server's name.
            pool (str): The pool of tool-handlers that connect to it. Default: '', the default pool.
            timeout_seconds (float): The limit of one attempt of a call, in seconds. Default: 60.0.
            retry (RetryPolicy | None): How often and when a failed call is repeated. Default: None, a RetryPolicy()
                with its defaults.
            repeatable (bool | Mapping[str, bool]): Whether calls may be repeated: for all tools, or by the server's
                tool name. Default: None, the server's annotations decide.
            limit (Limit | Sequence[Limit] | Mapping[str, Limit | Sequence[Limit]] | None): How many calls may be open,
                or start in a time, for each key: of all its tools together, or by the server's tool name. Default:
                None.
            when_down (str): Calls while the server is unavailable: 'wait' for it, or 'fail'. Default: 'wait'.
            mode (str): 'auto' uses the newest protocol that both sides know; 'legacy' starts with the handshake of
                2025-11-25. Default: 'auto'.
            connect_seconds (float): The limit of a start with the first list of tools, in seconds. Default: 60.0.

        Raises:
            ConfigurationError: An option is unknown or wrong.
        """
        from runtime_core.declare.mcp_server import MCPServer, MCPSettings

        place = place_of(None, 2)
        check_options(f"MCP server {name!r}", settings, MCPSettings.__annotations__, place)
        self._add_mcp_server(MCPServer(name, place, **settings))

    def _add_mcp_server(self, server: MCPServer) -> None:
        known = self.functions.mcp_servers
        for other in known.values():
            if other is server:
                return
            if server.name == other.name or server.prefix == other.prefix:
                same = "name" if server.name == other.name else "prefix"
                raise ConfigurationError(
                    f"{server.what} ({server.place}) has the same {same} as {other.what} ({other.place}): use another"
                )
        known[server.name] = server

    def add_runner(
        self, runner: type[DeclaresRunner], *, name: str | None = None, pool: str = "", timeout_seconds: float = 3600.0
    ) -> None:
        """Declare a runner class. Tasks name it by its class, its full name or `name`.

        `timeout_seconds` limits the running time of one turn, as for an agent. TaskRunner is always declared.
        """
        place = place_of(runner, 2)
        if not (isinstance(runner, type) and hasattr(runner, "as_agent")):
            raise ConfigurationError(f"runner {runner!r} ({place}) is not a subclass of weft.aworld.Runner")
        self.functions.agents.add(runner.as_agent(place, name=name, pool=pool, timeout_seconds=timeout_seconds))

    def add_swarm(self, name: str, swarm: DeclaresSwarm, *, pool: str = "") -> None:
        """Declare a swarm as an agent. By its name you can call it, submit to it, and add it to other swarms."""
        place = place_of(None, 2)
        if not hasattr(swarm, "as_agent"):
            raise ConfigurationError(f"swarm {name!r} ({place}): {swarm!r} is not a Swarm: pass a weft.aworld.Swarm(…)")
        self.functions.agents.add(swarm.as_agent(name, place, pool=pool))

    def reward(self, function: Reward, /) -> Reward:
        """Declare the function that scores trajectory items for `weft trajectory export --format sar --reward`.

        It is sync or async, gets a `TrajectoryItem` and the task's end, and returns a number, an object with `score`,
        or None. An app has at most one.
        """
        if not callable(function):
            raise ConfigurationError(
                f"{function!r} is not callable: give a function of a TrajectoryItem and a task's end"
            )
        if self.reward_function is not None and self.reward_function is not function:
            raise ConfigurationError(
                f"{self!r} already has the reward function {shown(self.reward_function)}: declare only one"
            )
        self.reward_function = function
        return function

    def add_sessions(self, *, pool: str = "") -> None:
        """Declare the agent that stores the contexts of sessions for `ctx.session()`; once per namespace."""

        self.functions.agents.add(FunctionAgent(SESSION_AGENT, keep_session, place_of(keep_session, 2), pool=pool))

    def include(self, other: App) -> None:
        """Add the declarations that another app has so far. Adding the same declaration twice has no effect."""
        if not isinstance(other, App):
            raise ConfigurationError(f"{self!r} cannot include {other!r}: give an App")
        for tool in other.tools.values():
            self.functions.tools.add(tool)
        for engine_function in other.engine_functions.values():
            self.functions.engine_functions.add(engine_function)
        for name, declared in other.functions.engines.declared.items():
            self._add_engine(name, declared)
        for agent in other.agents.values():
            self.functions.agents.add(agent)
        for server in other.mcp_servers.values():
            self._add_mcp_server(server)
        self.hooks.include(other.hooks)
        if other.reward_function is not None:
            self.reward(other.reward_function)
        for name, handler in other.handlers.items():
            if self.handlers.setdefault(name, handler) is not handler:
                raise ConfigurationError(
                    f"handler {name!r} is declared by {self!r} and by {other!r}: remove one of them"
                )
        known = self.functions.subscribers
        known += [each for each in other.functions.subscribers if each not in known]

    # ------------------------------------------------------------ look up

    @property
    def agents(self) -> Mapping[str, AgentDefinition]:
        """The app's agents, by name."""
        return self.functions.agents.view

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The app's tools, by name."""
        return self.functions.tools.view

    @property
    def engine_functions(self) -> Mapping[str, EngineFunction]:
        """The app's engine functions, by name."""
        return self.functions.engine_functions.view

    @property
    def mcp_servers(self) -> Mapping[str, MCPServer]:
        """The app's MCP servers, by name."""
        return self.functions.mcp_servers

    @property
    def handlers(self) -> dict[str, type[Any]]:
        """Handlers of an event-driven run's messages: `app.handlers["tool"] = MyToolHandler` replaces the default.

        Tasks choose a handler under any other name with `conf.handlers`.
        """
        return self.functions.handlers

    # ------------------------------------------------------------ check

    def check(self) -> None:
        """Check types, schemas and names of tools, as runs will use them. Raises ConfigurationError.

        This also builds the readers of arguments and inputs, so that the first event does not wait for them.
        """
        for tool in self.tools.values():
            tool.check()
            if tool.limits:
                check_limited(tool.what, tool.limits, tool.arguments.schema(), tool.place)
        for engine_function in self.engine_functions.values():
            engine_function.check()
        for agent in self.agents.values():
            agent.check()
            if agent.limits:
                check_limited(agent.what, agent.limits, agent.input_schema(), agent.place)
            for named in agent.tools:
                from_server = isinstance(named, str) and self.functions.mcp_server_of(named) is not None
                if self.functions.tool(named) is None and not (from_server or is_pattern(named)):
                    raise ConfigurationError(
                        f"{agent.what} ({agent.place}) names the unknown tool {shown(named)}: "
                        f"{_suggestion(named, self.tools)}"
                    )

    def manifest(self) -> Manifest:
        """Return the names and schemas for the broker. Raises ConfigurationError as `check` does."""
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
    """Return the definition class of an LLMAgent or policy. Imported here, since most apps have neither."""
    from runtime_core.llm.agent import LLMAgent

    if isinstance(agent, LLMAgent):
        from runtime_core.llm.agent import ModelAgent

        return ModelAgent
    from runtime_core.runs.policy import PolicyDefinition

    return PolicyDefinition


def _suggestion(named: object, known: Mapping[str, Tool]) -> str:
    if not known:
        return "this app declares no tools"
    near = difflib.get_close_matches(str(named), known, n=3) if isinstance(named, str) else []
    names = ", ".join(near or sorted(known)[:10])
    return f"did you mean {names}?" if near else f"choose from {names}"


CONFLICTS_KEPT = 100
"""How many of a session's newest conflicts its context keeps."""


async def keep_session(ctx: AgentContext, request: SessionRequest) -> str:
    """Return the session's context (JSON of `Context.snapshot`). Requests are serial, so no merge is lost."""
    stored = ctx.state.get("snapshot")
    context = Context.restore(stored.encode()) if stored else Context(ctx.key, id=f"session {ctx.key}")
    if request.merge:
        context.merge_changes(request.merge.encode(), fold=True)
        del context.conflicts[:-CONFLICTS_KEPT]
        ctx.state["snapshot"] = context.snapshot().decode()
    return context.snapshot().decode()
