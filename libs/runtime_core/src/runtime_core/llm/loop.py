"""The conversation of one run: ask the model, do what it calls, until it answers. Each decision is recorded."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core import codec
from runtime_core.errors import ConfigurationError, HumanTimeout, InvalidResult, StepError, ToolError, WeftError
from runtime_core.llm.approval import Approve, Asking, asked_at, asking
from runtime_core.llm.budget import ConversationFailed, Guards
from runtime_core.llm.messages import (
    Message,
    Outcome,
    Part,
    request,
    response,
    result_part,
    user_part,
    with_instructions,
    without_instructions,
)
from runtime_core.llm.output import Output, OutputInvalid, told_as_text
from runtime_core.llm.toolset import CONTENT, MESSAGE, Kind, Offered, Toolset, hand_over, refusal, told
from runtime_core.runs.handoff import ask_among_peers
from runtime_core.runs.step import Elsewhere
from runtime_core.tools.tool import StepTool

if TYPE_CHECKING:
    from runtime_core.llm.definition import ModelAgent
    from runtime_core.llm.input import Asked
    from runtime_core.llm.model_call import Answer, ToolCall
    from runtime_core.runs.context import AgentContext


log = logging.getLogger(__name__)


class DecidedCall(msgspec.Struct, omit_defaults=True):
    """One call of an answer, in the answer's order."""

    id: str
    kind: Kind = "tool"
    name: str = ""
    """In Weft; where the call cannot be made, the name that the model used."""
    pool: str = ""
    wraps: bool = False
    goes_on: bool = False
    wrong: str = ""
    """Why the call cannot be made, for the model; empty: it can."""
    ask: list[Asking] = []
    """The rules by which a human is asked first."""


class Decided(msgspec.Struct, omit_defaults=True):
    """What is done with an answer."""

    calls: list[DecidedCall] = []
    problems: list[str] = []
    """What is wrong with a final answer that was given as text."""


def decide(answer: Answer, toolset: Toolset, output: Output | None, approvals: Sequence[Approve]) -> object:
    """Decide on an answer: a `Decided`, as JSON. Raises nothing: the answer is paid for, and must be journaled."""
    calls = [_decide(call, toolset, output, approvals) for call in answer.tool_calls]
    return msgspec.to_builtins(Decided(calls, [] if calls else _problems(answer.text, toolset, output)))


def decided_of(answer: Answer) -> Decided | None:
    """What was journaled with an answer; None where that is not of these calls, since a hook has changed them."""
    if answer.decided is None:
        return None
    found = msgspec.convert(answer.decided, Decided)
    return found if [call.id for call in found.calls] == [call.id for call in answer.tool_calls] else None


def _decide(call: ToolCall, toolset: Toolset, output: Output | None, approvals: Sequence[Approve]) -> DecidedCall:
    offered = toolset.find(call.name)
    if offered is None:
        known = ", ".join(spec.name for spec in toolset.specs) or "none"
        return DecidedCall(call.id, name=call.name, wrong=f"there is no tool named {call.name!r}; there are: {known}")
    decided = DecidedCall(
        call.id, offered.kind, offered.name, offered.pool, wraps=offered.wraps, goes_on=offered.goes_on
    )
    if not isinstance(call.arguments, dict):
        decided.wrong = "the call was not made: its arguments are not a JSON object; call again with one"
        return decided
    try:
        _check(offered, call.arguments, output)
        if offered.kind != "output":
            decided.ask = asking(approvals, offered.wanted, call.arguments)
    except OutputInvalid as error:
        decided.wrong = _retold(error)
    except WeftError as error:
        decided.wrong = refusal(error)
    except Exception as error:  # a schema from anywhere, a type of the user's own: they may fail in any way
        log.warning("the arguments of %s %r could not be checked", offered.kind, offered.name, exc_info=True)
        decided.wrong = refusal(error)
    return decided


def _check(offered: Offered, arguments: dict[str, Any], output: Output | None) -> None:  # Any: JSON
    if offered.kind != "output":
        offered.check(arguments)
    elif output is not None:
        output.read(arguments)


def _problems(text: str, toolset: Toolset, output: Output | None) -> list[str]:
    if output is None:
        return [] if text.strip() else ["the answer is empty"]
    try:
        output.read(text)
    except OutputInvalid as error:
        tool = toolset.output_name()
        return [f"the answer was given as text: give it by calling {tool}"] if tool else error.problems
    except Exception as error:  # a type of the user's own may fail in any way
        log.warning("the answer could not be read as its output", exc_info=True)
        return [str(error)]
    return []


def _retold(error: OutputInvalid) -> str:
    return "the answer is not of the right form: " + "; ".join(error.problems) + "; correct it and answer again"


MESSAGES = "messages"
"""Where an instance with a key keeps its conversation, in `ctx.state`."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What came of one call, as the model is told."""

    content: object
    outcome: Outcome = "success"


@dataclass(slots=True)
class _Call:
    """One call of an answer, with what was decided of it."""

    edge: str
    """The name that the model used."""
    arguments: dict[str, Any]  # Any: JSON
    decided: DecidedCall
    note: str = ""
    """What the model is told beside the result."""
    result: _Result | None = None


