"""The conversation of one run of an LLMAgent: pydantic-ai runs the loop, and Weft decides once what each call means.

The decision is made inside the model's step and journaled with the answer: which tool a call means, whether its
arguments are valid, whether it needs approval. pydantic-ai therefore has no tools until an answer arrives, and then the
decided ones.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.durable_exec import ModelRequestParams
from pydantic_ai.exceptions import (
    AgentRunError,
    ContentFilterError,
    ModelRetry,
    ToolFailed,
    UnexpectedModelBehavior,
    UserError,
)
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart, UserContent
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.output import NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.tools import ToolDefinition, ToolDenied
from pydantic_ai.toolsets import ExternalToolset, ToolsetTool
from pydantic_ai.usage import UsageLimits

from runtime_core.base.text import shortened
from runtime_core.declare.schema import encode
from runtime_core.declare.tool import StepTool
from runtime_core.errors import (
    AgentError,
    ConfigurationError,
    HumanTimeout,
    InvalidInput,
    InvalidResult,
    StepError,
    ToolError,
    WeftError,
)
from runtime_core.llm.agent import Approve, MatchedRule, ModelAgent, applicable_rule, matching_rules
from runtime_core.llm.attempt import messages_json, messages_of
from runtime_core.llm.client import LazyModel
from runtime_core.llm.failures import ConversationFailed
from runtime_core.llm.model_call import ConversationMemory
from runtime_core.llm.pydantic_ai.durability import (
    RepetitionGuard,
    RequestHooks,
    WeftDurability,
    arguments_of,
    run_agent,
)
from runtime_core.llm.tokens import Message
from runtime_core.llm.toolset import CONTENT, FINAL, MESSAGE, Kind, Toolset, refusal
from runtime_core.runs.guest import current_guest
from runtime_core.runs.policy import ask_among_peers
from runtime_core.runs.step import CallTarget
from runtime_core.wire import codec

if TYPE_CHECKING:
    from runtime_core.llm.input import AgentInput
    from runtime_core.llm.models import OpenModels
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.effects import Approval
    from runtime_core.runs.guest import Guest

log = logging.getLogger(__name__)


class DecidedCall(msgspec.Struct, omit_defaults=True):
    """The decision about one call of an answer, as journaled with it."""

    id: str
    kind: Kind = "tool"
    name: str = ""
    """The name in Weft; for an unknown tool, the name that the model used."""
    pool: str = ""
    wraps: bool = False
    goes_on: bool = False
    wrong: str = ""
    """Why the call is invalid, for the model; empty if it is valid."""
    ask: list[MatchedRule] = []
    """The rules that require approval."""


def decide(response: ModelResponse, toolset: Toolset, approvals: Sequence[Approve]) -> object:
    """Decide about an answer's calls. Never raises: the answer is paid for and must be journaled."""
    return msgspec.to_builtins([decide_call(part, toolset, approvals) for part in response.tool_calls])


def decide_call(part: ToolCallPart, toolset: Toolset, approvals: Sequence[Approve]) -> DecidedCall:
    """Return which tool a call means, why it is invalid, and which rules require approval."""
    name, offered = part.tool_name, toolset.find(part.tool_name)
    if offered is None:
        if name == toolset.output:
            return DecidedCall(part.tool_call_id, "output", name)
        known = ", ".join(spec.name for spec in toolset.specs) or "none"
        return DecidedCall(
            part.tool_call_id, name=name, wrong=f"there is no tool named {name!r}; the tools are: {known}"
        )
    decided = DecidedCall(
        part.tool_call_id, offered.kind, offered.name, offered.pool, wraps=offered.wraps, goes_on=offered.goes_on
    )
    arguments = arguments_of(part)
    if not isinstance(arguments, dict):
        decided.wrong = "the call was not made: its arguments are not a JSON object; call again with one"
        return decided
    try:
        offered.check(arguments)
        decided.ask = matching_rules(approvals, offered.wanted, arguments)
    except WeftError as error:
        decided.wrong = refusal(error)
    except Exception as error:  # schemas and types of the user may raise anything
        log.warning("could not check the arguments of %s %r", offered.kind, offered.name, exc_info=True)
        decided.wrong = refusal(error)
    return decided


