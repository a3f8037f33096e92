"""A process with some of the agents of the tests: `python -m tests.integration.integrations.actors.worker URL …`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from tests.integration.integrations.actors import agents
from weft.runtime import Runtime, TypeSubscription

CLASSES = {
    "echo": agents.Echo,
    "sink": agents.Sink,
    "asker": agents.Asker,
    "slow": agents.Slow,
    "teller": agents.Teller,
    "mortal": agents.Mortal,
    "who": agents.Who,
    "cascade-1": agents.Cascade,
    "cascade-2": agents.Cascade,
    "cascade-3": agents.Cascade,
}
TOPICS = {"sink": ("default", "told"), "slow": ("told",), **{f"cascade-{n}": ("default",) for n in (1, 2, 3)}}


async def main(url: str, namespace: str, types: list[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Runtime(url, namespace, services=False, lease_seconds=1.0) as runtime:
        for name in types:
            await CLASSES[name].register(runtime, name, CLASSES[name])
            for topic in TOPICS.get(name, ()):
                with contextlib.suppress(ValueError):
                    await runtime.add_subscription(TypeSubscription(topic, name))
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
