"""The hook points around a run, around its agent's actions, and at the end of a task that does not complete.

A task may end by an error, a limit, a cancel, or a process that dies repeatedly. The function that writes the end also
starts a task for the agent of ends in this file. So these hooks run once for each end, even if no process runs the
task's own code any more, and they survive crashes like every task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.settle import RetryAt, decide, failure_of
from runtime_core.declare.declaration import Place, RetryPolicy
from runtime_core.declare.manifest import AFTER_FAILED_TASK, HookPoint, agent_of_ends
from runtime_core.declare.schema import Schema, encode
from runtime_core.errors import Denied, InvalidInput, ToolError, WeftError
from runtime_core.runs.branches import Compound
from runtime_core.runs.calls import ApprovalQuestion, Emit, QuestionStep, approval_of, call, read_result
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import AgentDefinition, Coro
from runtime_core.runs.effects import Approval
from runtime_core.runs.hooks.declared import Selection, settle
from runtime_core.runs.hooks.pipeline import Moment, Pipeline, Subject
from runtime_core.runs.journal import from_json
from runtime_core.runs.model_step import MAX_REQUEST_BYTES, ModelStep
from runtime_core.runs.ports import Reserve
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import ErrorText

if TYPE_CHECKING:
    from runtime_core.declare.schema import Reader
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.effects import AnswerType
    from runtime_core.runs.hooks.declared import HookTable
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch

_BEFORE_TASK = (
    HookPoint.TASK_CREATED,
    HookPoint.SESSION_STARTED,
    HookPoint.USER_INPUT_RECEIVED,
    HookPoint.PRE_TASK_CALL,
)
_AFTER_TASK = (
    HookPoint.POST_TASK_CALL,
    HookPoint.OUTPUT_PROCESS,
    HookPoint.TASK_COMPLETED,
    HookPoint.SESSION_FINISHED,
)


class DeclaredRunHooks:
    """The hooks of one run. A run without hooks has None instead.

    `named` are the hooks that the task's context names. `entry` returns the id of the current delivery. `failed` is
    called with the point of each failed execution.
    """

    def __init__(
        self,
        run: Run,
        table: HookTable,
        named: Mapping[str, Iterable[str]],
        *,
        retry: RetryPolicy,
        entry: Callable[[], str],
        failed: Callable[[str], None],
    ) -> None:
        self._run = run
        self._table = table
        self._named = named
        self._retry = retry
        self._entry = entry
        self._pipeline = Pipeline(run, table, failed)
        self._running = False
        """Whether the hooks have seen the agent start but not stop."""

    # ---- around the run ------------------------------------------------------------------------------------

    async def around(self, data: bytes) -> object:
        """Run the agent on the input in `data` (JSON), with the points of its run and, in the root run, of its task."""
        run = self._run
        await self._settle()
        if not self._pipeline.selection.hooks:
            return await self._agent(data)
        is_task = run.run_id == ROOT_RUN
        try:
            payload = given = from_json(data)
            for point in (*(_BEFORE_TASK if is_task else ()), HookPoint.AGENT_STARTED):
                payload = await self._fire(point, self._label(point), payload)
            if payload is not given:
                data = encode(payload, "the input that a hook has changed")
            self._running = True
            result = await self._agent(data)
            return await self._ended(result, payload, is_task)
        except Exception as error:
            await self._failed(error)
            raise

    async def _settle(self) -> None:
        self._pipeline.selection = await settle(self._run, self._table, self._named)

    async def _agent(self, data: bytes) -> object:
        run = self._run
        return await run.definition.start(AgentContext(run), run.definition.decode_input(data))

    async def _ended(self, result: object, given: object, is_task: bool) -> object:
        points = (HookPoint.AGENT_STOPPED, *(_AFTER_TASK if is_task else ()))
        if not any(self._pipeline.selection.at(point) for point in points):
            return result
        output = before = from_json(self._run.definition.encode_output(result))
        self._running = False
        for point in points:
            output = await self._fire(point, self._label(point), output, input=given)
        return result if output is before else output

    async def _failed(self, error: Exception) -> None:
        """Run this run's hooks if the attempt was the last one. The task's hooks run after its end, in ended.py."""
        if not self._running:
            return
        run = self._run
        failed = failure_of(error)
        if isinstance(decide(run.attempt, self._retry, failed, _no_chance), RetryAt):
            return
        # Numbered by the delivery: another attempt, or one after a redrive, may fail elsewhere or differently and
        # must not find the steps of this one.
        run.flow.branch_here("hooks").move(f"e{self._entry().replace('-', '_')}.")
        failure = {"type": failed.type, "message": failed.message}
        point = HookPoint.AGENT_STOPPED
        await self._pipeline.fire(Moment(point, self._label(point), error=failure, notice=True), None)

    def _label(self, point: HookPoint) -> str:
        run = self._run
        if point is HookPoint.OUTPUT_PROCESS:
            return "output"
        return run.meta.get("session_id", "") if point.startswith("session_") else run.definition.name

    # ---- around the agent's actions ------------------------------------------------------------------------
    # Each returns None if no hook runs around the step: the caller then takes the step itself.

    def tool(
        self, branch: Branch, name: str, data: bytes, pool: str, reader: Reader | None = None
    ) -> Compound[Any] | None:  # Any: the tool's own result
        selection = self._pipeline.selection
        if not selection.callbacks and not any(map(selection.at, _AROUND_TOOL)):
            return None
        return Compound(self._run, branch, f"tool {name}", self._tool(name, data, pool, reader))

    async def _tool(self, name: str, data: bytes, pool: str, reader: Reader | None) -> object:
        run = self._run
        given = from_json(data)
        arguments = await self._fire(HookPoint.BEFORE_TOOL_CALL, name, given, objects=True)
        if arguments is not given:
            data = encode(arguments, f"arguments of tool {name!r}, which a hook has changed")
        try:
            result = await call(run, run.flow.branch_here("ctx.tool"), "tool", name, data=data, pool=pool)
        except ToolError as error:
            failure = {"type": error.type, "message": error.message}
            moment = Moment(HookPoint.TOOL_CALL_FAILED, name, error=failure, notice=True)
            await self._pipeline.fire(moment, arguments)
            raise
        result = await self._pipeline.call_back(name, arguments, result)
        result = await self._fire(HookPoint.AFTER_TOOL_CALL, name, result, input=arguments)
        return result if reader is None else read_result(reader, "tool", name, encode(result, "result"))

    def model(
        self,
        branch: Branch,
        name: str,
        request: object,
        function: Callable[..., object],
        identity: object,
        reserve: Reserve | None,
    ) -> Compound[Any] | None:  # Any: the model's JSON
        if not any(map(self._pipeline.selection.at, _AROUND_MODEL)):
            return None
        return Compound(self._run, branch, f"model {name}", self._model(name, request, function, identity, reserve))

    async def _model(
        self, name: str, request: object, function: Callable[..., object], identity: object, reserve: Reserve | None
    ) -> object:
        run = self._run
        given = from_json(encode(request, "request of ctx.model", MAX_REQUEST_BYTES))
        changed = await self._fire(HookPoint.BEFORE_LLM_CALL, name, given)
        if changed is not given:
            request = changed
        here = run.flow.branch_here("ctx.model")
        result = await ModelStep(run, here, name, request, function, identity=identity, reserve=reserve)
        return await self._fire(HookPoint.AFTER_LLM_CALL, name, result, input=changed)

    def emit(self, branch: Branch, data: bytes, name: str) -> Compound[None] | None:
        if not self._pipeline.selection.at(HookPoint.OUTPUT_PROCESS):
            return None
        return Compound(self._run, branch, name, self._emit(data, name))

    async def _emit(self, data: bytes, name: str) -> None:
        run = self._run
        value = await self._fire(HookPoint.OUTPUT_PROCESS, name, from_json(data))
        await Emit(run, run.flow.branch_here("ctx.emit"), encode(value, "value of ctx.emit"), name)

    def human(
        self,
        branch: Branch,
        prompt: str,
        data: bytes,
        timeout_ms: int | None,
        default: bytes | None,
        expected: AnswerType | None,
    ) -> Compound[Any] | None:  # Any: of the question's type, or the human's JSON
        if not any(map(self._pipeline.selection.at, _AROUND_HUMAN)):
            return None
        return Compound(self._run, branch, "human", self._human(prompt, data, timeout_ms, default, expected))

    async def _human(
        self, prompt: str, data: bytes, timeout_ms: int | None, default: bytes | None, expected: AnswerType | None
    ) -> object:
        run = self._run
        prompt, data = await self._shown(prompt, data)
        here = run.flow.branch_here("ctx.human")
        step = QuestionStep(
            run, here, prompt, data=data, timeout_ms=timeout_ms, default=default, expected=expected, as_json=True
        )
        answer = await self._fire(HookPoint.HUMAN_ANSWERED, prompt, await step, input=from_json(data))
        return answer if expected is None else expected.read(encode(answer, "answer"))

    def approve(
        self, branch: Branch, prompt: str, data: bytes, timeout_ms: int | None, default: bool | None
    ) -> Compound[Approval] | None:
        if not any(map(self._pipeline.selection.at, _AROUND_HUMAN)):
            return None
        return Compound(self._run, branch, "approve", self._approve(prompt, data, timeout_ms, default))

    async def _approve(self, prompt: str, data: bytes, timeout_ms: int | None, default: bool | None) -> Approval:
        run = self._run
        prompt, data = await self._shown(prompt, data)
        here = run.flow.branch_here("ctx.approve")
        approval = await ApprovalQuestion(run, here, prompt, data=data, timeout_ms=timeout_ms, default=default)
        answer = {"verdict": approval.verdict, "value": approval.value, "reason": approval.reason}
        changed = await self._fire(HookPoint.HUMAN_ANSWERED, prompt, answer, input=from_json(data))
        if changed is answer:
            return approval
        try:
            return approval_of(changed, from_json(data))
        except InvalidInput as error:
            raise Denied(f"a hook at {HookPoint.HUMAN_ANSWERED} has changed the answer: {error.message}") from None

    async def _shown(self, prompt: str, data: bytes) -> tuple[str, bytes]:
        """Return the prompt and data for the human, as changed by the hooks."""
        given = {"prompt": prompt, "data": from_json(data)}
        shown = await self._fire(HookPoint.HUMAN_REQUESTED, prompt, given, objects=True)
        if shown is given:
            return prompt, data
        changed = encode(shown.get("data"), "data of a question, which a hook has changed")
        return str(shown.get("prompt", prompt)), changed

    def listens(self, point: HookPoint) -> bool:
        return bool(self._pipeline.selection.at(point))

    def at(self, branch: Branch, point: HookPoint, name: str, payload: bytes) -> Compound[Any]:  # Any: JSON
        """Return a step that runs the hooks of a point named by the agent's code."""
        return Compound(self._run, branch, f"hook {point}", self._fire(point, name, from_json(payload)))

    async def _fire(
        self, point: HookPoint, name: str, payload: Any, *, input: object = None, objects: bool = False
    ) -> Any:  # Any: JSON of the point's own shape
        return await self._pipeline.fire(Moment(point, name, input=input, objects=objects), payload)


