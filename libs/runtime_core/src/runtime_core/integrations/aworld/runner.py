"""Runners execute tasks, in three phases inside one durable run. TaskRunner is the default.

The agent `weft.task` runs tasks with TaskRunner, and `weft.task.<name>` with your own runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from runtime_core.declare.declaration import Place, RetryPolicy, checked_name
from runtime_core.declare.schema import Schema
from runtime_core.errors import (
    AgentError,
    ConfigurationError,
    InvalidInput,
    LimitExceeded,
    Reject,
    Retry,
    TaskCancelled,
    WeftError,
)
from runtime_core.integrations.aworld.description import (
    Description,
    agent_of_runner,
    describe,
    read_description,
    task_of,
)
from runtime_core.integrations.aworld.events.handlers import HandlerTable
from runtime_core.integrations.aworld.events.manager import EventLoop, EventManager
from runtime_core.integrations.aworld.events.message import AgentMessage, Constants, Message, TaskMessage, TopicType
from runtime_core.integrations.aworld.orchestration import (
    TURN_SECONDS,
    AskAgent,
    Done,
    Orchestration,
    RunScope,
    Swarm,
    Tools,
    orchestration,
)
from runtime_core.integrations.aworld.task import CONTEXT_STEP, TASK_AGENT, Task
from runtime_core.runs.definition import AgentDefinition, Coro
from runtime_core.runs.policy import Observation
from runtime_core.wire.events import TaskResponse
from runtime_core.wire.step import Status

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.shared_context import Context


log = logging.getLogger(__name__)

SWARM = "weft.swarm"
"""The receiver of the answers of a swarm's agents: the swarm, which then calls the next agent."""
MESSAGES_PER_STEP = 8
"""The messages that the loop may handle for each of the task's `max_steps`."""
BETWEEN_TRIES = RetryPolicy(jitter=0.0)
"""The waits between the attempts of a task with `max_retry_count`."""
_FINAL = (InvalidInput, LimitExceeded, ConfigurationError, Reject, TaskCancelled)
"""Errors that another attempt would only repeat."""


def neither(task: Task) -> InvalidInput:
    """Return the error of a task without an agent or a swarm."""
    return InvalidInput("agent", f"task {task.id!r} has neither an agent nor a swarm: set one of them")


