"""Agents whose input is an observation."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from runtime_core.agents.definition import AgentDefinition, Coro
from runtime_core.agents.values import from_json
from runtime_core.runners.values import Observation
from runtime_core.schema import Schema

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext


class ObservingAgent(AgentDefinition):
    """Its input is an Observation, or just its content; what it gives is not declared."""

    def decode_input(self, data: bytes) -> Observation:
        return Observation.of(from_json(data))

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, Observation)  # what decode_input gave
        return self.observe(ctx, value)

    @abstractmethod
    async def observe(self, ctx: AgentContext, observation: Observation) -> object:
        """One run."""

    def input_schema(self) -> Schema:
        return {}

    def output_schema(self) -> Schema | None:
        return None
