"""Completes a task's response with what the task's record says: its decisions, model calls, context and traceback."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from runtime_core.errors import InvalidInput, WeftError
from runtime_core.integrations.aworld.task import CONTEXT_STEP, Task
from runtime_core.wire.events import TaskRecord, TaskResponse
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import Status

if TYPE_CHECKING:
    from runtime_core.state_manager.dead_letters import DeadLetters
    from runtime_core.trajectory.items import TrajectoryStrategy
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.store import TrajectoryStore
    from runtime_core.wire.step import Step

log = logging.getLogger(__name__)

RECORDED_SECONDS = 10.0
"""How long a response waits for the record of its task."""
POLL_SECONDS = 0.05
LETTERS = 100
"""How many dead letters of a task are searched for its traceback."""

ReadTask = Callable[[str], Awaitable["TaskTrajectory"]]
"""Returns the record of an ended task. Raises TimeoutError if it is not complete in time, and WeftError if its store
cannot be read."""


def strategy_of(value: object) -> TrajectoryStrategy:
    """Return the strategy that `conf.trajectory_strategy` names. Raises InvalidInput."""
    # Imported here: a task without a record does not need them.
    from runtime_core.trajectory import items

    named = {"default": items.DefaultTrajectoryStrategy, "memory": items.MemoryTrajectoryStrategy}
    found: object = items.DefaultTrajectoryStrategy if value is None else value
    if isinstance(value, str):
        found = named.get(value) or _imported(value)
    if inspect.isclass(found) and issubclass(found, items.TrajectoryStrategy):
        try:
            found = found()
        except TypeError as error:
            raise InvalidInput(
                "conf.trajectory_strategy", f"{value!r} needs arguments: pass an object ({error})"
            ) from None
    if not isinstance(found, items.TrajectoryStrategy):
        raise InvalidInput("conf.trajectory_strategy", f"{value!r} is not a TrajectoryStrategy: subclass it")
    for name in ("items", "keep", "build", "build_state", "build_action", "build_reward"):
        if inspect.iscoroutinefunction(getattr(found, name)):
            raise InvalidInput("conf.trajectory_strategy", f"{value!r} has async def {name}: write def {name}")
    return found


def _imported(text: str) -> object:
    module, _, name = text.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("conf.trajectory_strategy", f"{text!r} cannot be found: {error}") from error
    return found


async def completed(response: TaskResponse, task: Task, read: ReadTask) -> TaskResponse:
    """Return the response with the contents of the record.

    If the task's strategy raises, the task has failed, with that error and its traceback.
    """
    try:
        recorded = await read(task.id)
    except TimeoutError:
        log.warning("task %s: its record is not complete after %g s: the response has none", task.id, RECORDED_SECONDS)
        return response
    except WeftError as error:  # the task has ended, so its caller gets the response all the same
        log.warning("task %s: its record cannot be read, and the response has none: %s", task.id, error)
        return response
    record = dataclasses.replace(
        response.record or TaskRecord(), llm_calls=_model_calls(recorded), context=_context(recorded)
    )
    response = dataclasses.replace(response, record=record, error=_with_traceback(response, recorded))
    try:
        strategy = strategy_of(task.config.trajectory_strategy)
        record = dataclasses.replace(record, trajectory=list(strategy.items(recorded)))
        return dataclasses.replace(response, record=record)
    except Exception as error:  # the user's own strategy may raise anything
        log.exception("task %s: its trajectory strategy failed", task.id)
        logged = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        return dataclasses.replace(response, status=Status.FAILED, error=logged)


def _with_traceback(response: TaskResponse, recorded: TaskTrajectory) -> dict[str, str] | None:
    """Return the error with the traceback of the user's code, and log it."""
    if response.status != Status.FAILED or response.error is None:
        return response.error
    failed = [
        step.error
        for step in recorded.steps
        if step.error is not None and step.error.traceback and step.error.type == response.error.get("type")
    ]
    if not failed:
        return response.error
    # The deepest run is the one whose code raised; the others only waited for it.
    return _logged(response.task_id, response.error, failed[-1].traceback)


async def with_traceback_of_letter(response: TaskResponse, letters: DeadLetters) -> TaskResponse:
    """Return the response of a task without a record, with the traceback that its dead letter keeps; and log it."""
    from runtime_core.state_manager.dead_letters import LetterFilter

    if response.status != Status.FAILED or response.error is None:
        return response
    # Errors that an agent caught left older letters.
    for letter in await letters.newest(LETTERS, LetterFilter(task=response.task_id)):
        attempts = letter.without_secrets().errors
        last = attempts[-1] if attempts else {}
        if last.get("traceback") and last.get("type") == response.error.get("type"):
            logged = _logged(response.task_id, response.error, str(last["traceback"]))
            return dataclasses.replace(response, error=logged)
    return response


def _logged(task: str, error: dict[str, str], trace: str) -> dict[str, str]:
    """Return the error with its traceback, and log it."""
    log.error("task %s failed: %s: %s\n%s", task, error.get("type"), error.get("message"), trace)
    return {**error, "traceback": trace}


def _model_calls(recorded: TaskTrajectory) -> list[dict[str, Any]]:  # Any: JSON
    from runtime_core.wire.model_call import is_model_call

    agents = {step.run: step.name for step in recorded.steps if not step.step}
    calls = [step for step in recorded.steps if is_model_call(step)]
    calls.sort(key=lambda step: step.started)
    return [_model_call(step, agents.get(step.run, "")) for step in calls]


def _model_call(step: Step, agent: str) -> dict[str, Any]:  # Any: JSON
    from runtime_core.wire.model_call import answer_of, content_of, messages_of, tool_calls_of, usage_of

    answer = answer_of(step)
    return {
        "agent": agent,
        "run_id": step.run,
        "model": answer.model if answer is not None and answer.model else step.name,
        "messages": messages_of(step),
        "content": content_of(step),
        "tool_calls": tool_calls_of(step) or [],
        "usage": usage_of(step),
        "duration_ms": step.ended - step.started,
        "error": None if step.error is None else {"type": step.error.type, "message": step.error.message},
    }


def _context(recorded: TaskTrajectory) -> dict[str, Any]:  # Any: JSON
    from runtime_core.trajectory.tree import decoded

    found = [
        step for step in recorded.steps if step.run == ROOT_RUN and step.kind == "step" and step.name == CONTEXT_STEP
    ]
    values = decoded(found[-1].output) if found else {}
    return values if isinstance(values, dict) else {}


class StoreReader:
    """Reads records from the store of a recorder that is another process. Opens it once, at the first read."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._store: TrajectoryStore | None = None
        self._opening = asyncio.Lock()

    async def __call__(self, task: str) -> TaskTrajectory:
        """Wait until the task is recorded. Raises TimeoutError, StoreUnavailable and ConfigurationError."""
        from runtime_core.trajectory.store import TrajectoryStore

        async with asyncio.timeout(RECORDED_SECONDS):
            async with self._opening:
                if self._store is None:
                    self._store = await TrajectoryStore.open(self._url)
            while True:
                found = await self._store.task(self._namespace, task)
                if found is not None and found.complete:
                    return found
                await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Close the store if it was opened."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()


def checked_strategy(task: Task) -> None:
    """Raise InvalidInput for a strategy that cannot be used."""
    if task.config.trajectory_strategy is not None:
        try:
            strategy_of(task.config.trajectory_strategy)
        except WeftError:
            raise
        except Exception as error:
            raise InvalidInput(
                "conf.trajectory_strategy", f"{task.config.trajectory_strategy!r} cannot be made: {error}"
            ) from error
