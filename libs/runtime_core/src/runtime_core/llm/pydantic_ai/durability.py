"""The capability that performs a pydantic-ai agent's model requests, tool calls and approvals as durable steps.

It does nothing outside a durable run, so you can run and test an agent that has it like any other.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

from opentelemetry.trace import NoOpTracer
from pydantic import TypeAdapter
from pydantic_ai import FunctionToolset, RunContext
from pydantic_ai.agent import AbstractAgent, EventStreamHandler
from pydantic_ai.capabilities import AbstractCapability, WrapToolExecuteHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    BoundDurableOperation,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationId,
    DurableRunContext,
    DynamicToolsetCallToolParams,
    JournalCallableOperationBackend,
    JournalOperationNamer,
    ModelRequestId,
    ModelRequestParams,
    OperationConfigRole,
    ParameterTransports,
    ToolsetCallToolId,
    ToolsetCallToolParams,
    conversation_id_from_run_id,
    replay_scope,
    revalidate_function_call,
)
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.messages import AgentStreamEvent, ModelMessage, ModelResponse, ToolCallPart, ToolReturn
from pydantic_ai.models import Model, ModelResolutionContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved, ToolDefinition, ToolDenied
from pydantic_core import to_jsonable_python

from runtime_core.declare.schema import encode
from runtime_core.errors import Denied, InvalidInput, ToolError
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.attempt import Decide, label_of, messages_of, request_json, with_tools
from runtime_core.llm.client import CURRENT_CALL, CallState, LazyModel, show, shown_url, with_key
from runtime_core.llm.failures import ConversationFailed, Endpoint
from runtime_core.llm.model_call import ModelRequest
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Approval
from runtime_core.runs.guest import Guest, current_guest, host
from runtime_core.telemetry.spans import within
from runtime_core.wire import codec

CARRIED = "weft.run"
"""The member next to the arguments. No Python parameter can have this name."""
SETTINGS = "weft"
"""The key of a tool's metadata that holds its ToolSettings; False there: the tool runs between the steps."""
OWN_TOOLSET = "<agent>"
"""pydantic-ai's id for the tools of the agent itself."""
_LIVE = frozenset(
    {
        "available_tool_names",
        "active_capability_ids",
        "_deferred_capability_ids",
        "_tool_names_by_kind",
        "_anchored_evidence",
        "deadline",
    }
)
"""Fields of a run context that another version of the code may change: they must not be part of a call's digest."""

definitions: TypeAdapter[ToolDefinition] = TypeAdapter(ToolDefinition)

ENGINE = DurabilityEngineSpec(
    engine_name="Weft",
    durable_unit_noun="step",
    durable_container_noun="run",
    codec=JSON_CODEC,
    # A toolset connects inside the step that needs it, never between steps.
    toolset_lifecycles={"function": "enter-never", "mcp": "enter-never", "dynamic": "enter-never"},
    tool_config_key=SETTINGS,
)


def tool_name(agent: str, operation: ToolsetCallToolId, tool: str) -> str:
    """Return the name of the event's tool. It is persisted with runs that wait for it."""
    toolset = operation.toolset_id
    if operation.toolset_kind != "function":
        return f"{agent}.{toolset}"
    return f"{agent}.{tool}" if toolset == OWN_TOOLSET else f"{agent}.{toolset}.{tool}"


def event_data(
    operation: ToolsetCallToolId, params: ToolsetCallToolParams | DynamicToolsetCallToolParams, deps: object
) -> bytes:
    """Return a tool event as JSON. Raises InvalidInput for arguments that JSON cannot represent."""
    carried: dict[str, Any] = {"context": _context_of(params.ctx)}  # Any: JSON
    if deps is not None:
        carried["deps"] = deps
    definition = params.tool_def if isinstance(params, DynamicToolsetCallToolParams) else None
    if operation.toolset_kind == "mcp" and isinstance(params, ToolsetCallToolParams) and params.tool is not None:
        definition = params.tool.tool_def
    arguments = params.tool_args
    if operation.toolset_kind != "function":
        carried["tool"] = params.name
        if definition is not None:
            carried["definition"] = definitions.dump_python(definition, mode="json")
    if CARRIED in arguments:
        raise InvalidInput(f"arguments.{CARRIED}", "is a reserved name: rename the tool's parameter")
    try:
        plain = to_jsonable_python({**arguments, CARRIED: carried})
    except ValueError as error:
        raise InvalidInput(f"arguments of {params.name}", str(error)) from error
    return encode(plain, f"arguments of tool {params.name!r}")


