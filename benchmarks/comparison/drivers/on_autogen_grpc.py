"""AutoGen's distributed runtime: a host, a worker for each of the two agents, and the caller, over gRPC.

`python -m benchmarks.comparison.drivers.on_autogen_grpc [host|asker|look_up]`; without an argument it is the driver.

Each agent has its own worker, since the host confuses requests that two runtimes send to one worker: each runtime
numbers its requests from 1, and the host keeps them by worker and number.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

from autogen_core import AgentId, MessageContext, RoutedAgent, message_handler, try_get_known_serializers_for_type
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost

from benchmarks.driver import serve, until_answered
from benchmarks.question import found

ADDRESS = os.environ["WEFT_BENCH_ADDRESS"]


@dataclass
class Text:
    text: str


# AutoGen is not installed where types are checked, so that its base class and decorator are of unknown type there.
class LookUp(RoutedAgent):  # type: ignore[misc]
    """The tool, as a separate agent."""

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


async def host() -> None:
    server = GrpcWorkerAgentRuntimeHost(address=ADDRESS)
    server.start()
    await server.stop_when_signal()


async def worker(agent: type[LookUp] | type[Asker], name: str) -> None:
    runtime = GrpcWorkerAgentRuntime(host_address=ADDRESS)
    runtime.add_message_serializer(try_get_known_serializers_for_type(Text))
    await runtime.start()
    await agent.register(runtime, name, lambda: agent(name))
    await runtime.stop_when_signal()


async def driver() -> None:
    runtime = GrpcWorkerAgentRuntime(host_address=ADDRESS)
    runtime.add_message_serializer(try_get_known_serializers_for_type(Text))
    await runtime.start()
    asker = AgentId("asker", "default")

    async def ask(text: str) -> object:
        answered = await runtime.send_message(Text(text), asker)
        return answered.text

    await until_answered(ask)
    await serve(ask)
    await runtime.stop()


async def main(role: str) -> None:
    if role == "host":
        await host()
    elif role == "asker":
        await worker(Asker, role)
    elif role == "look_up":
        await worker(LookUp, role)
    else:
        await driver()


if __name__ == "__main__":
    asyncio.run(main("".join(sys.argv[1:])))
