"""Where tasks run: on the services of a broker, in this process, or on hosts that get a copy of their app.

TasksApp makes an app from the objects in tasks: agents, tools, swarms, runners. RunTarget submits tasks and waits for
them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from runtime_core.app.app import App
from runtime_core.base.text import choices
from runtime_core.client.client import Client, TaskHandle
from runtime_core.consumer.announcements import announced_names
from runtime_core.declare.declaration import Agent, RetryPolicy, label, place_of, underlying
from runtime_core.declare.manifest import HookPoint
from runtime_core.declare.tool import is_allowed, is_pattern
from runtime_core.engines.local import engine_class
from runtime_core.engines.runtime_engine import ENGINE_WAIT_SECONDS
from runtime_core.errors import ConfigurationError, InvalidInput, Rejected, WeftError
from runtime_core.integrations.aworld.description import Description, agent_of_runner, agents_of, describe
from runtime_core.integrations.aworld.events.handlers import HandlerTable
from runtime_core.integrations.aworld.listeners import Hints
from runtime_core.integrations.aworld.orchestration import Swarm
from runtime_core.integrations.aworld.response import ReadTask, checked_strategy, completed, with_traceback_of_letter
from runtime_core.integrations.aworld.runner import Runner, TaskRunner, neither
from runtime_core.integrations.aworld.task import TASK_AGENT, Task, mcp_settings
from runtime_core.integrations.aworld.topology import code_in_swarm
from runtime_core.llm.agent import LLMAgent
from runtime_core.runs.policy import PolicyDefinition, has_policy
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.telemetry import trace_context
from runtime_core.telemetry.trace_context import SAMPLED
from runtime_core.wire.commands import SubmitOptions, is_own_engine
from runtime_core.wire.events import StreamEvent, StreamingMode, TaskRecord, TaskResponse
from runtime_core.wire.ids import fingerprint
from runtime_core.wire.step import Status

log = logging.getLogger(__name__)

LOCAL_APP = "local-tasks"
"""The name of the app for tasks that run in this process."""
END = object()
"""Marks the end of a stream of events."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """One object in a task, and the name under which it is declared."""

    kind: Literal["agent", "tool", "swarm", "runner", "engine"]
    name: str
    value: object
    field: str
    """The task's field, for errors."""


class TasksApp:
    """An app made from a base app and the objects in tasks: agents, tools, swarms and runners."""

    def __init__(self, base: App | None, name: str = LOCAL_APP) -> None:
        self.base = base
        self.app = App(name)
        if base is not None:
            self.app.include(base)
        self.app.add_runner(TaskRunner)
        self.names: dict[int, str] = {}
        """`id()` of an object → the name under which it is declared."""
        self._servers: dict[str, object] = {}
        self.parts: list[Part] = []
        """Objects in tasks that the base has not declared."""

    @property
    def whole(self) -> App:
        """The base itself if the tasks add nothing to it, otherwise the new app."""
        return self.base if self.base is not None and not self.parts else self.app

    def take(self, task: Task) -> None:
        """Declare the objects in a task. Raises InvalidInput and ConfigurationError."""
        self._engine(task.config.engine)
        for tool in task.tools:
            self._tool(tool)
        for name, settings in task.mcp_servers_conf.items():
            self._mcp_server(name, settings)
        if task.agent is not None:
            self._agent(task.agent, "agent")
        if isinstance(task.swarm, Swarm):
            for agent in task.swarm.ordered_agents:
                self._agent(agent, "swarm")
            self._swarm(task.swarm)
        if task.runner_cls is not None:
            self._runner(task.runner_cls)

    def _engine(self, name: str) -> None:
        """Declare the engine of the task's own; for services, their app does that."""
        if is_own_engine(name) and name not in self.app.functions.engines.declared:
            try:
                self._declare(Part("engine", name, engine_class(name), "conf.engine"))
            except ConfigurationError as error:
                raise InvalidInput("conf.engine", str(error)) from error

    def _mcp_server(self, name: str, settings: object) -> None:
        field = f"mcp_servers_conf.{name}"
        if self.base is not None and name in self.base.mcp_servers:
            raise InvalidInput(field, "the app has declared an MCP server of this name: use another")
        if name in self._servers and self._servers[name] != settings:
            raise InvalidInput(field, "another task of this call has other settings for this name: use another")
        if name not in self._servers:
            self._servers[name] = settings
            try:
                self.app.add_mcp(name, **mcp_settings(field, settings))
            except ConfigurationError as error:
                raise InvalidInput(field, str(error)) from error

    def _agent(self, agent: object, field: str) -> None:
        if isinstance(agent, str):
            return
        if id(agent) in self.names or self.app.functions.agent(agent) is not None:
            return
        self._declare(Part("agent", self._free(label(agent), self.app.agents), agent, field))

    def _of_model(self, agent: LLMAgent, field: str) -> None:
        """Declare the tools, members and handoff targets that an LLMAgent has as objects."""
        for tool in agent.tools:
            self._tool(tool)
        for other in (*agent.members, *agent.handoffs):
            if other is not agent:
                self._agent(other, field)

    def _tool(self, tool: object) -> None:
        if isinstance(tool, str) or id(tool) in self.names or self.app.functions.tool(tool) is not None:
            return
        self._declare(Part("tool", self._free(label(tool), self.app.tools), tool, "tools"))

    def _swarm(self, swarm: Swarm) -> None:
        """Declare the swarm as an agent: its stop conditions cannot be sent in the task."""
        if id(swarm) not in self.names:
            self._declare(Part("swarm", self._free(f"swarm.{swarm.name}", self.app.agents), swarm, "swarm"))

    def _runner(self, runner: type[Runner] | str) -> None:
        found = _imported(runner) if isinstance(runner, str) and "." in runner else runner
        if isinstance(found, str):
            if agent_of_runner(found) not in self.app.agents:
                raise InvalidInput(
                    "runner_cls",
                    f"no runner is named {found!r}: pass the class, package.module.Class, or a name that "
                    "app.add_runner has declared",
                )
            return
        if not (inspect.isclass(found) and issubclass(found, Runner)):
            raise InvalidInput(
                "runner_cls",
                f"{found!r} is not a subclass of Runner: pass one, package.module.Class, or a declared name",
            )
        name = agent_of_runner(found)
        if self.app.agents.get(name) is None or self.app.agents[name].source is not found:
            self._declare(Part("runner", name, found, "runner_cls"))

    def _declare(self, part: Part) -> None:
        if part.kind == "agent" and isinstance(part.value, LLMAgent):
            self._of_model(part.value, part.field)
        declare(self.app, part)
        self.names[id(part.value)] = part.name
        self.parts.append(part)

    @staticmethod
    def _free(name: str, taken: object) -> str:
        """Return the name, with a number if another object has it already."""
        assert hasattr(taken, "__contains__")
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        return free