def _context_of(ctx: RunContext[Any]) -> dict[str, Any]:  # Any: JSON
    """Return the fields of the run context to send, with the same bytes at each replay."""
    carried = {name: value for name, value in DurableRunContext.serialize_run_context(ctx).items() if name not in _LIVE}
    for name, value in carried.items():
        if isinstance(value, set | frozenset):
            carried[name] = sorted(value)
        elif name == "usage":  # omit the zeros, which are its defaults
            carried[name] = {part: number for part, number in to_jsonable_python(value).items() if number}
    return carried


class Revalidating(ParameterTransports):
    """Validates arguments again with the tool's schema, because they were sent as JSON."""

    async def prepare_function_call(
        self, toolset: FunctionToolset[Any], params: ToolsetCallToolParams
    ) -> ToolsetCallToolParams:
        return await revalidate_function_call(toolset, params, engine_spec=ENGINE)


WARN_AT = 3
"""From this number of equal calls in a row, the model gets a warning."""
FAIL_AT = 6
"""The number of equal calls in a row that ends the conversation."""


class StepConfig:
    """The configuration of operations: only whether a tool is one. The app has the tools' settings."""

    def base(self, role: OperationConfigRole, *, operation_id: DurableOperationId) -> dict[str, Any]:
        return {}

    def for_tool(
        self, role: OperationConfigRole, *, operation_id: DurableOperationId, tool: object | None, tool_name: str
    ) -> dict[str, Any] | Literal[False]:
        metadata = getattr(getattr(tool, "tool_def", None), "metadata", None) or {}
        return False if metadata.get(SETTINGS) is False else {}


