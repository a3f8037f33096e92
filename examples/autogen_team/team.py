"""A team of AgentChat: a writer and an editor take turns until the editor approves. Its model answers from a script."""

from __future__ import annotations

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.replay import ReplayChatCompletionClient

from weft.autogen import WeftAgentRuntime

TASK = "Say in one sentence what a durable runtime is."
ANSWERS = [
    "A durable runtime keeps going.",
    "Say what it survives.",
    "A durable runtime finishes what it began, even when its processes die.",
    "APPROVE",
]


async def main() -> None:
    """Runs the team and prints who said what."""
    model = ReplayChatCompletionClient(ANSWERS)
    writer = AssistantAgent("writer", model_client=model, system_message="You write one sentence.")
    editor = AssistantAgent("editor", model_client=model, system_message="You ask for better, or say APPROVE.")

    runtime = WeftAgentRuntime()
    runtime.start()
    team = RoundRobinGroupChat(
        [writer, editor], termination_condition=TextMentionTermination("APPROVE", ["editor"]), runtime=runtime
    )
    async for said in team.run_stream(task=TASK):
        if isinstance(said, TextMessage):
            print(f"{said.source}: {said.content}")
        elif isinstance(said, TaskResult):
            print(f"stopped: {said.stop_reason}")
    await runtime.stop_when_idle()
    await runtime.close()


if __name__ == "__main__":
    asyncio.run(main())
