"""Starts an agent without a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from runtime_core.runs.definition import AgentDefinition

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class FakeContext:
    """The part of a context that starting an agent needs."""

    def __init__(self, state: dict[str, object] | None = None) -> None:
        self.state = {} if state is None else state
        self._run = SimpleNamespace(state=self)

    def set_initial(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            self.state.setdefault(name, copy.deepcopy(value))


def context(state: dict[str, object] | None = None) -> AgentContext:
    return cast("AgentContext", FakeContext(state))  # the real one needs a run


async def run(agent: AgentDefinition, data: object, ctx: AgentContext | None = None) -> object:
    value = agent.decode_input(json.dumps(data).encode())
    return json.loads(agent.encode_output(await agent.start(ctx or context(), value)))