class StepBackend(JournalCallableOperationBackend[dict[str, Any]]):
    """Performs operations as steps of the run that hosts the calling code."""

    parameter_transports = Revalidating()

    def __init__(self, owner: WeftDurability) -> None:
        super().__init__(agent_name=owner.name, default_model_id=owner.default_model_id, config=StepConfig())
        self.owner = owner
        self._names = JournalOperationNamer(owner.name, default_model_id=owner.default_model_id or "default")
        self.tools: dict[ToolsetCallToolId, DurableOperation[Any, Any, Any]] = {}
        """The operations that call tools, for the tool-handler."""

    def bind(self, operation: DurableOperation[Any, Any, Any]) -> BoundDurableOperation[Any, Any, Any]:
        match operation.operation_id:
            case ToolsetCallToolId() as operation_id:
                self.tools[operation_id] = operation
                return _Bound(operation, partial(self._call_tool, operation, operation_id))
            case ModelRequestId() as operation_id:
                name = self._names.operation_name(operation_id)
                return _Bound(operation, partial(self._ask_model, operation, name))
        return super().bind(operation)

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: dict[str, Any],
    ) -> object:
        """Perform any other operation, as a step in this process."""
        guest = self._guest()
        if guest is None:
            return await body()
        inside = contextvars.copy_context()
        context = next((part for part in cache_key if isinstance(part, RunContext)), None)
        key = "" if context is None else str(context.tool_call_id or "")
        order = 0 if context is None else 2 * context.run_step

        async def once() -> object:
            async def run() -> object:
                return await body()

            return await asyncio.get_running_loop().create_task(run(), context=inside.copy())

        async def work() -> object:
            return await guest.ctx.step(once, name=name)

        return await guest.perform(name, lambda branch: work(), key=key, order=order)

    async def _call_tool(
        self,
        operation: DurableOperation[Any, Any, Any],
        operation_id: ToolsetCallToolId,
        params: ToolsetCallToolParams | DynamicToolsetCallToolParams,
    ) -> Any:
        guest = self._guest()
        if guest is None:
            return operation.result_codec.load(operation.result_codec.dump(await operation.handler(params)))
        name = self._names.invocation_name(operation_id, label=params.name).operation_name
        declared = tool_name(self.owner.name, operation_id, params.name)
        known = guest.ctx.functions.tool(declared)
        try:
            payload = await guest.tool(
                name,
                declared,
                event_data(operation_id, params, self.owner.carried_deps),
                pool=known.pool if known is not None else "",
                key=str(params.ctx.tool_call_id or ""),
                # pydantic-ai waits for all calls of a response before it continues.
                group=f"{params.ctx.run_id}/{params.ctx.run_step}",
                order=2 * params.ctx.run_step + 1,
            )
        except Denied as error:
            raise ToolFailed(error.message) from error
        except ToolError as error:
            if error.type != "UnknownOutcome":
                raise
            # The call may have taken effect: let the model decide what follows.
            raise ToolFailed(error.message) from error
        return operation.result_codec.load(payload)

    async def _ask_model(
        self, operation: DurableOperation[Any, Any, Any], name: str, params: ModelRequestParams
    ) -> Any:
        guest = self._guest()
        if guest is None:
            return operation.result_codec.load(operation.result_codec.dump(await operation.handler(params)))
        ctx, calls, inside = guest.ctx, self.owner.calls, contextvars.copy_context()

        async def work() -> Mapping[str, Any]:
            prepared = await calls.prepared(params)
            sender = _OperationSender(ctx, calls.settings, operation, prepared, inside)
            asking = ModelRequest(
                ctx, calls.settings, sender.request, sender, name=name, decide=calls.decide, left_out=calls.left_out
            )
            try:
                return await asking.answer()
            finally:
                calls.left_out = asking.left_out

        result = await guest.perform(
            name,
            lambda branch: work(),
            # Without the task's id, so that a fork finds the answers.
            key=str(params.run_context.run_id).removeprefix(_run_prefix(guest)),
            order=2 * params.run_context.run_step,
        )
        calls.answered(result)
        return operation.result_codec.load(result["message"])

    @staticmethod
    def _guest() -> Guest | None:
        return current_guest()


class _Bound:
    """An operation and the function that performs it."""

    def __init__(self, operation: DurableOperation[Any, Any, Any], perform: Callable[[Any], Awaitable[Any]]) -> None:
        self._operation = operation
        self._perform = perform

    @property
    def operation(self) -> DurableOperation[Any, Any, Any]:
        return self._operation

    async def __call__(self, params: Any, *, config: object | None = None) -> Any:
        return await self._perform(params)


class _OperationSender:
    """Sends an agent's request through pydantic-ai's operation for it, in the context of the calling code."""

    def __init__(
        self,
        ctx: AgentContext,
        settings: ModelSettings,
        operation: DurableOperation[ModelRequestParams, Any, Any],  # Any: as journaled
        params: ModelRequestParams,
        context: contextvars.Context,
    ) -> None:
        self._models = ctx.functions.models
        self._settings = settings
        self._operation = operation
        self._params = params
        self._context = context
        self._model = cast("Any", params.run_context.model)  # always a Model: realtime sessions have no runs
        label = str(self._model.model_name) if settings.model is None else label_of(settings.model)
        self.request = request_json(params.messages, label, params.model_settings, params.model_request_parameters)
        self.traced = not isinstance(params.run_context.tracer, NoOpTracer)

    async def endpoint(self, named: str | None) -> Endpoint:
        if self._settings.model is None:
            return Endpoint(self._model.system, named or self._model.model_name, shown_url(self._model.base_url))
        opened = await self._models.open_or_fail(self._settings, named)
        self._model = opened.model
        return cast(Endpoint, opened.endpoint)

    async def send(
        self, request: Mapping[str, Any], settings: Mapping[str, Any], live: CallState
    ) -> tuple[ModelResponse, object]:
        params = replace(self._params, model_settings=with_key(settings, self._model, live))
        # A window or a hook changed the messages.
        if request["messages"] != self.request["messages"]:
            params = replace(params, messages=messages_of(request["messages"]))
        if request.get("tools") != self.request.get("tools"):
            parameters = with_tools(params.model_request_parameters, request.get("tools", ()))
            params = replace(params, model_request_parameters=parameters)
        if live.named is not None:
            params = replace(params, model_id=live.named)
        inside = self._context.copy()
        inside.run(CURRENT_CALL.set, live)

        async def body() -> tuple[ModelResponse, object]:
            with within(live.traceparent):
                response = await self._operation.handler(params)
                return response, self._operation.result_codec.dump(response)

        return await asyncio.get_running_loop().create_task(body(), context=inside)


