"""Logs once that a message has waited long, for whom and why: such a wait may never end."""

from __future__ import annotations

import logging
import math
import time
from weakref import WeakKeyDictionary

from runtime_core.integrations.actors.actor import ActorRun, Actors
from runtime_core.integrations.actors.host import ActorHost
from runtime_core.integrations.actors.identity import agent_name, pool_of
from runtime_core.integrations.actors.messaging import Requests
from runtime_core.state_manager.backlog import find_waits, first_waiting, processes_of, wait_at

logger = logging.getLogger(__name__)

WAIT_SECONDS = 5.0
"""How long a message may wait before it is logged."""
FIRST_CHECK_SECONDS = 1.0
"""How long a handler runs before its agent's mailbox is checked."""
CHECKS_MAX = 100
"""How many mailboxes one check reads: thousands of long handlers must not fill the connection with requests."""
SHOWN = 10


class Watch:
    """Checks the long handlers and the open requests of this process."""

    def __init__(self, host: ActorHost, actors: Actors, requests: Requests) -> None:
        self._host = host
        self._actors = actors
        self._requests = requests
        self._seen: WeakKeyDictionary[ActorRun, tuple[float, str]] = WeakKeyDictionary()
        """For each long handler: the time of the next check, and the first message in its mailbox."""
        self._due: dict[str, float] = {}
        """Recipient → the time when the next check for its processes is due."""

    async def check(self) -> None:
        """Check handlers and requests that have waited long enough. The host calls this every second."""
        now = time.monotonic()
        checks = 0
        for run in self._actors.running():
            due, before = self._seen.get(run, (run.began_at + FIRST_CHECK_SECONDS, ""))
            if now >= due and not run.actor.interleave and checks < CHECKS_MAX:
                checks += 1
                await self._check_mailbox(run, before, now)
        for recipient in {agent_name(each.type) for each in self._requests.older_than(WAIT_SECONDS)}:
            if now >= self._due.get(recipient, 0.0):
                await self._check_recipient(recipient, now)

    async def _check_mailbox(self, run: ActorRun, before: str, now: float) -> None:
        bus, _ = await self._host.place(run.actor.name, run.key)
        instance = f"{run.actor.name}/{run.key}"
        first = await first_waiting(bus, instance)
        if not first or first != before:
            self._seen[run] = (now + WAIT_SECONDS, first)
            return
        self._seen[run] = (math.inf, first)
        wait = await wait_at(bus, instance)
        if wait is not None:
            logger.warning(
                "%s. If the handler of that message waits for one of them, it waits forever: let the type interleave",
                wait,
            )

    async def _check_recipient(self, name: str, now: float) -> None:
        self._due[name] = now + WAIT_SECONDS
        for bus in await self._host.buses():
            if await processes_of(bus, f"agent:{pool_of(name)}"):
                return
        self._due[name] = math.inf
        logger.warning(
            "a request waits for %s in the namespace %r: no process runs it; start one, or the runtime here",
            name,
            self._host.namespace,
        )

    async def log_waiting(self) -> bool:
        """Log which messages of the namespace wait. Return False if none does."""
        found = [wait for bus in await self._host.buses() for wait in await find_waits(bus)]
        for wait in found[:SHOWN]:
            logger.warning("stop_when_idle waits for the namespace %r: %s", self._host.namespace, wait)
        return bool(found)
