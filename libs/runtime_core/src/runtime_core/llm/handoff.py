"""Handing over: the conversation goes to another agent, which answers in the place of the one that had it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime_core.agents.naming import Elsewhere
from runtime_core.llm.guards import MAX_HANDED, ConversationFailed
from runtime_core.llm.messages import Message, without_instructions
from runtime_core.llm.toolset import MESSAGE

if TYPE_CHECKING:
    from runtime_core.agents.asked import Asked as AskedStep
    from runtime_core.agents.context import AgentContext
    from runtime_core.llm.decision import DecidedCall


def hand_over(
    ctx: AgentContext,
    call: DecidedCall,
    arguments: dict[str, Any],  # Any: JSON
    messages: Sequence[Message],
    prompt: object,
    handed: Sequence[str],
) -> AskedStep[Any]:  # Any: the other agent's own JSON
    """A step: the answer of the agent that takes over. `handed` are those that have handed it over before.

    An agent that goes on with a conversation gets `messages`, which end with a request; any other the model's message,
    or else the prompt. Raises ConversationFailed where the conversation has gone round too often.
    """
    chain = [*handed, ctx.agent_name]
    if len(chain) > MAX_HANDED:
        way = " → ".join([*chain, call.name])
        raise ConversationFailed(
            "HandoffLimit",
            f"the conversation was handed over {MAX_HANDED} times without an answer, {way}: say in the agents' "
            "instructions who answers what",
        )
    given: object = arguments.get(MESSAGE) or prompt
    if call.goes_on:
        given = {"history": without_instructions(messages), "handed": chain}
    return ctx.agent(Elsewhere(call.name, call.pool), given)


def told(call: DecidedCall, arguments: dict[str, Any]) -> str:  # Any: JSON
    """What the conversation says of it, for the agent that goes on."""
    message = arguments.get(MESSAGE)
    said = f"The conversation is handed over to {call.name}, which answers now."
    return f"{said} {message}" if message else said
