"""What is to be done with an answer of the model: decided once, when it comes, and journaled with it.

Tools, their schemas, approval rules and the type of the output may be others after a deploy. What was decided by those
of the time when the answer came holds on, so that a conversation in flight goes on as it began.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.errors import WeftError
from runtime_core.llm.approval import Approve, Asking, asking
from runtime_core.llm.output import Output, OutputInvalid
from runtime_core.llm.toolset import Kind, Offered, Toolset, refusal

if TYPE_CHECKING:
    from runtime_core.llm.call import Answer, ToolCall

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