def declare(app: App, part: Part) -> None:
    """Declare an object of a task in `app`. Raises InvalidInput and ConfigurationError."""
    name, value = part.name, part.value
    match part.kind:
        case "agent":
            _declare_agent(app, name, value, part.field)
        case "tool" if inspect.isfunction(value) or inspect.ismethod(value):
            app.tool(name=name)(value)
        case "tool" if callable(getattr(value, "step", None)):
            app.add_tool(value, name=name)
        case "tool":
            raise InvalidInput("tools", f"{value!r} is not a tool: pass a function or an object with step(args)")
        case "swarm":
            assert isinstance(value, Swarm)
            app.add_swarm(name, value)
        case "runner":
            assert isinstance(value, type)
            app.add_runner(value)
        case "engine":
            assert isinstance(value, type)
            app.add_engine(value)


def _declare_agent(app: App, name: str, agent: object, field: str) -> None:
    if inspect.isclass(agent) and issubclass(agent, Agent):
        app.add_agent(name, agent)
    elif isinstance(agent, LLMAgent):
        app.add_agent(name, agent, retry=RetryPolicy(attempts=1))
    elif has_policy(agent):
        place = place_of(agent if underlying(agent) else None, 1)
        app.functions.agents.add(PolicyDefinition(name, agent, place))
    elif inspect.isfunction(agent) or inspect.ismethod(agent):
        # One attempt: the task sets its own retries. A declared agent has the retries of its declaration.
        app.agent(name, retry=RetryPolicy(attempts=1))(agent)
    else:
        raise InvalidInput(
            field,
            f"{agent!r} is not an agent: pass async def f(ctx: AgentContext, input), an Agent class, an LLMAgent, an "
            "object with async_policy(observation), or a name",
        )


