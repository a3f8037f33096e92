"""A runner: what carries out a task, in three phases, inside one durable run.

    class MyRunner(Runner):
        async def do_run(self, context=None):
            answer = await self.swarm.ordered_agents[0].run(self.observation)
            return TaskResponse(task_id=self.task.id, content=answer, status="success")

After a crash the runner is made again and runs again from the top; what its agents, tools and `self.ctx` gave before
comes from the journal. So its own code must do the same each time, as that of any agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from runtime_core.errors import AgentError, InvalidInput, WeftError
from runtime_core.runners.described import agent_of_runner, describe
from runtime_core.runners.swarm import Swarm
from runtime_core.runners.values import Observation
from runtime_core.told import TaskResponse

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext
    from runtime_core.context.context import Context
    from runtime_core.runners.handles import Surroundings, Tools
    from runtime_core.runners.task import Task

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

    @property
    def ctx(self) -> AgentContext:
        """The durable run that this runner works in."""
        return self._surroundings.ctx

    @property
    def context(self) -> Context:
        """What the task's runs know together, beginning with `task.context`: see `runtime_core.context`.

        Each coroutine of a `gather` has its own: ask for it there anew.
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
        return self._surroundings.tools(self.task)

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