class Conversation:
    """One run of a model's agent."""

    def __init__(self, ctx: AgentContext, definition: ModelAgent, asked: Asked) -> None:
        agent = definition.agent
        self._ctx = ctx
        self._definition = definition
        self._agent = agent
        self._asked = asked
        self._instructions = ""
        self._messages: list[Message] = []
        self._guards = Guards(definition.what, tool_retries=agent.tool_retries, output_retries=agent.output_retries)

    async def run(self) -> object:
        """The answer (JSON). Raises ConversationFailed, and ModelFailed of a model that gives no answer."""
        # Here, and not above: it brings what a process without models does not need.
        from runtime_core.llm.model_call import ask_model

        await self._begin()
        output = self._definition.output
        for number in range(1, self._max_turns() + 1):
            functions = self._ctx.functions
            toolset = self._definition.toolset(functions, await self._ctx.manifests(), self._asked)
            decides = partial(decide, toolset=toolset, output=output, approvals=self._agent.approval)
            answer = await ask_model(
                self._ctx,
                self._agent.model,
                self._messages,
                tools=toolset.specs,
                output=None if output is None else output.spec,
                number=number,
                decide=decides,
            )
            self._messages.append(answer.message)
            decided = decided_of(answer) or msgspec.convert(decides(answer), Decided)
            ended, result = await (self._turn(answer, decided) if answer.tool_calls else self._said(answer, decided))
            if ended:
                return result
        raise ConversationFailed(
            "TurnLimit",
            f"{self._definition.what} has not answered after max_turns={self._max_turns()} model calls: raise it, or "
            "say in the instructions when to stop",
        )

    # ---- the beginning and the end -----------------------------------------------------------------------

    async def _begin(self) -> None:
        # A place of its own in the run, also for plain text: so that instructions may become a function, or take other
        # steps, while conversations are in flight.
        [self._instructions] = await self._ctx.gather(self._instructed())
        asked = self._asked
        before = asked.history if asked.history is not None else self._remembered()
        if asked.prompt is None:
            self._messages = with_instructions(before, self._instructions)
        else:
            said = user_part(asked.prompt, self._ctx.now())
            self._messages = [*before, request([said], self._instructions)]

    async def _instructed(self) -> str:
        given: object = self._agent.instructions
        if callable(given):
            given = given(self._ctx)
            if inspect.isawaitable(given):
                given = await given
            if not isinstance(given, str):
                raise ConfigurationError(
                    f"the instructions of {self._definition.what} are {type(given).__name__}: return text"
                )
        output = self._definition.output
        if output is not None and output.spec.mode == "text":
            given = f"{given}\n\n{told_as_text(output.spec)}".strip()
        return str(given)

    def _remembered(self) -> list[Message]:
        return list(self._ctx.state.get(MESSAGES, ())) if self._ctx.key else []

    def _end(self, result: object, *last: Message) -> tuple[bool, object]:
        if self._ctx.key:
            self._ctx.state[MESSAGES] = without_instructions([*self._messages, *last])
        return True, result

    def _max_turns(self) -> int:
        bound = self._asked.info.get("max_steps")
        own = self._agent.max_turns
        return min(own, bound) if isinstance(bound, int) and not isinstance(bound, bool) and bound > 0 else own

    # ---- an answer without calls -------------------------------------------------------------------------

    async def _said(self, answer: Answer, decided: Decided) -> tuple[bool, object]:
        if not decided.problems:
            output = self._definition.output
            return self._end(answer.text if output is None else output.read(answer.text))
        if answer.finish_reason == "content_filter":
            refusal = (answer.message.get("provider_details") or {}).get("refusal")
            raise ConversationFailed(
                "ContentFiltered",
                f"the model of {self._definition.what} has refused to answer, or its provider has filtered the answer"
                + (f": {refusal}" if refusal else ""),
            )
        why = "; ".join(decided.problems)
        if answer.finish_reason == "length":
            why += "; it was cut off at max_tokens"
        self._guards.wrong_output(why)
        self._messages.append(request([user_part(f"{why}. Answer again.", self._ctx.now())], self._instructions))
        return False, None

    # ---- an answer with calls ----------------------------------------------------------------------------

    async def _turn(self, answer: Answer, decided: Decided) -> tuple[bool, object]:
        calls = [
            _Call(call.name, call.arguments if isinstance(call.arguments, dict) else {}, of_call)
            for call, of_call in zip(answer.tool_calls, decided.calls, strict=True)
        ]
        cut = answer.finish_reason == "length"
        for call in calls:
            self._count(call, cut)
        await self._do([call for call in calls if call.result is None and call.decided.kind != "output"])
        transfer = next((call for call in calls if call.decided.kind == "transfer" and call.result is None), None)
        if transfer is not None:
            return await self._hand_over(transfer, calls)
        final = next((call for call in calls if call.decided.kind == "output" and call.result is None), None)
        others_failed = any(call.result is not None and call.result.outcome != "success" for call in calls)
        if final is not None and not others_failed:
            output = self._definition.output
            assert output is not None  # whose tool was called
            return self._end(output.read(final.arguments), self._results(calls, "This is the final answer."))
        self._messages.append(
            self._results(calls, "The answer is not taken, since another call has failed: answer again.")
        )
        return False, None

    def _count(self, call: _Call, cut: bool) -> None:
        """Let the guards see a call. What cannot be made has its result by that."""
        decided = call.decided
        if decided.wrong:
            why = decided.wrong + ("; the answer was cut off at max_tokens" if cut else "")
            if decided.kind == "output":
                self._guards.wrong_output(why)
            else:
                self._guards.wrong(decided.name, why)
            call.result = _Result(why, "retried")
        elif decided.kind in ("tool", "agent"):
            call.note = self._guards.called(decided.name, call.arguments)

    async def _do(self, calls: list[_Call]) -> None:
        """Do all calls at once, and give each its result; a transfer that may be made has none."""
        ctx = self._ctx
        cost = 0.0
        if any(rule.over is not None for call in calls for rule in call.decided.ask):
            cost = (await ctx.usage())["cost"]
        parts: dict[int, Awaitable[object]] = {}
        for place, call in enumerate(calls):
            rule = asked_at(call.decided.ask, cost)
            if rule is not None:
                parts[place] = self._approved(call, rule.timeout_seconds, rule.default)
            elif call.decided.kind != "transfer":
                parts[place] = self._step(call, call.arguments)
        if not parts:
            return
        found = await ctx.gather(*parts.values(), return_exceptions=True)
        for place, value in zip(parts, found, strict=True):
            call = calls[place]
            if isinstance(value, ToolError) and value.type == InvalidResult.__name__:
                raise value  # the tool's code is wrong: no model can do anything about it
            if isinstance(value, StepError):
                call.result = _Result(self._noted(call, str(value)), "failed")
            elif isinstance(value, BaseException):
                raise value
            elif isinstance(value, _Result):
                call.result = value
            elif value is not _GO:
                call.result = _Result(self._noted(call, value))

    def _step(self, call: _Call, arguments: dict[str, Any]) -> Awaitable[Any]:  # Any: JSON
        ctx, decided = self._ctx, call.decided
        there = Elsewhere(decided.name, decided.pool)
        if decided.kind == "agent":
            given: object = arguments.get(CONTENT) if decided.wraps else arguments
            peers = self._asked.names("peers")
            if decided.name in peers:
                return ask_among_peers(ctx, decided.name, given, peers)
            return ctx.agent(there, given)
        if decided.wraps:
            return ctx.tool(there, **{StepTool.ARGUMENT: arguments})
        return ctx.tool(there, **arguments)

    async def _approved(self, call: _Call, timeout: float | None, default: bool | None) -> object:
        """Ask a human, then make the call: its result, with what was edited; or what the model is told instead."""
        ctx, name = self._ctx, call.decided.name
        verb = "hand over to" if call.decided.kind == "transfer" else "call"
        try:
            approval = await ctx.approve(
                f"{self._definition.name} wants to {verb} {name}",
                data=call.arguments,
                timeout=timeout,
                default=... if default is None else default,
            )
        except HumanTimeout:
            return _Result("the call was not made: nobody has approved it in time", "denied")
        if approval.denied:
            why = f": {approval.reason}" if approval.reason else ""
            return _Result(f"the call was not made: a human has denied it{why}", "denied")
        edited = approval.verdict == "edit"
        if edited and not isinstance(approval.value, dict):
            return _Result("the call was not made: a human has edited its arguments to no object", "denied")
        arguments = approval.value if edited else call.arguments
        if edited:
            call.note = f"{call.note} A human has edited the arguments to {codec.quoted(arguments, 2000)}.".strip()
        if call.decided.kind == "transfer":
            call.arguments = arguments
            return _GO
        return _Result(self._noted(call, await self._step(call, arguments)))

    @staticmethod
    def _noted(call: _Call, content: object) -> object:
        return {"note": call.note, "result": content} if call.note else content

    def _results(self, calls: list[_Call], of_others: str) -> Message:
        """The request that tells the model what came of its calls, in their order."""
        at = self._ctx.now()
        parts: list[Part] = []
        for call in calls:
            result = call.result or _Result(of_others)
            parts.append(result_part(call.edge, call.decided.id, result.content, at, result.outcome))
        return request(parts, self._instructions)

    async def _hand_over(self, transfer: _Call, calls: list[_Call]) -> tuple[bool, object]:
        asked, target = self._asked, transfer.decided.name
        transfer.result = _Result(told(transfer.decided, transfer.arguments))
        self._messages.append(self._results(calls, f"Not done: the conversation is handed over to {target}."))
        if target in asked.names("handoffs"):
            # The swarm asks the next one itself.
            return self._end({"handoff": target, "content": transfer.arguments.get(MESSAGE) or None})
        result = await hand_over(
            self._ctx, transfer.decided, transfer.arguments, self._messages, asked.prompt, asked.handed
        )
        said = result if isinstance(result, str) else codec.encode(result).decode()
        return self._end(result, response(said))


_GO = object()
"""A transfer was approved."""