class RequestHooks:
    """Settings of an agent's model requests, with hooks that an LLMAgent's conversation overrides."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.decide: Decide | None = None
        self.left_out = 0
        """How many messages the window left out of the latest request."""

    async def prepared(self, params: ModelRequestParams) -> ModelRequestParams:
        """Return the request to make. Runs on the run's own loop and takes no steps."""
        return params

    def answered(self, result: Mapping[str, Any]) -> None:
        """Take note of the journaled result."""


class RepeatedCalls:
    """Counts repeated calls in one run. It counts journaled calls, so a replay counts the same."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last: tuple[str, bytes] = ("", b"")
        self._in_a_row = 0

    def called(self, name: str, arguments: object) -> str:
        """Count a call and return a warning for the model, usually empty. Raises ConversationFailed."""
        this = (name, codec.canonical(arguments))
        self._in_a_row = self._in_a_row + 1 if this == self._last else 1
        self._last = this
        if self._in_a_row >= FAIL_AT:
            raise ConversationFailed(
                "RepeatedCall",
                f"{self._what} called {name} {FAIL_AT} times in a row with the same arguments: say in its instructions "
                "when to stop, or let the tool say why nothing changes",
            )
        if self._in_a_row < WARN_AT:
            return ""
        return (
            f"You have made this call {self._in_a_row} times in a row with the same arguments. Use the results that "
            f"you have, or try something else: the conversation ends after {FAIL_AT} times."
        )


class RepetitionGuard(AbstractCapability[Any]):
    """Warns a model that repeats the same call, and then ends the conversation. One instance per run."""

    def __init__(self, what: str) -> None:
        self._guards = RepeatedCalls(what)
        self._notes: dict[str, list[str]] = {}
        """Notes for the model that accompany a result, by the call's id."""

    def note(self, call: str, text: str) -> None:
        self._notes.setdefault(call, []).append(text)

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: WrapToolExecuteHandler,
    ) -> Any:
        if call.tool_call_id not in self._notes:  # pydantic-ai executes an approved call a second time
            warning = self._guards.called(call.tool_name, arguments_of(call))
            self._notes[call.tool_call_id] = [warning] if warning else []
        try:
            result = await handler(args)
        except ToolFailed as error:
            if notes := self._notes[call.tool_call_id]:
                raise ToolFailed(" ".join([*notes, error.message])) from error
            raise
        notes = self._notes[call.tool_call_id]
        if not notes or isinstance(result, ToolReturn | ToolDenied):
            return result
        return {"note": " ".join(notes), "result": result}


def arguments_of(part: ToolCallPart) -> dict[str, Any] | str:
    """Return the arguments of a call, or its text if it is not a JSON object."""
    given = part.args
    if isinstance(given, dict):
        return given
    if given is None or not given.strip():
        return {}
    try:
        read = codec.decode(given.encode())
    except (InvalidInput, UnicodeEncodeError):
        return given
    return read if isinstance(read, dict) else given


async def run_agent(
    ctx: AgentContext,
    agent: AbstractAgent[Any, Any],
    prompt: Any,
    *,
    history: Sequence[ModelMessage],
    threads: Executor | None = None,
    **more: Any,  # Any: arguments of pydantic-ai's `run`
) -> AgentRunResult[Any]:
    """Run an agent of pydantic-ai in the run. `threads` execute sync functions between the steps."""

    async def converse(guest: Guest) -> AgentRunResult[Any]:
        # An instrumented agent must not create spans again for work that an earlier process did.
        with (
            agent.using_thread_executor(threads) if threads is not None else nullcontext(),
            replay_scope(is_replaying=lambda: guest.replaying),
        ):
            return await agent.run(prompt, message_history=history or None, **more)

    return cast("AgentRunResult[Any]", await host(ctx, converse))


