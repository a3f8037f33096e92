"""Runners: what carries out a task, in three phases, inside one durable run. TaskRunner is the default."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime_core.aworld.described import agent_of_runner, describe
from runtime_core.aworld.events.manager import EventLoop, EventManager, HandlerTable
from runtime_core.aworld.events.message import AgentMessage, Constants, Message, TaskMessage, TopicType
from runtime_core.aworld.orchestration import Ask, Done, orchestration
from runtime_core.aworld.swarm import Swarm
from runtime_core.aworld.task import Task
from runtime_core.errors import AgentError, InvalidInput, WeftError
from runtime_core.runs.policy import Observation
from runtime_core.wire.results import TaskResponse

if TYPE_CHECKING:
    from runtime_core.aworld.handles import Surroundings, Tools
    from runtime_core.declare.declaration import Place
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.definition import AgentDefinition
    from runtime_core.sharing.context import Context


log = logging.getLogger(__name__)


class Runner(ABC):
    """Base of all runners: `pre_run`, `do_run` and `post_run`, once each for every try of the task."""

    def __init__(self, task: Task, *args: object, **kwargs: object) -> None:
        """`args` and `kwargs` are for subclasses; the runtime gives the task alone."""
        self.task = task
        self.conf = task.config
        """As a dict: `self.conf.get("max_depth", 3)`."""
        self.max_steps = self.conf.max_steps
        self.observation = Observation.of(task.input if task.observation is None else task.observation)
        """What the task begins with: its observation, else its input."""

    @classmethod
    def as_agent(cls, place: Place, /, *, name: str | None, pool: str, timeout_seconds: float) -> AgentDefinition:
        """The agent whose runs this class carries out: `App.add_runner` declares it."""
        from runtime_core.aworld.declared import RunnerDefinition  # here: it stands on runners

        return RunnerDefinition(cls, place, name=name, pool=pool, timeout_seconds=timeout_seconds)

    @property
    def ctx(self) -> AgentContext:
        """The durable run that this runner works in."""
        return self._surroundings.ctx

    @property
    def context(self) -> Context:
        """What the task's runs know together, beginning with `task.context`: see `weft.Context`.

        Each coroutine of a `gather` has its own: ask for it there again.
        """
        return self.ctx.context

    @functools.cached_property
    def swarm(self) -> Swarm:
        """The task's swarm, or its agent as a swarm of one; its agents are objects with `run(observation)`.

        Raises InvalidInput (`agent`) for a task with neither.
        """
        given = self.task.swarm if self.task.swarm is not None else self.task.agent
        if given is None:
            raise InvalidInput("agent", f"task {self.task.id!r} has neither an agent nor a swarm: give one")
        return self._surroundings.swarm(given if isinstance(given, Swarm) else Swarm(given))

    @functools.cached_property
    def tools(self) -> Tools:
        """The task's tools by name, each an object with `step(args)`."""
        return self._surroundings.tools(self.task.tool_names)

    @property
    def _surroundings(self) -> Surroundings:
        found = self.task.surroundings
        if found is None:
            raise WeftError(
                f"{type(self).__name__} works inside a durable run: give the task runner_cls={type(self).__name__} "
                "and call Runners.run_task(task)"
            )
        return found

    async def run(self) -> TaskResponse:
        """All phases. `post_run` also follows an error, which is then raised again.

        Where a waiting run is only dropped from memory, it goes on elsewhere: then nothing of this happens here.
        """
        ctx = self.ctx
        for name, value in self.task.context.items():
            self.context.put(name, value)
        try:
            await self.pre_run()
            response = await self._called_with_context()
        except asyncio.CancelledError:
            if ctx.cancelled:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._clean_up()
            raise
        except Exception:
            await self._clean_up()
            raise
        await self.post_run()
        return self._unsaid() if response is None else response

    async def run_sub_task(self, task: Task) -> TaskResponse:
        """Run another task as a part of this one: a child run, which shares this task's time limit and end.

        Its agents, tools and runner are named, or are what the app has declared. An error is a response here, too.
        """
        if not hasattr(task, "timeout_seconds"):
            raise InvalidInput("task", f"{task!r} is no Task")
        if task.timeout_seconds is not None:
            raise InvalidInput("timeout", "a sub-task has the time of its task: give that one a timeout")
        part = dataclasses.replace(
            task, is_sub_task=True, parent_task=self.task.id, session_id=task.session_id or self.task.session_id
        )
        found = describe(part, self._surroundings.name_of)
        try:
            output = await self.ctx.agent(agent_of_runner(task.runner_cls), found)
        except AgentError as error:
            return TaskResponse(task.id, "failed", error={"type": error.type, "message": error.message})
        return TaskResponse(task.id, "completed", output)

    async def pre_run(self) -> None:  # noqa: B027  # most runners have nothing to prepare
        """Prepare."""

    @abstractmethod
    async def do_run(self, context: Any = None) -> TaskResponse | None:  # Any: a Context, which some do not name
        """Do the work. None stands for a response without an answer."""

    async def post_run(self) -> None:  # noqa: B027  # most runners have nothing to release
        """Release and notify."""

    def _unsaid(self) -> TaskResponse:
        """The response where `do_run` has returned none."""
        return TaskResponse(self.task.id, "completed")

    async def _called_with_context(self) -> TaskResponse | None:
        """`do_run`, whether or not the subclass takes a context."""
        takes = inspect.signature(self.do_run).parameters
        found = await (self.do_run(self.context) if takes else self.do_run())
        if found is not None and not isinstance(found, TaskResponse):
            raise InvalidInput("do_run", f"of {type(self).__name__} returns {found!r}: return a TaskResponse")
        return found

    async def _clean_up(self) -> None:
        """`post_run` after an error, which must not hide that error."""
        try:
            await self.post_run()
        except Exception:
            log.exception("post_run of %s failed after an error of task %s", type(self).__name__, self.task.id)


