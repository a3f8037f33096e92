"""taskiq on Redis Streams: the agent is a task that starts the tool as another task and waits for its result.

Workers: `taskiq worker benchmarks.comparison.drivers.on_taskiq:agents` and `…:tools`.
"""

from __future__ import annotations

import os

import uvloop
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks.driver import serve, until_answered
from benchmarks.question import found

URL = os.environ["WEFT_BENCH_REDIS_URL"]
CHECK_SECONDS = 0.005
"""How often to poll for a result: faster here than the 0.2 s of taskiq, 0.02 and 0.001."""


def broker(name: str) -> RedisStreamBroker:
    results = RedisAsyncResultBackend(URL, result_ex_time=60)
    return RedisStreamBroker(URL, queue_name=name, xread_block=1000).with_result_backend(results)


agents = broker("agents")
tools = broker("tools")


@tools.task("look_up")  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
async def look_up(text: str) -> str:
    return found(text)


@agents.task("asker")  # type: ignore[untyped-decorator]
async def asker(text: str) -> str:
    call = await look_up.kiq(text)
    result = await call.wait_result(check_interval=CHECK_SECONDS)
    return str(result.return_value)


async def main() -> None:
    await agents.startup()

    async def ask(text: str) -> object:
        task = await asker.kiq(text)
        result = await task.wait_result(check_interval=CHECK_SECONDS)
        return result.return_value

    await until_answered(ask)
    await serve(ask)
    await agents.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