class Runner(ABC):
    """Base of all runners: `pre_run`, `do_run` and `post_run` run once per attempt of the task."""

    def __init__(self, task: Task, *args: object, **kwargs: object) -> None:
        """Weft passes only the task; `args` and `kwargs` are for subclasses."""
        self.task = task
        self.conf = task.config
        """Reads like a dict: `self.conf.get("max_depth", 3)`."""
        self.max_steps = self.conf.max_steps
        self.observation = Observation.of(task.input if task.observation is None else task.observation)
        """The task's observation, or else its input."""

    @classmethod
    def as_agent(cls, place: Place, /, *, name: str | None, pool: str, timeout_seconds: float) -> AgentDefinition:
        """Return the agent that runs tasks with this class; `App.add_runner` declares it."""
        return RunnerDefinition(cls, place, name=name, pool=pool, timeout_seconds=timeout_seconds)

    @property
    def ctx(self) -> AgentContext:
        """The context of the durable run that executes this runner."""
        return self._scope.ctx

    @property
    def context(self) -> Context:
        """The context that the task's runs share, initially `task.context`: see `weft.Context`.

        Each coroutine of a `gather` has its own: read the property again there.
        """
        return self.ctx.context

    @functools.cached_property
    def swarm(self) -> Swarm:
        """The task's swarm, or its agent as a swarm of one. Its agents are objects with `run(observation)`.

        Raises InvalidInput (`agent`) if the task has neither.
        """
        given = self.task.swarm if self.task.swarm is not None else self.task.agent
        if given is None:
            raise neither(self.task)
        return self._scope.swarm(given if isinstance(given, Swarm) else Swarm(given))

    @functools.cached_property
    def tools(self) -> Tools:
        """The task's tools by name, each an object with `step(args)`."""
        return self._scope.tools(self.task.tool_names)

    @property
    def _scope(self) -> RunScope:
        found = self.task.scope
        if found is None:
            raise WeftError(
                f"{type(self).__name__} runs only inside a durable run: set the task's "
                f"runner_cls={type(self).__name__} and call Runners.run_task(task)"
            )
        return found

    async def run(self) -> TaskResponse:
        """Run all phases. After an error, `post_run` still runs before the error is raised again.

        If Weft only drops a waiting run from memory, `post_run` does not run: the run continues elsewhere.
        """
        ctx = self.ctx
        await self._begin_context()
        try:
            await self._phase("pre_run", self.pre_run())
            response = await self._called_with_context()
        except asyncio.CancelledError:
            if ctx.cancelled:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._clean_up()
            raise
        except Exception:
            await self._clean_up()
            raise
        await self._phase("post_run", self.post_run())
        await self._end_context()
        return self._unsaid() if response is None else response

    async def _begin_context(self) -> None:
        if self.task.context_config.get("session"):
            async with self.ctx.session() as session:
                for name, value in session.context_info.visible().items():
                    self.context.put(name, value)
        for name, value in self.task.context.items():
            self.context.put(name, value)

    async def _end_context(self) -> None:
        """Give the values of the context to the session, and to the record, from which the response has them."""
        if not self.ctx.uses_context or self.task.is_sub_task:
            return
        values = self.context.context_info.visible()
        if self.task.context_config.get("session"):
            async with self.ctx.session() as session:
                for name, value in values.items():
                    if session.get(name) != value:
                        session.put(name, value)
        if values and self.task.context_config.get("response", True):
            await self.ctx.step(lambda: values, name=CONTEXT_STEP)

    @overload
    async def run_sub_task(self, task: Task, *, detach: Literal[False] = False) -> TaskResponse: ...

    @overload
    async def run_sub_task(self, task: Task, *, detach: Literal[True]) -> str: ...

    async def run_sub_task(self, task: Task, *, detach: bool = False) -> TaskResponse | str:
        """Run another task as a child run, which shares this task's time limit and cancellation.

        Its agents, tools and runner are names, or objects that the app has declared. An error is a response, too. With
        `detach`, it is a separate task: it outlives this one, whatever ends that, and the result is its id on the
        broker.
        """
        if not hasattr(task, "timeout_seconds"):
            raise InvalidInput("task", f"{task!r} is not a Task")
        if task.timeout_seconds is not None:
            raise InvalidInput("timeout", "a sub-task has the time limit of its task: set the timeout there")
        part = dataclasses.replace(
            task, is_sub_task=not detach, parent_task=self.task.id, session_id=task.session_id or self.task.session_id
        )
        found = describe(part, self._scope.name_of)
        if detach:
            return await self.ctx.send(agent_of_runner(task.runner_cls), found)
        try:
            output = await self.ctx.agent(agent_of_runner(task.runner_cls), found)
        except AgentError as error:
            return TaskResponse(task.id, Status.FAILED, error={"type": error.type, "message": error.message})
        return TaskResponse(task.id, Status.COMPLETED, output)

    async def pre_run(self) -> None:  # noqa: B027  # most runners have nothing to prepare
        """Prepare."""

    @abstractmethod
    async def do_run(self, context: Any = None) -> TaskResponse | None:  # Any: a Context, which some do not name
        """Do the work. None means a response without an answer."""

    async def post_run(self) -> None:  # noqa: B027  # most runners have nothing to release
        """Release and notify."""

    def _unsaid(self) -> TaskResponse:
        """Return the response to use when `do_run` returned None."""
        return TaskResponse(self.task.id, Status.COMPLETED)

    async def _called_with_context(self) -> TaskResponse | None:
        """Call `do_run`, with the context if it takes one."""
        takes = inspect.signature(self.do_run).parameters
        found = await self._phase("do_run", self.do_run(self.context) if takes else self.do_run())
        if found is not None and not isinstance(found, TaskResponse):
            raise InvalidInput("do_run", f"of {type(self).__name__} returned {found!r}: return a TaskResponse")
        return found

    async def _phase(self, name: str, begun: object) -> object:
        if not inspect.isawaitable(begun):
            raise InvalidInput(name, f"of {type(self).__name__} is not async: write async def {name}")
        found: object = await begun
        return found

    async def _clean_up(self) -> None:
        """Run `post_run` after an error; its own error must not hide the first one."""
        try:
            await self.post_run()
        except Exception:
            log.exception("post_run of %s failed after an error of task %s", type(self).__name__, self.task.id)


