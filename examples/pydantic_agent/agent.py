"""The agent, written for pydantic-ai alone: tools, dependencies, structured output, an approval."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext

TRAINS = {("Bern", "Chur"): 148, ("Bern", "Basel"): 58, ("Chur", "Basel"): 140}
"""Minutes between two cities."""


@dataclass
class Traveller:
    """The agent's dependencies: plain data, part of the task's input."""

    name: str
    budget: int


class Trip(BaseModel):
    """The desk's answer."""

    city: str
    minutes: int
    booking: str


desk = Agent(
    "openai-chat:gpt-test",
    name="desk",
    deps_type=Traveller,
    output_type=Trip,
    retries=2,
    instructions="Compare the cities that the traveller names, all at once, then book the one that is nearer.",
)


@desk.instructions
def for_whom(ctx: RunContext[Traveller]) -> str:
    return f"The traveller is {ctx.deps.name}."


@desk.tool_plain
async def train(start: str, end: str) -> int:
    """Return the minutes by train between two cities."""
    minutes = TRAINS.get((start, end)) or TRAINS.get((end, start))
    if minutes is None:
        raise ModelRetry(f"no train between {start} and {end}: choose from Bern, Chur, Basel")
    return minutes


@desk.tool(requires_approval=True, metadata={"weft": {"repeatable": False}})
async def book(ctx: RunContext[Traveller], city: str, price: int) -> str:
    """Book a trip, after a human has approved it, exactly once."""
    if price > ctx.deps.budget:
        raise ModelRetry(f"over the budget of {ctx.deps.budget}")
    return f"{city.upper()}-{price}"