MAX_REPORTED_ERRORS = 10
"""How many errors of an answer the model gets at once."""
MAX_HANDOFFS = 10
"""The most handoffs of one conversation."""
_OF_ONE_RUN = ("instructions", "run_id", "conversation_id")
"""Members of messages that are not passed on to the agent or task that continues the conversation."""
_contents: TypeAdapter[list[UserContent]] = TypeAdapter(list[UserContent])


@dataclass(slots=True)
class _AnswerCall:
    """One call of the latest answer."""

    arguments: dict[str, Any]  # Any: JSON
    decided: DecidedCall


class _HandOff(Exception):
    """Ends the conversation here: another agent takes it over."""

    def __init__(self, transfer: _AnswerCall, messages: Sequence[ModelMessage]) -> None:
        super().__init__(transfer.decided.name)
        self.transfer = transfer
        self.messages = messages_json(messages)


class Conversation(RequestHooks):
    """One run of an LLMAgent, which pydantic-ai has as its deps."""

    def __init__(self, ctx: AgentContext, definition: ModelAgent, asked: AgentInput) -> None:
        super().__init__(definition.agent.model)
        self._ctx = ctx
        self._definition = definition
        self._asked = asked
        self._guarding = RepetitionGuard(definition.what)
        self._memory = ConversationMemory(ctx, definition.agent.model, definition.agent.memory, definition.name)
        self._toolset = Toolset([])
        self._decided: object = None
        self._calls: dict[str, _AnswerCall] = {}
        """The calls of the latest answer, by id."""
        self._cost = 0.0
        self._transfer: _AnswerCall | None = None
        self._last: ModelResponse | None = None

    async def run(self, agent: Agent[Conversation, Any]) -> object:
        """Run the conversation and return the answer (JSON). Raises ConversationFailed and ModelFailed."""
        ctx, asked = self._ctx, self._asked
        # A separate branch, even for plain text, so that a deploy may turn the instructions into a function or change
        # its steps while conversations are running.
        [instructions] = await ctx.gather(self._instructed())
        before = asked.history if asked.history is not None else await self._memory.recall()
        prompt: Any = asked.prompt
        try:
            history = messages_of(_kept(before))
            if isinstance(prompt, list):
                prompt = _contents.validate_json(codec.encode(prompt))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise InvalidInput("input", f"is not a conversation: {first['msg']}") from None
        try:
            result = await run_agent(
                ctx,
                agent,
                prompt,
                deps=self,
                history=history,
                capabilities=[
                    WeftDurability(name=self._definition.name, calls=self),
                    self._guarding,
                    _ConversationHooks(),
                ],
                instructions=instructions or None,
                # `before` counts requests: a handoff must end the conversation before the limit applies.
                usage_limits=UsageLimits(request_limit=None),
            )
        except _HandOff as over:
            return await self._hand_over(over)
        except (AgentRunError, UserError) as error:
            raise self._ended(error) from error
        return await self._end(self._definition.dump(result.output), messages_json(result.all_messages()))

    async def _instructed(self) -> str:
        given: object = self._definition.agent.instructions
        if callable(given):
            given = given(self._ctx)
            if inspect.isawaitable(given):
                given = await given
            if not isinstance(given, str):
                raise ConfigurationError(
                    f"the instructions of {self._definition.what} returned {type(given).__name__}: return text"
                )
        return str(given)

    async def _end(self, result: object, messages: Sequence[Message]) -> object:
        await self._memory.remember(_kept(messages))
        return result

    def _ended(self, error: Exception) -> StepError:
        """Return the task's error for an error of pydantic-ai."""
        what, agent, last = self._definition.what, self._definition.agent, self._last
        if isinstance(error, ContentFilterError):
            refusal = ((last.provider_details if last is not None else None) or {}).get("refusal")
            said = f"the model of {what} refused to answer, or its provider filtered the answer"
            return ConversationFailed("ContentFiltered", f"{said}: {refusal}" if refusal else said)
        if not isinstance(error, UnexpectedModelBehavior):
            # A retry would fail in the same way.
            return AgentError(type(error).__name__, str(error))
        why = shortened(" ".join(str(error.__cause__ or error).split()), 1000)
        if last is not None and last.finish_reason == "length":
            why += "; the answer was cut off at max_tokens"
        if any(call.decided.kind != "output" for call in self._calls.values()):
            return ConversationFailed("ToolCallsInvalid", f"{what} called its tools wrongly: {why}")
        return ConversationFailed(
            "OutputInvalid",
            f"the answer of {what} is still invalid after {agent.output_retries + 1} attempts "
            f"(output_retries={agent.output_retries}): {why}",
        )

    # ---- requests and answers ------------------------------------------------------------------------------

    async def prepared(self, params: ModelRequestParams) -> ModelRequestParams:
        functions = self._ctx.functions
        manifests, limits = await self._ctx.manifests(), self._ctx.tool_limits
        self._toolset = self._definition.toolset(functions, manifests, self._asked, limits)
        self.decide = partial(decide, toolset=self._toolset, approvals=self._definition.agent.approval)
        tools = [
            ToolDefinition(name=spec.name, description=spec.description, parameters_json_schema=spec.arguments)
            for spec in self._toolset.specs
        ]
        parameters = replace(params.model_request_parameters, function_tools=tools)
        return replace(params, model_request_parameters=parameters)

    def answered(self, result: Mapping[str, Any]) -> None:
        self._decided = result.get("decided")

    def before(self, ctx: RunContext[Conversation]) -> None:
        """Check, before each request to the model, whether the conversation must end. Raises if so."""
        if self._transfer is not None:
            raise _HandOff(self._transfer, ctx.messages)
        limit, bound = self._definition.agent.max_turns, self._asked.info.get("max_steps")
        if isinstance(bound, int) and not isinstance(bound, bool) and bound > 0:
            limit = min(limit, bound)
        if ctx.run_step > limit:
            raise ConversationFailed(
                "TurnLimit",
                f"{self._definition.what} has not answered after max_turns={limit} model calls: raise it, or say "
                "in the instructions when to stop",
            )

    async def take(self, ctx: RunContext[Conversation], response: ModelResponse) -> None:
        """Give pydantic-ai the decided tools of an answer's calls."""
        parts = response.tool_calls
        decided = [] if self._decided is None else msgspec.convert(self._decided, list[DecidedCall])
        if [call.id for call in decided] != [part.tool_call_id for part in parts]:
            # A hook changed the answer.
            decided = [decide_call(part, self._toolset, self._definition.agent.approval) for part in parts]
        self._last, self._calls = response, {}
        tools = ctx.tool_manager.tools if ctx.tool_manager is not None else None
        assert tools is not None  # made for each request
        for part, each in zip(parts, decided, strict=True):
            arguments = arguments_of(part)
            self._calls[each.id] = _AnswerCall(arguments if isinstance(arguments, dict) else {}, each)
            if each.kind != "output":
                tools[part.tool_name] = _tool(part.tool_name, self._definition.agent.tool_retries)
        if any(rule.over is not None for each in decided for rule in each.ask):
            self._cost = (
                await self._guest().perform(
                    f"{self._definition.name}__usage",
                    lambda branch: _usage(self._ctx),
                    key=str(ctx.run_step),
                    order=2 * ctx.run_step + 1,
                )
            )["cost"]

    # ---- calls -----------------------------------------------------------------------------------------------

    def check(self, ctx: RunContext[Conversation]) -> None:
        """Raise ModelRetry for an invalid call, and ConversationFailed if the model does not correct it."""
        decided = self._call(ctx).decided
        if not decided.wrong:
            return
        why = decided.wrong
        if self._last is not None and self._last.finish_reason == "length":
            why += "; the answer was cut off at max_tokens"
        if ctx.retry >= (limit := self._definition.agent.tool_retries):
            raise ConversationFailed(
                "ToolCallsInvalid",
                f"{self._definition.what} called {decided.name} wrongly {ctx.retry + 1} times "
                f"(tool_retries={limit}); the last error: {why}",
            )
        raise ModelRetry(why)

    async def do(self, ctx: RunContext[Conversation]) -> object:
        """Make a call, after approval if it needs one. Return its result for the model."""
        call = self._call(ctx)
        decided, arguments = call.decided, call.arguments
        rule = applicable_rule(decided.ask, self._cost)
        if rule is not None:
            try:
                approval = await self._approval(ctx, call, rule)
            except HumanTimeout:
                return self._not_done("denied", "the call was not made: nobody approved it in time")
            if approval.denied:
                why = f": {approval.reason}" if approval.reason else ""
                return self._not_done("denied", f"the call was not made: a human denied it{why}")
            if approval.verdict == "edit":
                if not isinstance(approval.value, dict):
                    return self._not_done(
                        "denied", "the call was not made: the arguments that a human edited are not an object"
                    )
                arguments = call.arguments = approval.value
                edited = f"A human edited the arguments to {codec.quoted(arguments, 2000)}."
                self._guarding.note(decided.id, edited)
        if decided.kind == "transfer":
            return self._note_transfer(call)
        try:
            return await self._make(ctx, decided, arguments)
        except StepError as error:
            if isinstance(error, ToolError) and error.type == InvalidResult.__name__:
                raise  # the tool's code is wrong, which no model can fix
            return self._not_done("failed", str(error))

    async def _make(self, ctx: RunContext[Conversation], decided: DecidedCall, arguments: dict[str, Any]) -> object:
        guest, agent, there = self._guest(), self._definition.name, CallTarget(decided.name, decided.pool)
        # pydantic-ai waits for all calls of an answer before it continues.
        group, order = f"{ctx.run_id}/{ctx.run_step}", 2 * ctx.run_step + 1
        if decided.kind == "tool":
            given: object = {StepTool.ARGUMENT: arguments} if decided.wraps else arguments
            data = encode(given, f"arguments of tool {there.name!r}")
            label = f"{agent}__call:{there.name}"
            return await guest.tool(label, there.name, data, pool=there.pool, key=decided.id, group=group, order=order)
        given, label = arguments.get(CONTENT) if decided.wraps else arguments, f"{agent}__ask:{there.name}"
        peers = self._asked.names("peers")
        if there.name not in peers:
            return await guest.agent(label, there, given, key=decided.id, group=group, order=order)

        async def among_peers() -> object:
            return await ask_among_peers(self._ctx, there.name, given, peers)

        return await guest.perform(label, lambda branch: among_peers(), key=decided.id, order=order)

    async def _approval(self, ctx: RunContext[Conversation], call: _AnswerCall, rule: MatchedRule) -> Approval:
        agent, name = self._definition.name, call.decided.name
        verb = "hand off to" if call.decided.kind == "transfer" else "call"

        async def approve() -> Approval:
            return await self._ctx.approve(
                f"{agent} wants to {verb} {name}",
                data=call.arguments,
                timeout=rule.timeout_seconds,
                default=... if rule.default is None else rule.default,
            )

        order = 2 * ctx.run_step + 1
        approval = await self._guest().perform(
            f"{agent}__approve:{name}", lambda branch: approve(), key=call.decided.id, order=order
        )
        return cast("Approval", approval)

    def _not_done(self, outcome: str, why: str) -> object:
        if self._with_final():
            # With ModelRetry, pydantic-ai rejects the final answer of the same response.
            raise ModelRetry(why)
        if outcome == "denied":
            return ToolDenied(why)
        raise ToolFailed(why)

    def _with_final(self) -> bool:
        return any(call.decided.kind == "output" for call in self._calls.values())

    def _call(self, ctx: RunContext[Conversation]) -> _AnswerCall:
        return self._calls[ctx.tool_call_id or ""]

    @staticmethod
    def _guest() -> Guest:
        guest = current_guest()
        assert guest is not None  # a conversation always runs in one
        return guest

    # ---- handoffs --------------------------------------------------------------------------------------------

    def _note_transfer(self, call: _AnswerCall) -> object:
        every = [each for each in self._calls.values() if each.decided.kind == "transfer" and not each.decided.wrong]
        if call is not every[0]:
            return f"Not done: the conversation is handed off to {every[0].decided.name}."
        self._transfer = call
        message = call.arguments.get(MESSAGE)
        said = f"The conversation is handed off to {call.decided.name}, which answers now."
        said = f"{said} {message}" if message else said
        if self._with_final():
            raise ModelRetry(said)
        return said

    async def _hand_over(self, over: _HandOff) -> object:
        """Call the agent that takes over, and return its answer.

        An agent that can continue a conversation gets all of it, ending with a request. Any other agent gets the
        model's message, or else the prompt.
        """
        decided, asked = over.transfer.decided, self._asked
        message = over.transfer.arguments.get(MESSAGE)
        if decided.name in asked.names("handoffs"):
            # The swarm itself calls the next agent.
            return await self._end({"handoff": decided.name, "content": message or None}, over.messages)
        chain = [*asked.handed, self._ctx.agent_name]
        if len(chain) > MAX_HANDOFFS:
            raise ConversationFailed(
                "HandoffLimit",
                f"the conversation was handed off {MAX_HANDOFFS} times without an answer, "
                f"{' → '.join([*chain, decided.name])}: say in the agents' instructions who answers what",
            )
        given: object = message or asked.prompt
        if decided.goes_on:
            given = {"history": _kept(over.messages), "handed": chain}
        result: object = await self._ctx.agent(CallTarget(decided.name, decided.pool), given)
        said = result if isinstance(result, str) else codec.encode(result).decode()
        answer = {"kind": "response", "parts": [{"part_kind": "text", "content": said}]}
        return await self._end(result, [*over.messages, answer])


