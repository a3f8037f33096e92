"""Every replica of every service is replaced by another release during work.

Nothing is lost, repeated, retried or left waiting.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from runtime_core.wire.events import StreamingMode
from tests.chaos.harm import FULL, RESULT_SECONDS
from tests.chaos.invariants import check_broker, check_effects, check_trajectories, held_of
from tests.conftest import OwnServer
from tests.fleet import SERVICES, Fleet, plain_redis
from tests.servers.process import Server

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

ROUNDS = 3 if FULL else 1
EVERY_SECONDS = 0.05
"""Between two submits."""
MAX_ENDED_TASKS = 5000 if FULL else 600
"""So that a machine on which processes start slowly has an end."""
JOURNEY = ["part0", "part1", "part2", "sub"]
CALLS = {"journey": 4, "errand": 1}
"""Effects of one task, by its agent."""
PIECES = 12


def inputs(agent: str, effects: Path, chance: random.Random) -> object:
    """Return the input of an agent: every kind of work that a replacement may interrupt."""
    match agent:
        case "journey":
            return str(effects)
        case "errand":
            return {"path": str(effects), "seconds": chance.uniform(1.0, 4.0)}
        case "murmurs":
            return {"pieces": PIECES, "seconds": chance.uniform(0.5, 2.0)}
        case "naps":
            return chance.uniform(0.2, 3.0)
    return chance.uniform(0.5, 3.0)


OUTPUTS = {"journey": JOURNEY, "errand": "errand", "murmurs": PIECES, "naps": "rested", "dawdles": "done"}


class Load:
    """Submits tasks until it is stopped, and waits for all of them."""

    def __init__(self, client: Client, effects: Path, chance: random.Random) -> None:
        self._client = client
        self._effects = effects
        self._chance = chance
        self._enough = asyncio.Event()
        self.agents: dict[str, str] = {}
        """The agent of each task."""

    def enough(self) -> None:
        self._enough.set()

    async def run(self) -> list[TaskResponse]:
        waited: list[asyncio.Task[TaskResponse]] = []
        while not self._enough.is_set() and len(waited) < MAX_ENDED_TASKS:
            agent = self._chance.choice(list(OUTPUTS))
            task = f"{agent}-{len(waited)}"
            self.agents[task] = agent
            asked = inputs(agent, self._effects, self._chance)
            waited.append(asyncio.create_task(self._one(agent, task, asked)))
            await asyncio.sleep(EVERY_SECONDS)
        return await asyncio.gather(*waited)

    async def _one(self, agent: str, task: str, asked: object) -> TaskResponse:
        mode = StreamingMode.ALL if agent == "murmurs" else None
        handle = await self._client.submit(agent, asked, task_id=task, timeout=RESULT_SECONDS, stream=mode or False)
        return await handle.result(timeout=RESULT_SECONDS)


async def forget_functions(server: Server, releases: int) -> None:
    """Delete the functions of all releases, as a premature `weft doctor --clean` does: each process loads its own
    again."""
    async with plain_redis(server.port, text=True) as redis:
        found = await redis.execute_command("FUNCTION", "LIST", "LIBRARYNAME", "weft_*")
        names = [library[library.index("library_name") + 1] for library in found]
        assert len(names) >= releases, names
        for name in names:
            await redis.execute_command("FUNCTION", "DELETE", name)


async def roll(
    server: Server,
    namespace: str,
    folder: Path,
    seed: int,
    between: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Replace all replicas in turn under load, then check the invariants. `between` is called between rounds."""
    chance = random.Random(seed)
    effects = folder / "effects"
    effects.touch()
    environ = {"WEFT_SHUTDOWN_SECONDS": "300"}  # so that no machine is too slow to finish what runs
    async with (
        Fleet(server.url, namespace, folder, replicas=2, lease_seconds=3.0, environ=environ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        load = Load(client, effects, chance)
        running = asyncio.create_task(load.run())
        try:
            for number in range(ROUNDS):
                if number and between is not None:
                    await between()
                # Each round brings another release, so that two work side by side until it is over.
                fleet.run_instead({name: ("tests.chaos.next_release", name, str(number + 1)) for name in SERVICES})
                for replica in (1, 2):
                    # Of each service one at once, as several rollouts do; who leads is among them once a round.
                    await asyncio.gather(*(fleet.replace(f"{service}-{replica}") for service in SERVICES))
                    if replica == 1:
                        assert not running.done(), "the load has ended before the replacements"
                        await forget_functions(server, releases=2)
        finally:
            load.enough()
        try:
            responses = await running
        except TimeoutError:
            print(await held_of(server.port, namespace, list(load.agents)[:3]))
            raise
        wrong = [
            response
            for response in responses
            if response.status != "completed" or response.output != OUTPUTS[load.agents[response.task_id]]
        ]
        assert not wrong, f"{len(wrong)} of {len(responses)} tasks did not end as they should: {wrong[0]}"
        for agent, calls in CALLS.items():
            of_agent = [task for task, name in load.agents.items() if name == agent]
            mine = folder / f"effects-{agent}"
            lines = [line for line in effects.read_text().splitlines() if f" {agent}-" in line]
            mine.write_text("".join(f"{line}\n" for line in lines))
            check_effects(mine, of_agent, calls)
            if between is None:
                assert len(lines) == len(set(lines)), f"an effect of {agent} was made twice, though nothing was killed"
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace, seconds=60.0)
            alive = await redis.zrange(f"{namespace}:{{0}}:alive", 0, -1)
        gone = [pid for member in fleet.members.values() for pid in member.replaced]
        assert len(gone) == ROUNDS * len(fleet.members)
        stayed = [name for name in alive if any(f".{pid}." in name.decode() for pid in gone)]
        assert not stayed, f"left without a word: {stayed}"
        if between is None:
            for member in fleet.members.values():
                for sign in ("declared dead", "retrying in", "became a dead letter"):
                    assert sign not in member.text(), f"{member.name}: {sign}"
        await check_trajectories(fleet.trajectory_url, namespace, responses, 1, seconds=60.0)


@pytest.mark.parametrize("broker_dies", [False, True] if FULL else [False])
async def test_replicas_are_replaced_under_load(
    broker_dies: bool, own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    server = own_server(append="always" if broker_dies else "everysec")

    async def restart() -> None:
        server.kill()
        await asyncio.sleep(0.5)
        server.start()

    await roll(server, namespace, tmp_path, chaos_seed, restart if broker_dies else None)
