"""Decides what each call of a model's answer means: which tool, whether it is valid, whether it needs approval."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from pydantic_ai.messages import ModelResponse, ToolCallPart

from runtime_core.errors import WeftError
from runtime_core.llm.agent import Approve, MatchedRule, matching_rules
from runtime_core.llm.pydantic_ai.durability import arguments_of
from runtime_core.llm.toolset import Kind, Toolset, refusal

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