class TaskRunner(Runner):
    """Runs the task's agent or swarm. Subclass it to change a part of that."""

    def __init__(self, task: Task, *args: object, **kwargs: object) -> None:
        super().__init__(task, *args, **kwargs)
        self._output: Any = None  # Any: the payload of the message that ended the task
        self._ended: TaskResponse | None = None
        self.trajectory: list[dict[str, Any]] = []  # Any: JSON
        """The calls of agents, once `_save_trajectories` has run."""

    @functools.cached_property
    def event_manager(self) -> EventManager:
        """The message queue of this run: emit messages and register functions, in `pre_run` or `do_run`."""
        return EventManager(self.ctx, HandlerTable.of(self.ctx, self.conf.handlers))

    @functools.cached_property
    def _work(self) -> Orchestration:
        return orchestration(
            self.ctx, self.swarm, max_steps=self.max_steps, endless_threshold=self.task.endless_threshold
        )

    @property
    def event_mng(self) -> EventManager:
        """The event manager, by AWorld's name."""
        return self.event_manager

    async def pre_run(self) -> None:
        """Check the task. Raises InvalidInput."""
        if self.conf.check_input and self.observation.content in (None, "", [], {}):
            raise InvalidInput("input", f"task {self.task.id!r} has no input, and conf.check_input requires one")

    async def do_run(self, context: Any = None) -> TaskResponse | None:  # Any: see Runner.context
        """Send the first messages, handle all that follow, and build the response.

        With `event_driven=False`, call the agents in turn instead, without messages.
        """
        if self.task.event_driven:
            for message in await self.first_messages():
                await self.event_manager.emit_message(message)
            await self._do_run()
        else:
            self._output = await self._work.run(self.observation)
        await self._save_trajectories()
        return self._response()

    def _unsaid(self) -> TaskResponse:
        return self._response() if self._ended is None else self._ended

    async def _called_with_context(self) -> TaskResponse | None:
        # Reading the context makes every call to an agent carry it, so read it only for a subclass.
        if type(self).do_run is TaskRunner.do_run:
            return await self.do_run()
        return await super()._called_with_context()

    async def first_messages(self) -> Sequence[Message]:
        """Return the first messages: the call to the swarm's first agent."""
        work = self._work

        async def answered(message: Message) -> Message:
            return _message(await work.answered(message.payload))

        await self.event_manager.register(Constants.AGENT, SWARM, answered)
        return [_message(work.noted(await work.begin(self.observation)))]

    async def _do_run(self) -> None:
        """Handle messages until one ends the task. Raises the task's error if it failed."""
        loop = EventLoop(self.event_manager, max_steps=MESSAGES_PER_STEP * self.max_steps)
        outcome = await loop.run(())
        if outcome.status != Status.COMPLETED and outcome.cause is not None:
            raise outcome.cause
        self._output = outcome.value()

    async def _save_trajectories(self) -> None:
        """Keep the calls of this runner's agents in `self.trajectory`: `agent`, `input`, `output`.

        Weft records all steps by itself, and Runners give them to the caller as `response.trajectory`. Override this to
        save the calls elsewhere, in a step: `await self.ctx.step(save, self.trajectory)`.
        """
        self.trajectory = [dict(call) for call in self._work.calls]

    def _response(self) -> TaskResponse:
        """Return the response with the agents' output."""
        self._ended = TaskResponse(self.task.id, Status.COMPLETED, self._output)
        return self._ended


def _message(step: AskAgent | Done) -> Message:
    if isinstance(step, Done):
        return TaskMessage(payload=step.output, sender=SWARM, topic=TopicType.FINISHED)
    return AgentMessage(
        payload=step.agent.shown(step.seen, step.info),
        sender=step.seen.observer or "task",
        receiver=step.agent.name,
        caller=SWARM,
    )


# ---- runners as agents ----------------------------------------------------------------------------------------