class WeftDurability(BaseDurabilityCapability[Any]):
    """Performs an agent's requests as steps of its durable run.

    `carried_deps` is JSON from which other processes create the agent's deps.
    """

    engine_spec: ClassVar[DurabilityEngineSpec] = ENGINE

    def __init__(self, *, name: str, calls: RequestHooks, carried_deps: object = None) -> None:
        super().__init__(name=name)
        self.calls = calls
        self.carried_deps = carried_deps
        self._stream = calls.settings.stream
        self._backend: StepBackend | None = None
        self._runs = 0

    @property
    def in_durable_context(self) -> bool:
        return current_guest() is not None

    def get_durable_operation_backend(self) -> StepBackend:
        # pydantic-ai binds a copy of this capability to each agent.
        if self._backend is None or self._backend.owner is not self:
            self._backend = StepBackend(self)
        return self._backend

    def get_default_run_id(self) -> str | None:
        guest = current_guest()
        if guest is None:
            return None
        self._runs += 1
        return f"{_run_prefix(guest)}{guest.id}" + (f"/{self._runs}" if self._runs > 1 else "")

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    @property
    def has_wrap_run_event_stream(self) -> bool:
        return super().has_wrap_run_event_stream or (self._stream and self.in_durable_context)

    def _model_stream_event_handler(self) -> EventStreamHandler[Any] | None:
        handler = super()._model_stream_event_handler()
        if not self._stream:
            return handler

        async def handle(context: RunContext[Any], stream: AsyncIterable[AgentStreamEvent]) -> None:
            shown = show(stream)
            if handler is not None:
                await handler(context, shown)
            async for _ in shown:
                pass

        return handle

    async def resolve_model_id(self, ctx: ModelResolutionContext[Any], *, model_id: str) -> Model | None:
        known = await super().resolve_model_id(ctx, model_id=model_id)
        if known is None and isinstance(ctx.agent.model, LazyModel):
            return ctx.agent.model.named(model_id)
        return known

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Any], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Ask a human for each approval, and for the result of each external call."""
        guest = current_guest()
        if guest is None:
            return None
        asked = [*(("approve", part) for part in requests.approvals), *(("answer", part) for part in requests.calls)]
        answers = await asyncio.gather(*(_question(guest, self.name, ctx.run_step, *each) for each in asked))
        results = DeferredToolResults()
        for (kind, part), answer in zip(asked, answers, strict=True):
            if kind == "answer":
                results.calls[part.tool_call_id] = answer
            elif isinstance(answer, Approval):
                results.approvals[part.tool_call_id] = _verdict(answer)
        return results


def _run_prefix(guest: Guest) -> str:
    return f"{guest.ctx.task_id}/{guest.ctx.run_id}/"


async def _question(guest: Guest, agent: str, run_step: int, kind: str, part: ToolCallPart) -> object:
    arguments = part.args_as_dict()
    shown = {"tool": part.tool_name, "arguments": arguments}

    async def work(ctx: AgentContext) -> object:
        if kind == "approve":
            return await ctx.approve(f"May {agent} call {part.tool_name}?", data=shown)
        return await ctx.human(f"{agent} is waiting for the result of {part.tool_name}", data=shown)

    name = f"{agent}__{kind}:{part.tool_name}"
    answer: object = await guest.perform(
        name, lambda branch: work(guest.ctx), key=part.tool_call_id, order=2 * run_step + 1
    )
    return answer


def _verdict(approval: Approval) -> bool | ToolApproved | ToolDenied:
    if approval.denied:
        return ToolDenied(approval.reason) if approval.reason else False
    if approval.verdict != "edit":
        return True
    edited = approval.value
    if isinstance(edited, dict) and isinstance(edited.get("arguments"), dict):
        edited = edited["arguments"]
    return ToolApproved(override_args=edited if isinstance(edited, dict) else None)
