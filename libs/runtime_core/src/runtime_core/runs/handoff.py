"""Asks agents that may hand over to one another, and shows each of them as much of an observation as it takes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime_core.errors import AgentError
from runtime_core.runs.definition import FunctionAgent
from runtime_core.runs.observation import Observation, handoff_in

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

MAX_HANDOFFS = 100
"""How often the peers of a team may hand over before one of them answers."""


async def ask_among_peers(ctx: AgentContext, name: str, content: object, peers: Sequence[str]) -> object:
    """The answer of an agent, or of the peer that it hands over to."""
    asked = ""
    for _ in range(MAX_HANDOFFS):
        others = [peer for peer in peers if peer != name]
        shown: Any = content  # Any: JSON
        if takes_observation(ctx.functions.agent(name)):
            shown = with_info(Observation(content, asked), {"handoffs": others})
        output: object = await ctx.agent(name, shown)
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


def takes_observation(known: object) -> bool:
    """Whether an agent, as the app has declared it, takes an Observation and not just its content."""
    if getattr(known, "sees_observations", False):
        return True
    if not isinstance(known, FunctionAgent):
        return False
    takes = list(inspect.signature(known.function).parameters.values())[1:2]
    return bool(takes) and (
        takes[0].annotation is Observation or str(takes[0].annotation).split(".")[-1] == "Observation"
    )


def with_info(seen: Observation, info: dict[str, Any]) -> Any:  # Any: JSON
    """An observation with this `info`, as JSON; its content alone where it says nothing else."""
    whole = dataclasses.replace(seen, info=info)
    return whole.content if whole.plain else dataclasses.asdict(whole)
