"""Asks agents."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_core.errors import AgentError
from runtime_core.events.constants import TopicType
from runtime_core.events.errors import UnknownReceiver
from runtime_core.events.handler import Handler
from runtime_core.events.message import Message


class DefaultAgentHandler(Handler):
    """Asks the agent `receiver` with the payload as its input; a run of its own, on any process that has it."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        result = await self.ask(message)
        for following in self.answers(message, result, sender=message.receiver, topic=TopicType.AGENT_RESULT):
            yield following

    async def ask(self, message: Message) -> object:
        """The agent's answer. Raises AgentError, or UnknownReceiver where no app has such an agent."""
        if not message.receiver:
            raise UnknownReceiver("receiver", "is empty in a message of category agent: name the agent")
        try:
            answer: object = await self.ctx.agent(
                message.receiver, message.payload, key=str(message.headers.get("key", ""))
            )
        except AgentError as error:
            if error.type == "UnknownName":
                raise UnknownReceiver("receiver", error.message) from error
            raise
        return answer
