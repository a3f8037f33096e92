"""Processes of the kill tests: `python -m tests.apps.kills_app URL NAMESPACE LEASE` forks one for each line it reads.

A line is `LOG worker`, or `LOG caller FILE COUNT`; the process's id is the answer. Forked, a process runs in a tenth of
the time that an import takes, so that it lives for longer than it starts. All end with the one that forks them.

A worker runs all three types of agents: a desk asks a clerk, who asks a ledger and tells the auditors. Each agent keeps
in its state which orders it has seen, and how often.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_core.base.lifeline import tie
from weft.runtime import AgentId, MessageContext, RoutedAgent, Runtime, TopicId, event, rpc

JSON = Any  # Any: states are the users' own JSON
KEYS = 12
"""How many agents of each type there are."""
LONGEST_SECONDS = 0.03
"""How long a part of a handler takes at most, so that many kills meet one in the middle."""


@dataclass
class Order:
    id: str
    number: int


@dataclass
class Receipt:
    id: str
    by: list[str]


@dataclass
class Told:
    id: str


def desk_of(number: int) -> AgentId:
    """The desk that takes order `n`."""
    return AgentId("desk", f"k{number % KEYS}")


class Counting(RoutedAgent):
    """Counts how often it has seen each order."""

    def __init__(self) -> None:
        super().__init__("counts orders")
        self.seen: dict[str, int] = {}

    async def count(self, id: str) -> None:
        await asyncio.sleep(random.uniform(0, LONGEST_SECONDS))
        self.seen[id] = self.seen.get(id, 0) + 1
        await asyncio.sleep(random.uniform(0, LONGEST_SECONDS))

    async def save_state(self) -> Mapping[str, JSON]:
        return {"seen": self.seen}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.seen = dict(state["seen"])


class Desk(Counting):
    @rpc
    async def on_order(self, message: Order, ctx: MessageContext) -> Receipt:
        await self.count(message.id)
        answer: Receipt = await self.send_message(message, AgentId("clerk", f"k{message.number // 2 % KEYS}"))
        await asyncio.sleep(random.uniform(0, LONGEST_SECONDS))
        return Receipt(answer.id, [str(self.id), *answer.by])


class Clerk(Counting):
    @rpc
    async def on_order(self, message: Order, ctx: MessageContext) -> Receipt:
        await self.publish_message(Told(message.id), TopicId("told", f"k{message.number % KEYS}"))
        answer: Receipt = await self.send_message(message, AgentId("ledger", f"k{message.number // 3 % KEYS}"))
        await self.count(message.id)
        return Receipt(answer.id, [str(self.id), *answer.by])


class Ledger(Counting):
    @rpc
    async def on_order(self, message: Order, ctx: MessageContext) -> Receipt:
        await self.count(message.id)
        return Receipt(message.id, [str(self.id)])


class Auditor(Counting):
    @event
    async def on_told(self, message: Told, ctx: MessageContext) -> None:
        await self.count(message.id)


TYPES: Mapping[str, type[Counting]] = {"desk": Desk, "clerk": Clerk, "ledger": Ledger, "auditor": Auditor}


async def work(runtime: Runtime) -> None:
    """Run all types until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    for name, cls in TYPES.items():
        await cls.register(runtime, name, cls)
    await stop.wait()


async def call(runtime: Runtime, answers: Path, count: int) -> None:
    """Request all orders that have no answer in the file yet, at once. Write each answer as a line."""
    done = {line.split()[0] for line in answers.read_text().splitlines()} if answers.exists() else set()

    async def one(number: int) -> None:
        id = f"called-{number}"
        if id not in done:
            receipt = await runtime.send_message(Order(id, number), desk_of(number), message_id=id)
            with answers.open("a") as file:
                file.write(f"{id} {receipt.id} {' '.join(receipt.by)}\n")

    await asyncio.gather(*(one(number) for number in range(count)))
    answers.with_suffix(".done").touch()


async def run(url: str, namespace: str, lease: str, role: str, *rest: str) -> None:
    """A worker or a caller, until it ends."""
    async with Runtime(url, namespace, services=False, lease_seconds=float(lease)) as runtime:
        if role == "worker":
            await work(runtime)
        else:
            await call(runtime, Path(rest[0]), int(rest[1]))


def main(arguments: list[str]) -> None:
    """Fork processes until the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is reaped at once
    for line in sys.stdin:
        log, *role = line.split()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            tie(parent, signal.SIGKILL)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            logging.basicConfig(format="%(name)s: %(message)s")
            random.seed()
            asyncio.run(run(*arguments, *role))
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    # By its name: the messages' types are named with their module, and the test's process knows it by this name.
    from tests.apps.kills_app import main as forks

    forks(sys.argv[1:])
