"""Restate: agent and tool are two services of one worker, the caller asks over HTTP.

The worker is served by Hypercorn; `python -m benchmarks.comparison.drivers.on_restate` is the driver, and registers
the worker first. WEFT_BENCH_INGRESS, _ADMIN and _ADDRESS hold URLs of the server's ports and of the worker.
"""

from __future__ import annotations

import os

import aiohttp
import restate
import uvloop

from benchmarks.driver import serve, until_answered
from benchmarks.question import found

tools = restate.Service("tools")
agents = restate.Service("agents")


@tools.handler()  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
async def look_up(ctx: restate.Context, text: str) -> str:
    return found(text)


@agents.handler()  # type: ignore[untyped-decorator]
async def asker(ctx: restate.Context, text: str) -> str:
    return str(await ctx.service_call(look_up, arg=text))


app = restate.app([agents, tools])


async def main() -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        register = {"uri": os.environ["WEFT_BENCH_ADDRESS"], "force": True}
        async with http.post(os.environ["WEFT_BENCH_ADMIN"] + "/deployments", json=register) as registered:
            registered.raise_for_status()
        url = os.environ["WEFT_BENCH_INGRESS"] + "/agents/asker"

        async def ask(text: str) -> object:
            async with http.post(url, json=text) as answered:
                answered.raise_for_status()
                return await answered.json()

        await until_answered(ask)
        await serve(ask)


if __name__ == "__main__":
    uvloop.run(main())
