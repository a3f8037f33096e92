"""Where tasks run: on the services of a broker, or in this process, in an app made of what the tasks hold."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from runtime_core.agents.agent import Agent
from runtime_core.app import App
from runtime_core.client import Client, TaskHandle
from runtime_core.declaration import place_of, underlying
from runtime_core.engines.waiting import ENGINE_WAIT_SECONDS
from runtime_core.errors import InvalidInput
from runtime_core.llm.agent import LLMAgent
from runtime_core.local import LocalApp
from runtime_core.policy import RetryPolicy
from runtime_core.runners.described import TASK_AGENT, Description, agent_of_runner, agents_of, describe
from runtime_core.runners.policy import PolicyDefinition, has_policy
from runtime_core.runners.runner import Runner
from runtime_core.runners.swarm import Swarm, code_in_swarm, label
from runtime_core.runners.task import Task
from runtime_core.runners.task_runner import TaskRunner


class RunPlace:
    """A client, and what it knows of the names under which things are declared where its tasks run."""

    def __init__(self, client: Client, app: App | None, given: dict[int, str] | None = None) -> None:
        """`app` is what runs there, as far as this process has it; `given` names objects by their `id()`."""
        self._client = client
        self._app = app
        self._given = given or {}
        self._begun: list[TaskHandle] = []

    async def submit(self, task: Task, *, stream: bool = False) -> TaskHandle:
        """Start a task. Raises InvalidInput for what is wrong in it, Rejected where the broker refuses it."""
        found = describe(task, self._name_of)
        asked = agent_of_runner(task.runner_cls)
        await self._check_names(found, asked)
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
        engine_wait = task.config.engine_wait_seconds
        handle = await self._client.submit(
            asked,
            found,
            task_id=task.id,
            session_id=task.session_id,
            timeout_seconds=task.timeout_seconds,
            engine_wait_seconds=None if engine_wait == ENGINE_WAIT_SECONDS else engine_wait,
            metadata=metadata or None,
            hooks=task.hooks or None,
            streaming_mode=task.streaming,
            engine=None if task.config.engine == "local" else task.config.engine,
            stream=stream,
        )
        self._begun.append(handle)
        return handle

    async def give_up(self) -> None:
        """Cancel all tasks that have begun here and not ended."""
        for handle in self._begun:
            await handle.cancel("its caller has gone")

    def check(self, task: Task) -> None:
        """Raise InvalidInput for what can be seen to be wrong before anything is submitted."""
        describe(task, self._name_of)

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

    async def _check_names(self, found: Description, runner: str) -> None:
        """Raise InvalidInput that names an agent or a runner which no app offers."""
        bus = self._client.buses[0]
        offered = {name.decode() for name in cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.agents))}
        if not offered:
            return  # before the first handler has come: the submit waits for it
        if runner not in offered:
            name = found.runner.rpartition(".")[2] or "TaskRunner"
            raise InvalidInput(
                "runner_cls", f"no runner is named {name!r} in the app that runs there: add it with app.add_runner"
            )
        for name in agents_of(found):
            if name not in offered:
                known = ", ".join(sorted(each for each in offered if not each.startswith(TASK_AGENT))) or "none"
                field = "agent" if found.swarm is None else "swarm"
                raise InvalidInput(field, f"no agent is named {name!r}; known are {known}")


@asynccontextmanager
async def run_place(
    tasks: Sequence[Task], *, client: Client | None, url: str | None, app: App | None
) -> AsyncIterator[RunPlace]:
    """The place for these tasks: `client`'s, that of the broker at `url` or WEFT_REDIS_URL, or this process."""
    if client is not None:
        yield RunPlace(client, app)
    elif url or os.environ.get("WEFT_REDIS_URL"):
        async with Client.connect(url) as connected:
            yield RunPlace(connected, app)
    else:
        made = _Made(app)
        for task in tasks:
            made.take(task)
        async with LocalApp(made.app) as local:
            place = RunPlace(local, made.app, made.names)
            try:
                yield place
            except BaseException:
                # Nobody could have their answers: the place must not wait for them either.
                await place.give_up()
                raise


