"""The hooks of tasks that end without completing.

A task may end by an error, a limit, a cancel, or a process that dies repeatedly. The function that writes the end also
starts a task for the agent in this file. So the hooks run once for each end, even if no process runs the task's own
code any more, and they survive crashes like every task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.declaration import Place, RetryPolicy
from runtime_core.declare.hook_points import AFTER_FAILED_TASK
from runtime_core.declare.manifest import agent_of_ends
from runtime_core.declare.schema import Schema
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.hooks.around import RunHooks
from runtime_core.hooks.declared import Selection
from runtime_core.hooks.pipeline import Moment, Subject
from runtime_core.ids import ROOT_RUN
from runtime_core.runs.definition import AgentDefinition, Coro

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

END_HOOKS_SECONDS = 3600.0
"""The limit for all hooks of one end together, in seconds; each has its own `timeout_seconds`."""


class Failure(msgspec.Struct):
    """The error as a hook receives it; its writer may add more fields, such as the time."""

    type: str = ""
    message: str = ""


class Ended(msgspec.Struct):
    """The end of a task, as `shared/hooks.lua` describes it."""

    task_id: str
    agent: str
    key: str
    status: str
    error: Failure
    attempt: int = 1
    selection: Selection | None = None
    """The hooks that the task's run started with; None if it never started."""


_ENDED = msgspec.json.Decoder(Ended)


def ended_task(input: bytes) -> str:
    """Return the id of the task whose hooks run with this input."""
    return _ENDED.decode(input).task_id


class TaskEnded(AgentDefinition):
    """The agent that runs an app's hooks of ended tasks. `HooksOfEnd` has its code."""

    def __init__(self, app: str) -> None:
        super().__init__(
            agent_of_ends(app),
            TaskEnded,
            Place(__file__, 0),
            retry=RetryPolicy(),
            timeout_seconds=END_HOOKS_SECONDS,
            description="Runs the hooks of tasks that have failed or were cancelled.",
        )

    def decode_input(self, data: bytes) -> object:
        try:
            return _ENDED.decode(data)
        except msgspec.DecodeError as error:
            raise InvalidInput("input", f"does not say how a task ended: {error}") from None

    def start(self, ctx: AgentContext, value: object) -> Coro:
        raise WeftError(f"only HooksOfEnd runs {self.what}")

    def input_schema(self) -> Schema:
        return {"type": "object"}

    def output_schema(self) -> Schema | None:
        return None


class HooksOfEnd(RunHooks):
    """Runs the hooks of a task that has ended, in the run of `TaskEnded`. They can only observe."""

    async def around(self, data: bytes) -> object:
        """Run the hooks for the end that `data` (JSON) describes."""
        ended = self._run.definition.decode_input(data)
        assert isinstance(ended, Ended)  # the result of TaskEnded.decode_input
        if ended.selection is not None:
            self._pipeline.selection = ended.selection
        else:
            await self._settle()
        self._pipeline.subject = Subject(ended.task_id, ROOT_RUN, ended.agent, ended.key, ended.attempt)
        error = {"type": ended.error.type, "message": ended.error.message}
        for point in AFTER_FAILED_TASK:
            name = self._run.meta.get("session_id", "") if point.startswith("session_") else ended.agent
            await self._pipeline.fire(Moment(point, name, error=error, notice=True), None)
        return None


async def until_end_hooks_ran(bus: EventBus, streams: Iterable[str], app: str) -> None:
    """Wait until the hooks of all ended tasks have run, before a caller stops the last process that could run them."""
    own = agent_of_ends(app).encode()

    async def open_in(stream: str) -> bool:
        entries = pairs(await bus.transport.call("XRANGE", bus.keys.stream(stream), "-", "+"))
        # Each run is one entry until it ends: these runs never wait.
        return any(own in fields[1].split(b"\n") for _, fields in entries)

    for stream in streams:
        while await open_in(stream):  # noqa: ASYNC110  # the broker does not notify of a settled entry
            await asyncio.sleep(0.005)
