"""Ask the desk for a trip, and answer its questions on standard input.

In this process; with WEFT_REDIS_URL set, services that run `examples.pydantic_agent.app:app` do it.
"""

from __future__ import annotations

import asyncio
import os
import sys

from examples.pydantic_agent.app import app
from weft import Client
from weft.testing import LocalApp

QUESTION = "Chur or Basel from Bern?"
LIMIT_SECONDS = 300.0


async def ask(client: Client, question: str) -> int:
    task = await client.submit("desk", {"prompt": question, "deps": {"name": "Ann", "budget": 100}})
    async for event in task.stream():
        if event.type == "weft.human.requested":
            asked = event.data["data"]["arguments"]
            print(f"book {asked['city']} for {asked['price']}? [y/n] ", end="", flush=True)
            said = await asyncio.to_thread(sys.stdin.readline)
            print()
            await task.signal(event.data["request_id"], said.strip().lower() in ("y", "yes"))
    response = await task.result(timeout=LIMIT_SECONDS)
    if response.error is not None:
        print(f"{response.error['type']}: {response.error['message']}", file=sys.stderr)
        return 1
    trip = response.value()
    print(f"{trip['city']}, {trip['minutes']} minutes, booking {trip['booking']}")
    print(f"{response.usage['requests']:.0f} requests to the model, {response.steps} steps")
    return 0


async def main(question: str) -> int:
    if not os.environ.get("OPENAI_API_KEY"):
        print("set OPENAI_API_KEY, and OPENAI_BASE_URL for a provider other than OpenAI", file=sys.stderr)
        return 1
    url = os.environ.get("WEFT_REDIS_URL")
    if url:
        async with Client.connect(url, namespace=os.environ.get("WEFT_NAMESPACE", "weft")) as client:
            return await ask(client, question)
    async with LocalApp(app) as client:
        return await ask(client, question)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(" ".join(sys.argv[1:]) or QUESTION)))
