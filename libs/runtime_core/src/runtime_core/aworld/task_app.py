"""An app made of what tasks hold: their agents, tools, swarms and runners."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Literal

from runtime_core.app.app import App
from runtime_core.aworld.described import agent_of_runner
from runtime_core.aworld.runner import Runner, TaskRunner
from runtime_core.aworld.swarm import Swarm
from runtime_core.aworld.task import Task
from runtime_core.declare.declaration import label, place_of, underlying
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import InvalidInput
from runtime_core.llm.agent import LLMAgent
from runtime_core.runs.agent import Agent
from runtime_core.runs.policy import PolicyDefinition, has_policy

NAME = "local-tasks"


@dataclass(frozen=True, eq=False)
class Part:
    """One object that a task holds, and the name under which it is declared."""

    kind: Literal["agent", "tool", "swarm", "runner"]
    name: str
    value: object
    field: str
    """Of the task, for errors."""


class TasksApp:
    """An app made of another one and of what tasks hold: their agents, tools, swarms and runners."""

    def __init__(self, base: App | None, name: str = NAME) -> None:
        self.base = base
        self.app = App(name)
        if base is not None:
            self.app.include(base)
        self.app.add_runner(TaskRunner)
        self.names: dict[int, str] = {}
        """`id()` of an object → the name under which it is declared."""
        self.parts: list[Part] = []
        """What tasks hold besides what the base has declared."""

    @property
    def whole(self) -> App:
        """The base itself where tasks hold nothing besides, else the app that was made."""
        return self.base if self.base is not None and not self.parts else self.app

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
        self._declare(Part("agent", self._free(label(agent), self.app.agents), agent, field))

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
        self._declare(Part("tool", self._free(label(tool), self.app.tools), tool, "tools"))

    def _swarm(self, swarm: Swarm) -> None:
        """As an agent of its own, since its stop conditions cannot travel in the task."""
        if id(swarm) not in self.names:
            self._declare(Part("swarm", self._free(f"swarm.{swarm.name}", self.app.agents), swarm, "swarm"))

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
        """The name, or with a number where it stands for another object already."""
        assert hasattr(taken, "__contains__")
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        return free


def declare(app: App, part: Part) -> None:
    """Declare what a task holds, in whatever process. Raises InvalidInput and ConfigurationError for what cannot be."""
    name, value = part.name, part.value
    match part.kind:
        case "agent":
            _declare_agent(app, name, value, part.field)
        case "tool" if inspect.isfunction(value) or inspect.ismethod(value):
            app.tool(name=name)(value)
        case "tool" if callable(getattr(value, "step", None)):
            app.add_tool(value, name=name)
        case "tool":
            raise InvalidInput("tools", f"{value!r} is no tool: give a function or an object with step(args)")
        case "swarm":
            assert isinstance(value, Swarm)
            app.add_swarm(name, value)
        case "runner":
            assert isinstance(value, type)
            app.add_runner(value)


def _declare_agent(app: App, name: str, agent: object, field: str) -> None:
    if inspect.isclass(agent) and issubclass(agent, Agent):
        app.add_agent(name, agent)
    elif isinstance(agent, LLMAgent):
        app.add_agent(name, agent, retry=RetryPolicy(attempts=1))
    elif has_policy(agent):
        place = place_of(agent if underlying(agent) else None, 1)
        app.functions.agents.add(PolicyDefinition(name, agent, place))
    elif inspect.isfunction(agent) or inspect.ismethod(agent):
        # Only the task says how often it is tried again; who declares an agent says it there.
        app.agent(name, retry=RetryPolicy(attempts=1))(agent)
    else:
        raise InvalidInput(
            field,
            f"{agent!r} is no agent: give async def f(ctx: AgentContext, input), an Agent class, an LLMAgent, an "
            "object with async_policy(observation), or a name",
        )


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