class RunnerDefinition(AgentDefinition):
    """A runner's class as an agent. Its input describes a task; its output is the task's answer."""

    def __init__(
        self,
        runner: type[Runner],
        place: Place,
        *,
        name: str | None = None,
        pool: str = "",
        timeout_seconds: float = TURN_SECONDS,
    ) -> None:
        """Tasks refer to the runner by `name`; None: by the name of its class."""
        if not (inspect.isclass(runner) and issubclass(runner, Runner)):
            raise ConfigurationError(f"runner {runner!r} ({place}) is not a subclass of weft.aworld.Runner")
        if inspect.isabstract(runner):
            raise ConfigurationError(f"runner {runner.__name__} ({place}) has no do_run: write async def do_run")
        own = checked_name("runner", name, runner, place)
        super().__init__(
            agent_of_runner(runner) if name is None else f"{TASK_AGENT}.{own}",
            runner,
            place,
            # The task itself sets its retries.
            retry=RetryPolicy(attempts=1),
            pool=pool,
            timeout_seconds=timeout_seconds,
            description=inspect.cleandoc(runner.__doc__ or ""),
        )
        self.runner = runner

    def __eq__(self, other: object) -> bool:
        """Equal name, runner and pool mean the same declaration, in any number of apps."""
        if not isinstance(other, RunnerDefinition):
            return NotImplemented
        return (self.name, self.runner, self.pool) == (other.name, other.runner, other.pool)

    def __hash__(self) -> int:
        return hash((self.name, self.runner, self.pool))

    def decode_input(self, data: bytes) -> Description:
        found = read_description(data)
        asked = found.runner
        if "." in asked and asked.rpartition(".")[2] == self.runner.__name__:
            own = f"{self.runner.__module__}.{self.runner.__qualname__}"
            # A program that runs as a script is its own module __main__.
            if asked != own and "__main__" not in (asked.partition(".")[0], own.partition(".")[0]):
                raise InvalidInput(
                    "input.runner",
                    f"the task names {asked!r}, but this app has {own!r}: declare that runner with app.add_runner",
                )
        return found

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, Description)  # what decode_input gave
        return self._run(ctx, value)

    def input_schema(self) -> Schema:
        return {"type": "object"}

    def output_schema(self) -> Schema | None:
        return None

    async def _run(self, ctx: AgentContext, found: Description) -> object:
        if not found.max_retry_count:
            return await self._try(ctx, found)
        number = 1
        while True:
            try:
                # Each attempt gets its own branch, and so its own step ids, even if one failed between steps.
                [answer] = await ctx.gather(self._try(ctx, found))
                return answer
            except Retry as error:
                if number > found.max_retry_count:
                    raise AgentError("Retry", error.reason) from error
                delay = error.after_seconds
            except Exception as error:
                if number > found.max_retry_count or isinstance(error, _FINAL) or type(error) is WeftError:
                    raise
                delay = BETWEEN_TRIES.delay_seconds(number, lambda: 0.0)
            await ctx.sleep(delay)
            number += 1

    async def _try(self, ctx: AgentContext, found: Description) -> object:
        task = task_of(found, ctx.task_id, ctx.session_id)
        said: dict[str, object] | None = {"max_steps": task.config.max_steps} if "max_steps" in found.conf else None
        if task.tool_names:
            ctx.allow_tools(*task.tool_names)
        if task.tools_conf:
            ctx.set_tools_conf(task.tools_conf)
        task.scope = RunScope(ctx, _tools(ctx), said)
        response = await self.runner(task).run()
        if response.success:
            answer: object = response.output
            return answer.content if isinstance(answer, Observation) else answer
        error = response.error or {}
        kind, text = error.get("type") or response.status.capitalize(), error.get("message", "")
        # The runner chose this end, so the caller gets the error and what there was, and there is no dead letter.
        failed = TaskCancelled(kind, text) if response.status == Status.CANCELLED else AgentError(kind, text)
        failed.output, failed.chosen = response.output, True
        raise failed


def _tools(ctx: AgentContext) -> list[str]:
    from runtime_core.app.registry import Registry

    return list(ctx.functions.tools.view) if isinstance(ctx.functions, Registry) else []