class _Made:
    """An app made of what tasks hold: their agents, tools, swarms and runners."""

    def __init__(self, base: App | None) -> None:
        self.app = App("local-tasks")
        if base is not None:
            self.app.include(base)
        self.app.add_runner(TaskRunner)
        self.names: dict[int, str] = {}

    def take(self, task: Task) -> None:
        """Declare what a task holds. Raises InvalidInput and ConfigurationError for what cannot be."""
        for tool in task.tools:
            self._tool(tool)
        if task.agent is not None:
            self._agent(task.agent, "agent")
        if isinstance(task.swarm, Swarm):
            for agent in task.swarm.ordered_agents:
                self._agent(agent, "swarm")
            self._swarm(task.swarm)
        if task.runner_cls is not None:
            self._runner(task.runner_cls)

    def _agent(self, agent: object, field: str) -> None:
        if isinstance(agent, str):
            return
        if id(agent) in self.names or self.app.functions.agent(agent) is not None:
            return
        place = place_of(agent if underlying(agent) else None, 1)
        name = self._free(label(agent), self.app.agents)
        if inspect.isclass(agent) and issubclass(agent, Agent):
            self.app.add_agent(name, agent)
        elif isinstance(agent, LLMAgent):
            self._of_model(agent, field)
            self.app.add_agent(name, agent, retry=RetryPolicy(attempts=1))
        elif has_policy(agent):
            self.app.functions.agents.add(PolicyDefinition(name, agent, place))
        elif inspect.isfunction(agent) or inspect.ismethod(agent):
            # Only the task says how often it is tried again; who declares an agent says it there.
            self.app.agent(name, retry=RetryPolicy(attempts=1))(agent)
        else:
            raise InvalidInput(
                field,
                f"{agent!r} is no agent: give async def f(ctx: AgentContext, input), an Agent class, an LLMAgent, an "
                "object with async_policy(observation), or a name",
            )
        self.names[id(agent)] = name

    def _of_model(self, agent: LLMAgent, field: str) -> None:
        """Declare what a model may call that the agent holds as objects."""
        for tool in agent.tools:
            self._tool(tool)
        for other in (*agent.members, *agent.handoffs):
            if other is not agent:
                self._agent(other, field)

    def _tool(self, tool: object) -> None:
        if isinstance(tool, str) or id(tool) in self.names or self.app.functions.tool(tool) is not None:
            return
        name = self._free(label(tool), self.app.tools)
        if inspect.isfunction(tool) or inspect.ismethod(tool):
            self.app.tool(name=name)(tool)
        elif callable(getattr(tool, "step", None)):
            self.app.add_tool(tool, name=name)
        else:
            raise InvalidInput("tools", f"{tool!r} is no tool: give a function or an object with step(args)")
        self.names[id(tool)] = name

    def _swarm(self, swarm: Swarm) -> None:
        """As an agent of its own, since its stop conditions cannot travel in the task."""
        if id(swarm) not in self.names:
            name = self._free(f"swarm.{swarm.name}", self.app.agents)
            self.app.add_swarm(name, swarm)
            self.names[id(swarm)] = name

    def _runner(self, runner: type[Runner] | str) -> None:
        found = _imported(runner) if isinstance(runner, str) and "." in runner else runner
        if isinstance(found, str):
            if agent_of_runner(found) not in self.app.agents:
                raise InvalidInput(
                    "runner_cls",
                    f"no runner is named {found!r}: give the class, package.module.Class, or a name that "
                    "app.add_runner has declared",
                )
            return
        if not (inspect.isclass(found) and issubclass(found, Runner)):
            raise InvalidInput(
                "runner_cls",
                f"{found!r} is not a subclass of Runner: give one, package.module.Class, or a declared name",
            )
        self.app.add_runner(found)

    @staticmethod
    def _free(name: str, taken: object) -> str:
        """The name, or with a number where it stands for another object already."""
        assert hasattr(taken, "__contains__")
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        return free


def _imported(text: str) -> type[Runner]:
    """The class that `package.module.Class` names."""
    module_name, _, name = text.rpartition(".")
    try:
        main = sys.modules["__main__"]
        # A program that is run as a script must not be imported a second time, with classes of its own.
        as_script = getattr(getattr(main, "__spec__", None), "name", None) == module_name
        found: object = getattr(main if as_script else importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("runner_cls", f"{text!r} cannot be found: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Runner)):
        raise InvalidInput("runner_cls", f"{text!r} is not a subclass of Runner")
    return found
