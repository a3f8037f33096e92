"""Several agents and tools at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_core.errors import InvalidInput
from runtime_core.events.constants import Constants, TopicType
from runtime_core.events.handler import Handler
from runtime_core.events.handlers.agent import DefaultAgentHandler
from runtime_core.events.handlers.task import messages_in
from runtime_core.events.handlers.tool import DefaultToolHandler, calls_of
from runtime_core.events.message import AgentMessage, GroupMessage, Message, TaskMessage


class DefaultGroupHandler(Handler):
    """Asks all members at once and hands on their results together, in the order of the payload.

    Members are messages of the categories agent and tool. Where one fails, all others are waited for; then the first
    failure in order ends the task. With topic `group_results` the payload goes to the receiver as it is.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        if message.topic == TopicType.GROUP_RESULTS:
            if message.receiver:
                yield AgentMessage(payload=message.payload, sender=message.sender, receiver=message.receiver)
            else:
                yield TaskMessage(payload=message.payload, topic=TopicType.FINISHED)
            return
        members = messages_in(message)
        if not members:
            raise InvalidInput("message.payload", "a group has no members: give messages to agents and tools")
        results = await self.ctx.gather(*(self.member(member) for member in members))
        yield GroupMessage(
            payload=results,
            topic=TopicType.GROUP_RESULTS,
            sender=message.receiver,
            receiver=message.caller or message.sender,
            headers=message.headers,
        )

    async def member(self, member: Message) -> object:
        """One member's result. Raises InvalidInput for a category that gives none."""
        if member.category == Constants.AGENT:
            agents = self.events.handler(Constants.AGENT)
            if isinstance(agents, DefaultAgentHandler):
                return await agents.ask(member)
            return await DefaultAgentHandler(self.events).ask(member)
        if member.category == Constants.TOOL:
            tools = self.events.handler(Constants.TOOL)
            if not isinstance(tools, DefaultToolHandler):
                tools = DefaultToolHandler(self.events)
            tool, arguments = calls_of(member)[0]
            return await tools.call(tool, arguments)
        raise InvalidInput("message.payload", f"a {member.category} gives no result: members are agents and tools")