SWARM = "weft.swarm"
"""To whom agents of a swarm answer: the swarm itself, which asks the next one."""
MESSAGES_PER_STEP = 8
"""How many messages the loop handles for each of the task's `max_steps`: the shape of the swarm has its own limit."""


class TaskRunner(Runner):
    """Runs the task's agent or swarm. Base of runners that change a part of that."""

    def __init__(self, task: Task, *args: object, **kwargs: object) -> None:
        super().__init__(task, *args, **kwargs)
        self._output: Any = None  # Any: the payload of the message that ended the task
        self._ended: TaskResponse | None = None

    @functools.cached_property
    def event_manager(self) -> EventManager:
        """Dispatches the messages of this run: emit, and register functions, before `do_run` or in it."""
        return EventManager(self.ctx, HandlerTable.of(self.ctx, self.conf.handlers))

    @property
    def event_mng(self) -> EventManager:
        """The same, by AWorld's name."""
        return self.event_manager

    async def pre_run(self) -> None:
        """Verify what the task says. Raises InvalidInput."""
        if self.conf.check_input and self.observation.content in (None, "", [], {}):
            raise InvalidInput("input", f"task {self.task.id!r} has no input, and conf.check_input asks for one")

    async def do_run(self, context: Any = None) -> TaskResponse | None:  # Any: see Runner.context
        """Send the first messages, handle what follows, build the response."""
        for message in await self.first_messages():
            await self.event_manager.emit_message(message)
        await self._do_run()
        await self._save_trajectories()
        return self._response()

    def _unsaid(self) -> TaskResponse:
        return self._response() if self._ended is None else self._ended

    async def _called_with_context(self) -> TaskResponse | None:
        # Who looks at the context has all questions to agents carry it: only where a subclass may want it.
        if type(self).do_run is TaskRunner.do_run:
            return await self.do_run()
        return await super()._called_with_context()

    async def first_messages(self) -> Sequence[Message]:
        """What the run begins with: the question to the swarm's first agent."""
        work = orchestration(
            self.ctx,
            self.swarm,
            max_steps=self.max_steps,
            endless_threshold=self.task.endless_threshold,
        )

        async def answered(message: Message) -> Message:
            return _message(await work.after(message.payload))

        await self.event_manager.register(Constants.AGENT, SWARM, answered)
        return [_message(await work.begin(self.observation))]

    async def _do_run(self) -> None:
        """The core: handle messages until one ends the task. Raises what it ended with, where it has failed."""
        loop = EventLoop(self.event_manager, max_steps=MESSAGES_PER_STEP * self.max_steps)
        outcome = await loop.run(())
        if outcome.status != "completed" and outcome.cause is not None:
            raise outcome.cause
        self._output = outcome.value()

    async def _save_trajectories(self) -> None:
        """All steps and messages are on the record with the commits of the run; a subclass may keep more."""

    def _response(self) -> TaskResponse:
        """The response of what the agents have given."""
        self._ended = TaskResponse(self.task.id, "completed", self._output)
        return self._ended


def _message(step: Ask | Done) -> Message:
    if isinstance(step, Done):
        return TaskMessage(payload=step.output, sender=SWARM, topic=TopicType.FINISHED)
    return AgentMessage(
        payload=step.agent.shown(step.seen, step.info),
        sender=step.seen.observer or "task",
        receiver=step.agent.name,
        caller=SWARM,
    )
