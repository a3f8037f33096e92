"""Where tasks run: on the services of a broker, or in this process, in an app made of the tasks' parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar, cast

from msgspec import Struct

from runtime_core.app.app import App
from runtime_core.aworld.described import TASK_AGENT, Description, agent_of_runner, agents_of, describe
from runtime_core.aworld.swarm import Swarm, code_in_swarm
from runtime_core.aworld.task import Task
from runtime_core.aworld.task_app import SentApp
from runtime_core.client.client import Client, TaskHandle
from runtime_core.declare.declaration import label
from runtime_core.engines.runtime_engine import ENGINE_WAIT_SECONDS
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.wire.commands import SubmitOptions
from runtime_core.wire.results import StreamEvent, StreamingMode, TaskResponse


class HostsWanted(Struct, frozen=True):
    """What is asked of an engine that shall host an app's handlers."""

    app: SentApp
    environ: dict[str, str]
    """The settings of the handlers, as variables."""
    number: int
    """How many processes host them; 0: as many as the engine has CPUs."""
    at_once: int
    """How many tasks are under way at once."""
    here_only: bool
    """Whether the broker answers on this machine only."""


T = TypeVar("T")

END = object()
"""There are no more events."""


class RunPlace:
    """A client, and what it knows of the names under which things are declared where its tasks run."""

    def __init__(
        self,
        client: Client,
        app: App | None,
        given: dict[int, str] | None = None,
        failed: asyncio.Future[WeftError] | None = None,
        *,
        gateways: bool = True,
    ) -> None:
        """`app` is what runs there, as far as this process has it; `given` names objects by their `id()`.

        `failed` is done once nobody runs anything there any more, and says why. Without `gateways`, `ctx.engine()` is
        `local` whatever `conf.engine` says.
        """
        self._client = client
        self._app = app
        self._given = given or {}
        self._failed = failed
        self._gateways = gateways
        self.ended: list[str] = []
        """Tasks whose ends were seen."""
        self._open: dict[str, TaskHandle] = {}
        """Of tasks that were submitted here, and whose ends were not seen."""

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
        handle = self._open[task.id] = await self._client.submit(
            asked,
            found,
            task_id=task.id,
            session_id=task.session_id,
            stream=task.streaming or stream,
            options=SubmitOptions(
                timeout_seconds=task.timeout_seconds,
                engine_wait_seconds=None if engine_wait == ENGINE_WAIT_SECONDS else engine_wait,
                metadata=metadata,
                hooks=task.hooks,
                engine=task.config.engine if self._gateways and task.config.engine != "local" else None,
            ),
        )
        return handle

    async def give_up(self) -> None:
        """Cancel all tasks that have begun here and not ended."""
        for handle in self._open.values():
            await handle.cancel("its caller has gone")

    async def result(self, handle: TaskHandle) -> TaskResponse:
        """Wait for a task's end; where the place fails meanwhile, that is its end."""
        response = await self._unless_failed(handle.result())
        if response is None:
            return self._unfinished(handle.task_id)
        self._has_ended(handle.task_id)
        return response

    async def events(self, handle: TaskHandle, mode: StreamingMode | None) -> AsyncGenerator[StreamEvent]:
        """A task's events. The last one says how it ended, also where the place fails meanwhile."""
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
        """What is waited for; None where the place has failed before it came."""
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
        return TaskResponse(task, "failed", error=error)

    def _has_ended(self, task: str) -> None:
        self._open.pop(task, None)
        self.ended.append(task)

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
