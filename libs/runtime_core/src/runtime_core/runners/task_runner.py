"""The runner that a task has where it names none: its agent or swarm by messages, from the first to the answer.

    do_run:  first message ──> EventManager ──> handler of its category ──> agent, tool, human …
                                    ^                                          │
                                    └── the swarm's next question <── answer ──┘   until a message ends the task

Each message is handled once, is on the trajectory, and is what handlers of the app (`app.handlers`, `conf.handlers`)
and functions registered with `self.event_manager` see.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from runtime_core.errors import InvalidInput
from runtime_core.events.constants import Constants, TopicType
from runtime_core.events.loop import EventLoop
from runtime_core.events.manager import EventManager
from runtime_core.events.message import AgentMessage, Message, TaskMessage
from runtime_core.events.table import HandlerTable
from runtime_core.runners.orchestration import Ask, Done, orchestration
from runtime_core.runners.runner import Runner
from runtime_core.runners.task import Task
from runtime_core.told import TaskResponse

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
