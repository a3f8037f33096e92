"""From a valid submit to a started task: the checks that need the broker, the same for every way in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from runtime_core.bus.claims import find_place, submit_once
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import Submitted
from runtime_core.declare.manifest import InputCheck, Manifest
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import instance_address, partition_of
from runtime_core.wire.commands import Submission, default_task_id

MANIFEST_SECONDS = 2.0
"""How long a manifest that was read is taken for the newest."""


class Admission:
    """Submits tasks to the partitions of a namespace."""

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses
        self._checks: dict[str, InputCheck] = {}
        self._apps: dict[str, Manifest] = {}
        """The app of each agent."""
        self._internal: set[str] = set()
        """Agents that only other agents may ask."""
        self._stored: list[bytes] = []
        """The manifests that these were made from."""
        self._read_at = -MANIFEST_SECONDS

    async def admit(self, new: Submission) -> Submitted:
        """Check and start a task.

        Raises `Rejected` (or its `NotYet`) with the field, `InvalidInput` for an input that its agent's schema
        refuses, `Fenced` where the submission's epoch is not the newest admitter's.
        """
        await self._check_input(new)
        if new.begun is None:  # a fork repeats a task that another agent has started
            self._check_outside(new.agent)
        if new.deadline is not None and new.deadline <= time.time() * 1000:
            raise Rejected("deadline", "has passed before the task was admitted", task_id=new.task_id)
        if new.hooks:
            new = replace(new, hooks=await self._hooks_of(new))
        if len(self._buses) == 1:
            return await self._buses[0].submit(new)
        id_home = partition_of(default_task_id(new.source, new.event_id), len(self._buses))
        return await submit_once(self._buses, self.partition_for(new), id_home, new)

    async def check(self, submission: Submission) -> None:
        """Look at a submit that is made later. Raises Rejected for an unknown agent, InvalidInput for its input.

        Before any handler has published its agents, nothing can be said, and nothing is raised.
        """
        bus = self._buses[self.partition_for(submission)]
        known = cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.agents))
        if known and submission.agent.encode() not in known:
            names = ", ".join(sorted(name.decode() for name in known))
            raise Rejected("data.agent", f"no agent is named {submission.agent}; known are {names}")
        await self._check_input(submission)
        self._check_outside(submission.agent)

    def partition_for(self, new: Submission) -> int:
        """A task lives with the instance that it asks, where the user gave that a key; else by its own id."""
        if len(self._buses) == 1:
            return 0
        place = instance_address(new.agent, new.key) if new.key else new.partition_key or new.task_id
        return partition_of(place, len(self._buses))

    async def find(self, task: str) -> EventBus:
        """The partition of a task that was submitted to this namespace."""
        return await find_place(self._buses, task)

    async def _check_input(self, submission: Submission) -> None:
        check = self._checks.get(submission.agent)
        now = time.monotonic()
        if check is None or now - self._read_at > MANIFEST_SECONDS:
            self._read_at = now  # one reads them again; other submits go on with those that are known
            await self._read_manifests()
            check = self._checks.get(submission.agent)
        if check is not None:
            check.json(submission.input_json)

    def _check_outside(self, agent: str) -> None:
        if agent in self._internal:
            raise Rejected("data.agent", f"{agent} is internal: other agents may ask it, a submit may not")

    async def _hooks_of(self, submission: Submission) -> dict[str, list[str]]:
        """The hooks that the submit names, as its context carries them: the agent's own app must declare them.

        Raises Rejected(`data.hooks.<point>`).
        """
        from runtime_core.hooks.declared import named_in_submit  # here, since most submits name none

        try:
            return named_in_submit(submission, self._apps.get(submission.agent))
        except Rejected:
            await self._read_manifests()  # the hook may be newer than what was read last
            return named_in_submit(submission, self._apps.get(submission.agent))

    async def _read_manifests(self) -> None:
        """All inputs that the apps of this namespace have declared. Unknown agents are the broker's to refuse."""
        bus = self._buses[0]
        stored = cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))
        self._read_at = time.monotonic()
        if stored == self._stored:
            return  # compiling the checks of a schema takes milliseconds
        checks: dict[str, InputCheck] = {}
        apps: dict[str, Manifest] = {}
        internal: set[str] = set()
        for data in stored:
            try:
                manifest = Manifest.from_json(data)
            except InvalidInput:
                continue  # a newer release's; its own admitters read it
            for name, entry in manifest.agents.items():
                checks[name] = InputCheck(name, entry)
                apps[name] = manifest
                if entry.internal:
                    internal.add(name)
        self._checks, self._apps, self._internal, self._stored = checks, apps, internal, stored