async def _usage(ctx: AgentContext) -> object:
    return await ctx.usage()


def _kept(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for an agent or task that continues the conversation with its own instructions."""
    return [{name: part for name, part in message.items() if name not in _OF_ONE_RUN} for message in messages]


# ---- the agent for pydantic-ai -----------------------------------------------------------------------------------


def agent_of(definition: ModelAgent, models: OpenModels) -> Agent[Conversation, Any]:
    """Return an LLMAgent as an agent of pydantic-ai."""
    spec = definition.agent
    made: Agent[Conversation, Any] = Agent(
        LazyModel(models.open, spec.model),
        name=definition.name,
        deps_type=Conversation,
        output_type=_output_type(spec.output, spec.output_mode),
        model_settings=cast("Any", dict(spec.model.settings)) or None,  # a TypedDict of theirs
        retries={"tools": spec.tool_retries, "output": spec.output_retries},
    )
    if spec.output is None:
        made.output_validator(_not_empty)
    return made


def _output_type(declared: object, mode: str) -> Any:  # Any: the user's type, known at run time only
    given: Any = declared
    if given is None:
        return str
    if mode == "native":
        return NativeOutput(given, name=FINAL)
    return PromptedOutput(given) if mode == "text" else ToolOutput(given, name=FINAL)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ModelRetry("the answer is empty: answer again")
    return text


class _ConversationHooks(AbstractCapability[Conversation]):
    """Connects pydantic-ai's hooks to the conversation of the run."""

    async def before_model_request(
        self, ctx: RunContext[Conversation], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        ctx.deps.before(ctx)
        return request_context

    async def after_model_request(
        self, ctx: RunContext[Conversation], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        await ctx.deps.take(ctx, response)
        return response

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Conversation],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],  # Any: JSON
        handler: object,
    ) -> Any:  # Any: the tool's own JSON
        return await ctx.deps.do(ctx)

    async def on_output_validate_error(
        self,
        ctx: RunContext[Conversation],
        *,
        output_context: object,
        output: object,
        error: ValidationError | ModelRetry,
    ) -> Any:  # Any: never, it raises
        # Bound the size of the corrections that the model gets.
        raise ModelRetry(_problems(error)) if isinstance(error, ValidationError) else error


def _problems(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)
    lines = []
    for each in found[:MAX_REPORTED_ERRORS]:
        where = ".".join(("output", *(str(part) for part in each["loc"])))
        got = "" if each["type"] == "missing" else f", got {codec.quoted(each['input'])}"
        lines.append(shortened(f"{where}: {' '.join(each['msg'].split())}{got}", 300))
    if len(found) > MAX_REPORTED_ERRORS:
        lines.append(f"and {len(found) - MAX_REPORTED_ERRORS} more")
    return f"the answer is invalid: {'; '.join(lines)}; correct it and answer again"


class _NoValidator:
    """Validates nothing: a call's arguments were checked when the answer arrived."""

    def validate_json(self, input: object, **_: object) -> dict[str, Any]:
        return {}

    validate_python = validate_json


_TOOLS: ExternalToolset[Conversation] = ExternalToolset([])
"""The toolset of these tools, for errors."""


def _tool(name: str, retries: int) -> ToolsetTool[Conversation]:
    return ToolsetTool(
        toolset=_TOOLS,
        tool_def=ToolDefinition(name=name),
        max_retries=retries,
        args_validator=cast("Any", _NoValidator()),
        args_validator_func=lambda ctx: ctx.deps.check(ctx),
    )
