"""Runners and swarms as durable agents: `weft.task` runs tasks by TaskRunner, `weft.task.<name>` by one of your own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from runtime_core.aworld.described import (
    TASK_AGENT,
    Description,
    agent_of_runner,
    read_description,
    task_of,
)
from runtime_core.aworld.handles import Surroundings
from runtime_core.aworld.orchestration import orchestration
from runtime_core.aworld.runner import Runner
from runtime_core.aworld.swarm import Swarm
from runtime_core.declare.declaration import Place, checked_name
from runtime_core.declare.retry_policy import RetryPolicy
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
from runtime_core.runs.definition import AgentDefinition, Coro
from runtime_core.runs.policy import Observation, ObservingAgent

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

BETWEEN_TRIES = RetryPolicy(jitter=0.0)
"""How long the tries of a task with `max_retry_count` wait for each other."""
TURN_SECONDS = 3600.0
_FINAL = (InvalidInput, LimitExceeded, ConfigurationError, Reject, TaskCancelled)
"""What another try would only repeat."""


class RunnerDefinition(AgentDefinition):
    """A runner's class as an agent, whose input describes a task and whose output is the task's answer."""

    def __init__(
        self,
        runner: type[Runner],
        place: Place,
        *,
        name: str | None = None,
        pool: str = "",
        timeout_seconds: float = TURN_SECONDS,
    ) -> None:
        """`name` is what tasks call the runner by; None: the class's own name."""
        if not (inspect.isclass(runner) and issubclass(runner, Runner)):
            raise ConfigurationError(f"runner at {place}: {runner!r} is not a subclass of Runner")
        if inspect.isabstract(runner):
            raise ConfigurationError(f"runner {runner.__name__} ({place}) lacks do_run: write async def do_run")
        own = checked_name("runner", name, runner, place)
        super().__init__(
            agent_of_runner(runner) if name is None else f"{TASK_AGENT}.{own}",
            runner,
            place,
            # A task says itself how often it is tried again.
            retry=RetryPolicy(attempts=1),
            pool=pool,
            timeout_seconds=timeout_seconds,
            description=inspect.cleandoc(runner.__doc__ or ""),
        )
        self.runner = runner

    def __eq__(self, other: object) -> bool:
        """One runner under one name is one declaration, however many apps have made it."""
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
            # A program that is run as a script calls its own module so.
            if asked != own and "__main__" not in (asked.partition(".")[0], own.partition(".")[0]):
                raise InvalidInput("input.runner", f"{asked!r} is asked for, but this app has {own!r}: add that runner")
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
                # A branch for each try: where one fails in code outside of steps, the next finds its own places.
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
        task.surroundings = Surroundings(ctx, _tools(ctx), said)
        response = await self.runner(task).run()
        if response.success:
            answer: object = response.output
            return answer.content if isinstance(answer, Observation) else answer
        error = response.error or {}
        if response.status == "cancelled":
            raise TaskCancelled(error.get("type") or "Cancelled", error.get("message", ""))
        # An end that the runner has chosen: it is answered, and no dead letter is kept.
        raise AgentError(error.get("type") or "TaskFailed", error.get("message", ""))


class SwarmDefinition(ObservingAgent):
    """A swarm as an agent: its input is the first observation, its output that of its last agent."""

    def __init__(self, name: str, swarm: Swarm, place: Place, *, pool: str = "") -> None:
        if not isinstance(swarm, Swarm):
            raise ConfigurationError(f"swarm {name!r} ({place}): {swarm!r} is not a Swarm")
        super().__init__(
            name,
            swarm,
            place,
            retry=RetryPolicy(attempts=1),
            pool=pool,
            timeout_seconds=TURN_SECONDS,
            description=repr(swarm),
        )
        self.swarm = swarm

    async def observe(self, ctx: AgentContext, observation: Observation) -> object:
        bound = Surroundings(ctx, ()).swarm(self.swarm)
        return await orchestration(ctx, bound, max_steps=100, endless_threshold=3).run(observation)


def _tools(ctx: AgentContext) -> list[str]:
    from runtime_core.app.registry import Functions

    return list(ctx.functions.tools.view) if isinstance(ctx.functions, Functions) else []
