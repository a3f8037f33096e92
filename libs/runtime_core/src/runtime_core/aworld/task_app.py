"""An app made of the agents, tools, swarms and runners of tasks, and how an app travels to another process."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast

from msgspec import Struct

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.aworld.described import agent_of_runner
from runtime_core.aworld.runner import Runner, TaskRunner
from runtime_core.aworld.swarm import Swarm
from runtime_core.aworld.task import Task
from runtime_core.declare.declaration import label, one_line, place_of, underlying
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import ConfigurationError, InvalidInput
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


Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], object]
_Carried = tuple[App | None, list[tuple[Any, str, object, str]]]  # Any: a Part's kind


class SentApp(Struct, frozen=True):
    """What another process makes the app of."""

    name: str
    base: str
    """`package.module:app`; empty: there is none, or it is in `pickled`."""
    folder: str
    """The working directory of who sends it."""
    paths: list[str]
    """Where who sends it imports from."""
    pickled: bytes
    """(the base or None, [(kind, name, object, field)]); empty: the base is all there is."""


def pack(made: TasksApp, reference: str, dumps: Dumps) -> SentApp:
    """Make it ready to be sent. `reference` names the base where that is known; empty: it is looked for.

    Raises InvalidInput that names what cannot be sent.
    """
    base = reference or (reference_of(made.base) if made.base is not None else "")
    carried = None if base else made.base
    parts = [(part.kind, part.name, part.value, part.field) for part in made.parts]
    pickled = b""
    if carried is not None or parts:
        try:
            pickled = dumps((carried, parts))
        except Exception as error:  # whatever the objects' own methods raise
            raise _culprit(made, carried, dumps, error) from error
    paths = [os.path.abspath(path) for path in sys.path if path and os.path.isdir(path)]
    return SentApp(made.app.name, base, os.getcwd(), paths, pickled)


def unpack(sent: SentApp, loads: Loads) -> App:
    """Make the app here. Raises ConfigurationError in one line."""
    for path in (sent.folder, *sent.paths):
        if path not in sys.path:
            sys.path.append(path)
    base: App | None = None
    parts: list[Part] = []
    if sent.pickled:
        try:
            base, described = cast(_Carried, loads(sent.pickled))
        except Exception as error:  # loading imports and runs the user's code
            raise ConfigurationError(
                f"the tasks' objects cannot be made in another process: {one_line(error)}; what they need must be "
                "importable there"
            ) from error
        parts = [Part(*one) for one in described]
    if sent.base:
        base = load_app(sent.base)
    if base is not None and not parts:
        base.add_runner(TaskRunner)
        base.check()
        return base
    app = App(sent.name)
    if base is not None:
        app.include(base)
    app.add_runner(TaskRunner)
    for part in parts:
        declare(app, part)
    app.check()
    return app


def reference_of(app: App) -> str:
    """`package.module:name` of an app that stands in an imported module; empty: there is no such name."""
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name == "__mp_main__":
            continue
        for attribute, value in list(vars(module).items()):
            if value is app:
                # A script is its own module, which nobody else may import; `python -m` says its name.
                own = getattr(getattr(module, "__spec__", None), "name", "")
                if module_name != "__main__" or own:
                    return f"{own or module_name}:{attribute}"
    return ""


def _culprit(made: TasksApp, carried: App | None, dumps: Dumps, error: Exception) -> InvalidInput:
    """Which of the objects it is that cannot be sent."""
    tried: Sequence[tuple[str, object, str]] = (
        *((part.field, part.value, f"{part.kind} {part.name!r}") for part in made.parts),
        *(("app", item, item.what) for item in (carried.functions.all() if carried is not None else ())),
    )
    for field, value, shown in tried:
        try:
            dumps(value)
        except Exception as own:
            return InvalidInput(field, f"{shown} cannot be sent to another process: {one_line(own)}")
    return InvalidInput("app", f"cannot be sent to another process: {one_line(error)}; put it into a module")
