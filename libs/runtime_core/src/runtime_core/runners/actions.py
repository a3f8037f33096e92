"""What an agent's actions become: steps that call tools and agents, and what the agent sees afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from runtime_core.errors import AgentError, StepError
from runtime_core.runners.handles import Surroundings
from runtime_core.runners.tools import call_tool
from runtime_core.runners.values import ActionModel, ActionResult, Observation, handoff_in

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext

MAX_HANDOFFS = 100
"""How often the peers of a team may hand over before one of them answers."""


async def act(
    ctx: AgentContext, actions: Sequence[ActionModel], *, team: Sequence[str] = (), peers: Sequence[str] = ()
) -> list[ActionResult]:
    """Do all actions at once; their results in the same order. An action that fails is a result, not an error.

    A `tool_name` stands for an agent where it is in `team`, or is an agent's and no tool's; else for a tool. Agents of
    `peers` may hand over to one another.
    """
    surroundings = Surroundings(ctx, ())
    found = await ctx.gather(*(_step(surroundings, action, team, peers) for action in actions), return_exceptions=True)
    return [_result(action, result) for action, result in zip(actions, found, strict=True)]


def _step(
    surroundings: Surroundings, action: ActionModel, team: Sequence[str], peers: Sequence[str]
) -> Awaitable[object]:
    functions, name = surroundings.functions, action.tool_name
    if name in peers:
        return ask_among_peers(surroundings, name, content_of(action), peers)
    if name in team or (functions.tool(name) is None and functions.agent(name) is not None):
        return surroundings.agent(name).run(Observation(content_of(action)))
    with_action = f"{name}__{action.action_name}"
    if action.action_name and functions.tool(with_action) is not None:
        name = with_action
    return call_tool(surroundings.ctx, name, action.params)


async def ask_among_peers(surroundings: Surroundings, name: str, content: object, peers: Sequence[str]) -> object:
    """The answer of an agent, or of the peer that it hands over to."""
    asked = ""
    for _ in range(MAX_HANDOFFS):
        others = [peer for peer in peers if peer != name]
        output: object = await surroundings.agent(name).run(Observation(content, asked), info={"handoffs": others})
        handoff = handoff_in(output)
        if handoff is None:
            return output
        if handoff.handoff not in others:
            raise AgentError(
                "UnknownHandoff", f"agent {name!r} hands over to {handoff.handoff!r}; it may to {', '.join(others)}"
            )
        asked, name = name, handoff.handoff
        content = content if handoff.content is None else handoff.content
    raise AgentError("LimitExceeded", f"peers {', '.join(peers)} have handed over {MAX_HANDOFFS} times without an end")


def content_of(action: ActionModel) -> object:
    """What another agent shall see of an action."""
    if "content" in action.params:
        return action.params["content"]
    return action.params or action.policy_info


def _result(action: ActionModel, found: object) -> ActionResult:
    """What an action gave: its output, or the error that it was answered with."""
    if isinstance(found, StepError):
        return ActionResult(None, False, str(found), action.tool_name, action.tool_call_id)
    if isinstance(found, BaseException):
        raise found
    return ActionResult(found, True, "", action.tool_name, action.tool_call_id)


def observation_after(before: Observation, results: list[ActionResult]) -> Observation:
    """What an agent sees after its actions: the content of the last one, and what all of them gave."""
    last = results[-1]
    content = last.content if last.success else last.error
    return Observation(content, before.observer, before.images, before.info, results)