def failed_entry(steps: Iterable[str]) -> str:
    """Return the newest delivery that failed permanently, from the steps of its hooks; empty if there is none."""
    return max((step[1:].partition(".")[0] for step in steps if step.startswith("e")), default="").replace("_", "-")


_AROUND_TOOL = (HookPoint.BEFORE_TOOL_CALL, HookPoint.AFTER_TOOL_CALL, HookPoint.TOOL_CALL_FAILED)
_AROUND_MODEL = (HookPoint.BEFORE_LLM_CALL, HookPoint.AFTER_LLM_CALL)
_AROUND_HUMAN = (HookPoint.HUMAN_REQUESTED, HookPoint.HUMAN_ANSWERED)


def _no_chance() -> float:
    return 0.0


END_HOOKS_SECONDS = 3600.0
"""The limit for all hooks of one end together, in seconds; each has its own `timeout_seconds`."""


class EndForHooks(msgspec.Struct):
    """The end of a task, as `shared/hooks.lua` describes it."""

    task_id: str
    agent: str
    key: str
    status: str
    error: ErrorText
    attempt: int = 1
    selection: Selection | None = None
    """The hooks that the task's run started with; None if it never started."""


_ENDED = msgspec.json.Decoder(EndForHooks)


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


class HooksOfEnd(DeclaredRunHooks):
    """Runs the hooks of a task that has ended, in the run of `TaskEnded`. They can only observe."""

    async def around(self, data: bytes) -> object:
        """Run the hooks for the end that `data` (JSON) describes."""
        ended = self._run.definition.decode_input(data)
        assert isinstance(ended, EndForHooks)  # the result of TaskEnded.decode_input
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
