"""The driver on AutoGen's `SingleThreadedAgentRuntime`: agent, tool and caller in one process, all in memory.

`python -m benchmarks.comparison.drivers.on_autogen [asyncio|uvloop]`
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, message_handler

from benchmarks.driver import serve
from benchmarks.question import found


@dataclass
class Text:
    text: str


# AutoGen is not installed where types are checked, so that its base class and decorator are of unknown type there.
class LookUp(RoutedAgent):  # type: ignore[misc]
    """The tool, as a separate agent: AutoGen Core's way to let an agent call a tool."""

    @message_handler  # type: ignore[untyped-decorator]
    async def on_text(self, message: Text, ctx: MessageContext) -> Text:
        return Text(found(message.text))


class Asker(RoutedAgent):  # type: ignore[misc]
    """Calls the tool and returns its answer."""

    @message_handler  # type: ignore[untyped-decorator]
    async def on_text(self, message: Text, ctx: MessageContext) -> Text:
        answered = await self.send_message(Text(message.text), AgentId("look_up", self.id.key))
        assert isinstance(answered, Text)
        return answered


async def main() -> None:
    runtime = SingleThreadedAgentRuntime()
    await LookUp.register(runtime, "look_up", lambda: LookUp("looks up"))
    await Asker.register(runtime, "asker", lambda: Asker("asks"))
    runtime.start()
    asker = AgentId("asker", "default")

    async def ask(text: str) -> object:
        answered = await runtime.send_message(Text(text), asker)
        return answered.text

    await serve(ask)
    await runtime.stop_when_idle()


if __name__ == "__main__":
    if sys.argv[1:] == ["uvloop"]:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())
