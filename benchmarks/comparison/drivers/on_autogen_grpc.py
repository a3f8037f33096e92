"""AutoGen's distributed runtime: a host, a worker for each of the two agents, and the caller, over gRPC.

`python -m benchmarks.comparison.drivers.on_autogen_grpc [host|asker|look_up]`; without an argument it is the driver.

Each agent has its own worker, since the host confuses requests that two runtimes send to one worker: each runtime
numbers its requests from 1, and the host keeps them by worker and number.
"""

from __future__ import annotations

import asyncio
import os
import sys

from autogen_core import AgentId, try_get_known_serializers_for_type
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost

from benchmarks.comparison.drivers.on_autogen import Asker, LookUp, Text
from benchmarks.driver import serve, until_answered

ADDRESS = os.environ["WEFT_BENCH_ADDRESS"]


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
