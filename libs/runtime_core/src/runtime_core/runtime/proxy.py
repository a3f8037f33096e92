"""An agent that may live anywhere, as an object."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from runtime_core.runtime.cancellation import CancellationToken
from runtime_core.runtime.identity import AgentId
from runtime_core.runtime.protocol import AgentMetadata, AgentRuntime


class AgentProxy:
    """Speaks to one agent through its runtime. Any: the user's message types, and JSON states."""

    def __init__(self, agent: AgentId, runtime: AgentRuntime) -> None:
        self._agent = agent
        self._runtime = runtime

    @property
    def id(self) -> AgentId:
        return self._agent

    @property
    def metadata(self) -> Awaitable[AgentMetadata]:
        return self._runtime.agent_metadata(self._agent)

    async def send_message(
        self,
        message: Any,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any:
        return await self._runtime.send_message(
            message, self._agent, sender=sender, cancellation_token=cancellation_token, message_id=message_id
        )

    async def save_state(self) -> Mapping[str, Any]:
        return await self._runtime.agent_save_state(self._agent)

    async def load_state(self, state: Mapping[str, Any]) -> None:
        await self._runtime.agent_load_state(self._agent, state)
