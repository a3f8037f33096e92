"""FastStream on Redis Streams: agent and tool are two applications that read in consumer groups.

Each of the four events is an entry of a stream, acknowledged when its handler has returned, as in Weft. FastStream
keeps no state of a task. Driver: `python -m benchmarks.comparison.drivers.on_faststream [agent|tool]`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid

import uvloop
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub

from benchmarks.driver import serve, until_answered
from benchmarks.question import found

READ = 50
"""Entries of one read: faster here than 1, 10 and 200."""


def stream(name: str) -> StreamSub:
    return StreamSub(name, group=name, consumer=name, max_records=READ)


def connected() -> RedisBroker:
    return RedisBroker(os.environ["WEFT_BENCH_REDIS_URL"], logger=None)


async def agent() -> None:
    broker = connected()

    @broker.subscriber(stream=stream("asks"))  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
    async def on_ask(message: dict[str, str]) -> None:
        await broker.publish(message, stream="calls")

    @broker.subscriber(stream=stream("results"))  # type: ignore[untyped-decorator]
    async def on_result(message: dict[str, str]) -> None:
        await broker.publish(message, stream="answers")

    await FastStream(broker, logger=None).run()


async def tool() -> None:
    broker = connected()

    @broker.subscriber(stream=stream("calls"))  # type: ignore[untyped-decorator]
    async def on_call(message: dict[str, str]) -> None:
        await broker.publish({"id": message["id"], "text": found(message["text"])}, stream="results")

    await FastStream(broker, logger=None).run()


async def driver() -> None:
    broker = connected()
    waiting: dict[str, asyncio.Future[str]] = {}

    @broker.subscriber(stream=stream("answers"))  # type: ignore[untyped-decorator]
    async def on_answer(message: dict[str, str]) -> None:
        answered = waiting.pop(message["id"])
        if not answered.done():
            answered.set_result(message["text"])

    async def ask(text: str) -> object:
        name = uuid.uuid4().hex
        waiting[name] = answered = asyncio.get_running_loop().create_future()
        await broker.publish({"id": name, "text": text}, stream="asks")
        return await answered

    async with broker:
        await broker.start()
        await until_answered(ask)
        await serve(ask)


if __name__ == "__main__":
    uvloop.run({"agent": agent, "tool": tool}.get("".join(sys.argv[1:]), driver)())
