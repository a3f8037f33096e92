"""Runs the hooks of one point in order. Each is a step, and its verdict decides what the next one gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime_core.declare.manifest import HookPoint
from runtime_core.declare.schema import encode
from runtime_core.errors import Denied, HookFailed, HumanTimeout, InvalidInput, Outcome, StepError, WeftError
from runtime_core.runs.calls import ApprovalQuestion
from runtime_core.runs.hooks.declared import (
    CallbackResultType,
    Change,
    Chosen,
    HookEvent,
    Selection,
    ToolResult,
    action_of,
    keys_of,
    recorded_callback,
    recorded_verdict,
)
from runtime_core.runs.journal import from_json
from runtime_core.runs.step import LocalStep, call_function
from runtime_core.wire import codec
from runtime_core.wire.ids import idempotency_key

if TYPE_CHECKING:
    from runtime_core.runs.hooks.declared import HookTable
    from runtime_core.runs.run import Run


logger = logging.getLogger(__name__)

MAX_BYTES = 4 * codec.MAX_DATA_BYTES
"""The limit of a hook's input, in bytes: a call's arguments and its result each have their own limit."""


class UndeclaredHook(WeftError):
    """No app in this process declares a hook or a callback that the run has."""


class Moment:
    """The facts about one point, without the payload, which each hook may change."""

    __slots__ = ("error", "input", "name", "notice", "objects", "point")

    def __init__(
        self,
        point: HookPoint,
        name: str,
        *,
        input: object = None,
        error: Mapping[str, str] | None = None,
        notice: bool = False,
        objects: bool = False,
    ) -> None:
        self.point = point
        self.name = name
        self.input = input
        self.error = error
        self.notice = notice
        """Whether hooks can only observe, because the event is already over."""
        self.objects = objects
        """Whether the payload must be a JSON object."""


class Subject(NamedTuple):
    """The run that hooks receive in their event: usually the run whose steps they are."""

    task_id: str
    run_id: str
    agent: str
    key: str
    attempt: int


class Pipeline:
    """Runs the hooks and callbacks of one run. `failed` is called with the point of each failed execution."""

    def __init__(self, run: Run, table: HookTable, failed: Callable[[str], None]) -> None:
        self._run = run
        self._table = table
        self._failed = failed
        self._raised: dict[str, BaseException] = {}
        """The errors of executions in this process, by step, for their tracebacks."""
        self.selection = Selection()
        self.subject = Subject(run.task_id, run.run_id, run.definition.name, run.key, run.attempt)

    async def fire(self, moment: Moment, payload: object) -> Any:  # Any: JSON of the point's own shape
        """Run the point's hooks and return the payload as they leave it. Raises Denied."""
        for chosen in self.selection.at(moment.point):
            payload = await self._one(moment, chosen, payload)
        return payload

    async def call_back(self, tool: str, arguments: Mapping[str, object], result: object) -> Any:  # Any: JSON
        """Run the callback of this call, if there is one. Return the result for the agent."""
        key = next((key for key in keys_of(tool, arguments) if key in self.selection.callbacks), None)
        if key is None:
            return result
        run = self._run
        data = encode({"tool": tool, "arguments": arguments, "result": result}, f"callback {key!r}", MAX_BYTES)
        step = LocalStep(run, run.flow.branch_here(f"callback {key!r}"), "callback", key, _no_body, data)
        step.body = partial(self._run_callback, key, tool, data, step.id)
        try:
            answer = await step
        except StepError as error:
            raised = self._raised.pop(step.id, None)
            if error.type == UndeclaredHook.__name__:
                return result
            raise _failure(f"callback {key!r}", error) from raised
        if answer["success"] and answer["type"] == CallbackResultType.OVERRIDE:
            return answer["result_data"]
        return result

    # ---- one hook ------------------------------------------------------------------------------------------

    async def _one(self, moment: Moment, chosen: Chosen, payload: object) -> object:
        run, point = self._run, moment.point
        what = f"hook {chosen.name!r} at {point}"
        event: dict[str, object] = {"point": str(point), "name": moment.name, "payload": payload}
        if moment.input is not None:
            event["input"] = moment.input
        if moment.error is not None:
            event["error"] = dict(moment.error)
        data = encode(event, f"the event of {what}", MAX_BYTES)
        branch = run.flow.branch_here(what)
        step = LocalStep(run, branch, "hook", chosen.name, _no_body, data)
        step.body = partial(self._run_hook, moment, chosen, what, data, step.id)
        try:
            verdict = await step
        except StepError as error:
            raised = self._raised.pop(step.id, None)
            # A deployment that removes a hook ends no run that still has it.
            if moment.notice or (not chosen.guard and error.type == UndeclaredHook.__name__):
                return payload
            if chosen.guard:
                raise Denied(f"{what} failed, so its action is denied: {error.type}: {error.message}") from error
            raise _failure(what, error) from raised
        match verdict:
            case {"verdict": "change", "payload": changed}:
                return changed
            case {"verdict": "deny", "reason": reason}:
                raise Denied(f"{what}: {reason}")
            case {"verdict": "ask"}:
                return await self._ask(moment, chosen, what, payload, verdict)
        return payload

    async def _ask(
        self, moment: Moment, chosen: Chosen, what: str, payload: object, asked: Mapping[str, Any]
    ) -> object:  # Any: JSON, see `recorded_verdict`
        run = self._run
        shown = {"hook": chosen.name, "point": str(moment.point), "name": moment.name, "payload": payload}
        question = ApprovalQuestion(
            run,
            run.flow.branch_here(what),
            asked["prompt"],
            data=encode(shown, f"the payload of {what}", MAX_BYTES),
            timeout_ms=None if asked["timeout"] is None else max(0, round(asked["timeout"] * 1000)),
            default=asked["default"],
        )
        try:
            approval = await question
        except HumanTimeout:
            raise Denied(f"{what} asked a human, and nobody answered in time") from None
        if approval.denied:
            raise Denied(f"{what} asked a human, who refused" + (f": {approval.reason}" if approval.reason else ""))
        if approval.verdict != "edit":
            return payload
        if moment.objects and not isinstance(approval.value, dict):
            raise Denied(f"{what} asked a human, whose edited value is not an object: {codec.quoted(approval.value)}")
        return approval.value

    async def _run_hook(self, moment: Moment, chosen: Chosen, what: str, data: bytes, step: str) -> object:
        """Run a hook once, live: the journal records its result or error."""
        run, subject = self._run, self.subject
        hook = self._table.find(moment.point, chosen.name)
        try:
            if hook is None:
                raise UndeclaredHook(
                    f"no app in this process declares {what}: include the app that does, or remove the name"
                )
            # A separate copy: a replay must not see the hook's changes to it.
            recorded = from_json(data)
            assert isinstance(recorded, dict)
            event = HookEvent(
                point=moment.point,
                task_id=subject.task_id,
                run_id=subject.run_id,
                agent=subject.agent,
                name=moment.name,
                payload=recorded["payload"],
                input=recorded.get("input"),
                error=recorded.get("error"),
                key=subject.key,
                session_id=run.meta.get("session_id", ""),
                metadata=run.meta.get("metadata", {}),
                attempt=subject.attempt,
                idempotency_key=f"{idempotency_key(run.task_id, run.run_id)}/{step}",
            )
            answer = await _limited(what, hook.timeout_seconds, hook.bound(), event, run)
            if moment.objects and isinstance(answer, Change) and not isinstance(answer.payload, dict):
                raise InvalidInput("payload", f"of Change must be an object, not {type(answer.payload).__name__}")
            return recorded_verdict(answer, what, notice=moment.notice)
        except BaseException as error:
            self._report(what, str(moment.point), step, error)
            raise

    async def _run_callback(self, key: str, tool: str, data: bytes, step: str) -> object:
        run = self._run
        what = f"callback {key!r}"
        callback = self._table.callback(key)
        try:
            if callback is None:
                raise UndeclaredHook(f"no app in this process declares {what} any more")
            recorded = from_json(data)
            assert isinstance(recorded, dict)
            result = ToolResult(
                tool_name=tool,
                action_name=action_of(recorded["arguments"]),
                arguments=recorded["arguments"],
                content=recorded["result"],
                task_id=run.task_id,
                run_id=run.run_id,
            )
            answer = await _limited(what, callback.timeout_seconds, callback.function, result, run)
            return recorded_callback(answer, what)
        except BaseException as error:
            self._report(what, "callback", step, error)
            raise

    def _report(self, what: str, point: str, step: str, error: BaseException) -> None:
        """Count and log a failed execution; the step's row has the details."""
        if isinstance(error, asyncio.CancelledError) and self._run.flow.stopping:
            return  # the run ends, not the hook
        self._raised[step] = error
        self._failed(point)
        whose, kind = self.subject, type(error).__name__
        logger.warning("%s failed in run %s of task %s: %s: %s", what, whose.run_id, whose.task_id, kind, error)


async def _limited(what: str, seconds: float, function: Callable[..., object], argument: object, run: Run) -> object:
    """Call the function within a limit. A sync one is abandoned in its thread. Raises the function's errors."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call_function(function, (argument,), {})
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} did not end within its timeout_seconds of {seconds:g}") from None
        raise
    except Outcome as error:
        # A hook must not decide how the whole attempt ends; raised here, this is a failure like any other.
        raise RuntimeError(f"{what} raised {type(error).__name__}: {error}; return Deny(reason) to refuse") from error


def _failure(what: str, error: StepError) -> HookFailed:
    """Return the error of a run whose hook `what` has failed."""
    named = error.message if error.message.startswith(what) else f"{what} failed: {error.message}"
    return HookFailed(error.type, named)


async def _no_body() -> object:
    raise AssertionError("the step has no body yet")