def _imported(text: str) -> type[Runner]:
    """Import the class `package.module.Class`."""
    module_name, _, name = text.rpartition(".")
    try:
        main = sys.modules["__main__"]
        # Importing a running script again would create its classes a second time.
        as_script = getattr(getattr(main, "__spec__", None), "name", None) == module_name
        found: object = getattr(main if as_script else importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("runner_cls", f"{text!r} cannot be found: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Runner)):
        raise InvalidInput("runner_cls", f"{text!r} is not a subclass of Runner")
    return found


class RunTarget:
    """A client for tasks, with the names under which their objects are declared where they run."""

    def __init__(
        self,
        client: Client,
        app: App | None,
        given: dict[int, str] | None = None,
        failed: asyncio.Future[WeftError] | None = None,
        *,
        gateways: bool = True,
        read: ReadTask | None = None,
        before: Callable[[str], Awaitable[None]] | None = None,
        own_app: bool = False,
    ) -> None:
        """`app` is the app that runs there, if this process has it; `given` maps the `id()` of objects to names.

        `failed` resolves to the reason once nothing runs there any more. Without `gateways`, `ctx.engine()` is `local`
        whatever `conf.engine` says. `read` reads the record of an ended task, `before` gets each task's id before its
        submit. `own_app`: what runs there was made from the tasks, with their MCP servers.
        """
        self._client = client
        self._app = app
        self._given = given or {}
        self._failed = failed
        self._gateways = gateways
        self._read = read
        self._before = before
        self._own_app = own_app
        self._cancelling: set[asyncio.Task[object]] = set()
        self.hints = Hints()
        self.ended: list[str] = []
        """Tasks that have ended."""
        self._open: dict[str, TaskHandle] = {}
        """Tasks submitted here that have not ended, as far as is known."""

    async def submit(self, task: Task, *, stream: bool = False) -> TaskHandle:
        """Submit a task. Raises InvalidInput for an invalid one, and Rejected if the broker refuses it."""
        found = describe(task, self._name_of)
        asked = agent_of_runner(task.runner_cls)
        await self._check_names(found, asked, "agent" if task.swarm is None else "swarm")
        if self._before is not None:
            await self._before(task.id)
        metadata = {
            name: value
            for name, value in (
                ("task_name", task.name),
                ("user_id", task.user_id),
                ("group_id", task.group_id),
                ("parent_task", task.parent_task),
            )
            if value
        }
        engine, engine_wait = task.config.engine, task.config.engine_wait_seconds
        if is_own_engine(engine) and self._app is not None:
            self._app.functions.engines.check(engine, "conf.engine")
        options = SubmitOptions(
            timeout_seconds=task.timeout_seconds,
            engine_wait_seconds=None if engine_wait == ENGINE_WAIT_SECONDS else engine_wait,
            metadata=metadata,
            hooks=task.hooks,
            engine=engine if is_own_engine(engine) or (self._gateways and engine != "local") else None,
            traceparent=self._traceparent(task) if task.trace_id else "",
        )
        mode = task.streaming or stream
        try:
            handle = self._open[task.id] = await self._client.submit(
                asked, found, task_id=task.id, session_id=task.session_id, stream=mode, options=options
            )
        except Rejected as error:
            if not error.field.startswith("data.hooks."):
                raise
            # The task has the field under a shorter name than the wire.
            field = error.field.removeprefix("data.")
            raise Rejected(field, error.message, error.retry_after_seconds, error.task_id) from error
        loop = asyncio.get_running_loop()

        def cancel(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: the task has ended
                loop.call_soon_threadsafe(self._cancel, handle, reason)

        task.cancel = cancel
        return handle

    def _cancel(self, handle: TaskHandle, reason: str) -> None:
        cancelling = asyncio.ensure_future(handle.cancel(reason))
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)

    @staticmethod
    def _traceparent(task: Task) -> str:
        span = int(fingerprint("span of task", task.id, digits=16), 16)
        return trace_context.written(int(task.trace_id, 16), span, SAMPLED)

    async def completed(self, task: Task, response: TaskResponse) -> TaskResponse:
        """Return the response with its trace, and with what the record says."""
        trace = task.trace_id or f"{trace_context.of_task(self._client.namespace, task.id).trace:032x}"
        response = dataclasses.replace(response, record=TaskRecord(trace_id=trace))
        if self._read is not None:
            return await completed(response, task, self._read)
        if self._own_app:
            return await with_traceback_of_letter(response, DeadLetters(self._client.buses))
        if response.status == Status.FAILED and response.error is not None:
            log.warning(
                "task %s failed: %s: %s; if code raised it, the log of the services has the traceback. "
                "Pass trajectory=, or set WEFT_TRAJECTORY_URL, to have it in the response",
                task.id, response.error.get("type"), response.error.get("message"),
            )  # fmt: skip
        return response

    async def give_up(self) -> None:
        """Cancel all tasks that have not ended."""
        for handle in self._open.values():
            await handle.cancel("its caller is gone")

    async def result(self, handle: TaskHandle) -> TaskResponse:
        """Wait for a task's end. If the target fails first, return a failed response."""
        response = await self._unless_failed(handle.result())
        if response is None:
            return self._unfinished(handle.task_id)
        self._has_ended(handle.task_id)
        return response

    async def events(self, handle: TaskHandle, mode: StreamingMode | None) -> AsyncGenerator[StreamEvent]:
        """Yield a task's events. The last one has the task's end, even if the target fails first."""
        async with aclosing(handle.stream(mode=mode)) as events:
            while True:
                event = await self._unless_failed(anext(events, END))
                if event is END:
                    return
                if event is None:
                    response = self._unfinished(handle.task_id)
                    data = {"task_id": response.task_id, "status": response.status, "error": response.error}
                    event = StreamEvent("", "weft.task.failed", data)
                assert isinstance(event, StreamEvent)
                if event.response is not None:
                    self._has_ended(handle.task_id)
                yield event
                if not event.entry_id:
                    return

    async def _unless_failed(self, waited: Awaitable[T]) -> T | None:
        """Return the awaited result; None if the target fails first."""
        if self._failed is None:
            return await waited
        waiting = asyncio.ensure_future(waited)
        try:
            await asyncio.wait((waiting, self._failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait((waiting,))
        return None if waiting.cancelled() else waiting.result()

    def _unfinished(self, task: str) -> TaskResponse:
        assert self._failed is not None
        error = {"type": "EngineUnavailable", "message": str(self._failed.result())}
        return TaskResponse(task, Status.FAILED, error=error)

    def _has_ended(self, task: str) -> None:
        self._open.pop(task, None)
        self.ended.append(task)

    def check(self, task: Task) -> None:
        """Raise InvalidInput for errors that show before the task is submitted."""
        describe(task, self._name_of)
        checked_strategy(task)
        if task.agent is None and task.swarm is None and agent_of_runner(task.runner_cls) == TASK_AGENT:
            raise neither(task)
        if task.mcp_servers_conf and not self._own_app:
            raise InvalidInput(
                "mcp_servers_conf", "services run only what their app declares: write app.add_mcp(name, …) there"
            )
        if self._app is not None:
            HandlerTable(self._app.handlers)  # refuses anything that is not a Handler
        for category, name in task.config.handlers.items():
            if self._app is not None and name not in self._app.handlers:
                known = ", ".join(self._app.handlers) or "none"
                raise InvalidInput(
                    f"conf.handlers.{category}", f"the app has no handler {name!r}; app.handlers has {known}"
                )
        if self._own_app and self._app is not None:
            for point, names in task.hooks.items():
                there = [hook.name for hook in self._app.hooks if hook.point == HookPoint(point)]
                for place, name in enumerate(names):
                    if name not in there:
                        known = ", ".join(there) or "none"
                        raise InvalidInput(
                            f"hooks.{point}.{place}",
                            f"the app has no hook {name!r} at {HookPoint(point)}; it has {known}",
                        )

    def _name_of(self, kind: str, named: object) -> str:
        if id(named) in self._given:
            return self._given[id(named)]
        if self._app is not None:
            functions = self._app.functions
            known = functions.tool(named) if kind == "tool" else functions.agent(named)
            if known is not None:
                return known.name
        if isinstance(named, Swarm):
            raise code_in_swarm(named)
        return label(named)

    async def _check_names(self, found: Description, runner: str, field: str) -> None:
        """Raise InvalidInput that names an agent or runner that no app offers. `field` of the task has the agents."""
        bus = self._client.buses[0]
        offered = await announced_names(bus, "agent")
        if not offered:
            return  # no handler has started yet: the submit waits for one
        if runner not in offered:
            name = found.runner.rpartition(".")[2] or "TaskRunner"
            raise InvalidInput(
                "runner_cls", f"no app there has a runner named {name!r}: declare it with app.add_runner"
            )
        for name in agents_of(found):
            if name not in offered:
                agents = [each for each in offered if not each.startswith("weft.")]
                raise InvalidInput(field, f"no agent is named {name!r}; {choices(agents)}")
        await self._check_tools(found)

    async def _check_tools(self, found: Description) -> None:
        """Raise InvalidInput that names a tool that no app offers. Tools of MCP servers may appear later."""
        plain = [(f"tool_names.{place}", name) for place, name in enumerate(found.tool_names) if not is_pattern(name)]
        plain += [(f"tools_conf.{name}", name) for name in found.tools_conf]
        if not plain:
            return
        bus = self._client.buses[0]
        offered = await announced_names(bus, "tool")
        for field, name in plain:
            later = self._app is not None and self._app.functions.mcp_server_of(name) is not None
            if not later and not any(is_allowed([[name]], each) for each in offered):
                raise InvalidInput(field, f"no tool is named {name!r}; {choices(offered)}")
