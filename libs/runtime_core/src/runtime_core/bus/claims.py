"""Finds the partition of a task, and claims ids so that all partitions together accept a submit once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Misplaced, Submitted
from runtime_core.errors import Rejected
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import partition_of

SUBMIT_ATTEMPTS = 20
"""How often to try a submit while others claim the same ids."""


def home_of(buses: Sequence[EventBus], task: str) -> EventBus:
    """Return the partition that a task's id maps to."""
    return buses[partition_of(task, len(buses))]


async def find_place(buses: Sequence[EventBus], task: str) -> EventBus:
    """Return the partition where a task is; if no partition has it, the one that its id maps to."""
    home = home_of(buses, task)
    if len(buses) == 1:
        return home
    noted, status = await asyncio.gather(
        home.transport.call("HGET", home.keys.places, task),
        home.transport.call("HGET", home.keys.task(task), "status"),
    )
    if noted is not None:
        return buses[int(cast(bytes, noted))]
    if status is None:
        # A message starts its task beside its sender or in its instance's partition, and notes the place nowhere.
        others = [bus for bus in buses if bus is not home]
        found = await asyncio.gather(*(bus.transport.call("HGET", bus.keys.task(task), "status") for bus in others))
        for bus, status in zip(others, found, strict=True):
            if status is not None:
                return bus
    return home


async def forget_place(buses: Sequence[EventBus], task: str) -> None:
    """Delete the note of where an erased task was."""
    if len(buses) > 1:
        home = home_of(buses, task)
        await home.transport.call("HDEL", home.keys.places, task)


async def submit_once(buses: Sequence[EventBus], target: int, id_home: int, new: Submission) -> Submitted:
    """Start a task in partition `target` of several, or find where an equal submit has started it.

    `id_home` is the partition of source and id. Raises the errors of `EventBus.submit`.
    """
    for _ in range(SUBMIT_ATTEMPTS):
        replyto = buses[target].keys.reply(new.client) if new.client else new.replyto
        attempt = _Attempt(buses, target, id_home, replace(new, replyto=replyto))
        try:
            return await attempt.run()
        except Misplaced as found:
            target = await attempt.settle(found)
        except Rejected as error:
            if error.retry_after_seconds is None:
                await attempt.give_up()
            raise
    raise Rejected(
        "overloaded",
        "other submits with the same ids are under way: submit again",
        retry_after_seconds=1.0,
        task_id=new.task_id,
    )


class _Attempt:
    """One attempt to submit to one partition."""

    def __init__(self, buses: Sequence[EventBus], target: int, id_home: int, new: Submission) -> None:
        self.new = new
        self._buses = buses
        self._target = target
        self._asked = target
        """The partition that replied last."""
        # The task id first: it decides where the task is.
        self._homes = {"task_id": home_of(buses, new.task_id).keys.partition, "id": id_home}
        self._tokens = {"task_id": "", "id": ""}

    async def run(self) -> Submitted:
        for home in dict.fromkeys(self._homes.values()):
            if home != self._target:
                self._asked = home
                fields = [field for field, of_field in self._homes.items() if of_field == home]
                tokens = await self._buses[home].claim(self.new, self._target, fields)
                self._tokens.update(zip(fields, tokens, strict=True))
        self._asked = self._target
        self.new.claims = f"{self._tokens['id']}|{self._tokens['task_id']}"
        return await self._buses[self._target].submit(self.new)

    async def settle(self, found: Misplaced) -> int:
        """Return the partition to try next. Raises Rejected if another submit has used the id for other content."""
        field = found.field
        if found.again:
            await self._free(field, self._tokens[field])
            return self._target
        if found.equal and field == "task_id":
            return found.holder
        digest = await self._buses[found.holder].refuse(self.new, field, found.token)
        if digest is None:
            await self._buses[self._asked].unclaim(self.new, field, found.token)
            return self._target
        if digest != self.new.digest:
            await self.give_up()
            raise Rejected(field, _used(self.new, field), task_id=self.new.task_id)
        if field == "id":
            await self._drop("task_id")  # claimed for the wrong partition
        if not found.equal:
            await self._buses[self._asked].unclaim(self.new, field, found.token)
        return found.holder

    async def give_up(self) -> None:
        """Free the ids that were claimed for a submit that is finally rejected."""
        for field in self._tokens:
            await self._drop(field)

    async def _drop(self, field: str) -> None:
        """Free an id, unless an equal submit has started with the same claim in the meantime."""
        token = self._tokens[field]
        if token and await self._buses[self._target].refuse(self.new, field, token) is None:
            await self._free(field, token)

    async def _free(self, field: str, token: str) -> None:
        await self._buses[self._homes[field]].unclaim(self.new, field, token)


def _used(new: Submission, field: str) -> str:
    if field == "task_id":
        return f"a task {new.task_id} with other content exists"
    return f"the id {new.event_id} of source {new.source} was used before with other content"
