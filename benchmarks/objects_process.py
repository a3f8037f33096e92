"""The driver on Weft's runtime of agents as objects: agent, tool and caller in one process with a private server.

It has the agents of `comparison/drivers/on_autogen.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import uvloop

from benchmarks.driver import serve
from benchmarks.question import found
from weft.runtime import AgentId, MessageContext, RoutedAgent, Runtime, rpc


@dataclass
class Text:
    text: str


class LookUp(RoutedAgent):
    """The tool, as a separate agent."""

    @rpc
    async def on_text(self, message: Text, ctx: MessageContext) -> Text:
        return Text(found(message.text))


class Asker(RoutedAgent):
    """Calls the tool and returns its answer."""

    @rpc
    async def on_text(self, message: Text, ctx: MessageContext) -> Text:
        answered = await self.send_message(Text(message.text), AgentId("look_up", self.id.key))
        assert isinstance(answered, Text)
        return answered


async def main() -> None:
    async with Runtime("memory://") as runtime:
        await LookUp.register(runtime, "look_up", lambda: LookUp("looks up"))
        await Asker.register(runtime, "asker", lambda: Asker("asks"))
        numbers = iter(range(10**9))

        async def ask(text: str) -> object:
            # A key for each question: an agent handles one message at a time, and AutoGen's any number.
            answered = await runtime.send_message(Text(text), AgentId("asker", str(next(numbers))))
            assert isinstance(answered, Text)
            return answered.text

        await serve(ask)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
