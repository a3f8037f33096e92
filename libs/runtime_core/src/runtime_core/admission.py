"""From a valid submit to a started task: the checks that need the broker, the same for every way in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import NewTask, Submitted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.identifiers import instance_address, partition_of
from runtime_core.manifest import InputCheck, Manifest
from runtime_core.submission import Submission

MANIFEST_SECONDS = 2.0
"""How long a manifest that was read is taken for the newest."""


class Admission:
    """Submits tasks to the partitions of a namespace."""

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses
        self._checks: dict[str, InputCheck] = {}
        self._read_at = -MANIFEST_SECONDS

    async def admit(
        self, submission: Submission, *, reply: str = "", epoch: str = "", streamed: bool = False
    ) -> Submitted:
        """Check and start a task.

        Raises `Rejected` (or its `NotYet`) with the field, `InvalidInput` for an input that its agent's schema
        refuses, `Fenced` where `epoch` is not the newest admitter's.
        """
        await self._check_input(submission)
        if submission.deadline is not None and submission.deadline <= time.time() * 1000:
            raise Rejected("deadline", "has passed before the task was admitted", task_id=submission.task_id)
        bus = self._buses[self.partition_for(submission)]
        if len(self._buses) > 1:
            await self._note_place(submission.task_id, bus)
        return await bus.submit(
            NewTask(
                task=submission.task_id,
                source=submission.source,
                event_id=submission.event_id,
                digest=submission.digest,
                agent=submission.agent,
                data=submission.input_json,
                key=submission.key,
                reply=reply,
                context=_context(submission),
                session=submission.session_id,
                max_steps=submission.conf.max_steps or 0,
                timeout_ms=_timeout_ms(submission),
                epoch=epoch,
                streamed=streamed,
            )
        )

    def partition_for(self, submission: Submission) -> int:
        """A task lives with the instance that it asks, where the user gave that a key; else by its own id."""
        if submission.key:
            return partition_of(instance_address(submission.agent, submission.key), len(self._buses))
        return partition_of(submission.partition_key, len(self._buses))

    async def find(self, task: str) -> EventBus:
        """The partition of a task that was submitted to this namespace."""
        home = self._buses[partition_of(task, len(self._buses))]
        if len(self._buses) == 1:
            return home
        noted = await home.transport.call("HGET", home.keys.places, task)
        return self._buses[int(cast(bytes, noted))] if noted is not None else home

    async def _note_place(self, task: str, bus: EventBus) -> None:
        home = self._buses[partition_of(task, len(self._buses))]
        if home is not bus:
            await home.transport.call("HSET", home.keys.places, task, bus.keys.partition)

    async def _check_input(self, submission: Submission) -> None:
        check = self._checks.get(submission.agent)
        if check is None or time.monotonic() - self._read_at > MANIFEST_SECONDS:
            await self._read_manifests()
            check = self._checks.get(submission.agent)
        if check is not None:
            check.json(submission.input_json)

    async def _read_manifests(self) -> None:
        """All inputs that the apps of this namespace have declared. Unknown agents are the broker's to refuse."""
        bus = self._buses[0]
        stored = cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))
        checks: dict[str, InputCheck] = {}
        for data in stored:
            try:
                manifest = Manifest.from_json(data)
            except InvalidInput:
                continue  # a newer release's; its own admitters read it
            for name, entry in manifest.agents.items():
                checks[name] = InputCheck(name, entry)
        self._checks = checks
        self._read_at = time.monotonic()


async def announce(buses: Sequence[EventBus], manifest: Manifest) -> None:
    """Publish what an app offers, so that submits can be checked and names of other apps be found."""
    data = manifest.to_json()
    for bus in buses:
        call, keys = bus.transport.call, bus.keys
        await call("HSET", keys.manifests, manifest.app, data)
        for name, agent in manifest.agents.items():
            await call("HSET", keys.agents, name, f"agent:{agent.pool}" if agent.pool else "agent")
        for name, tool in manifest.tools.items():
            await call("HSET", keys.tools, name, f"tool:{tool.pool}" if tool.pool else "tool")


def _timeout_ms(submission: Submission) -> int:
    """The shorter of the task's own limit and what is left until its deadline; 0 for none."""
    limits = []
    if submission.conf.timeout_seconds is not None:
        limits.append(max(1, int(submission.conf.timeout_seconds * 1000)))
    if submission.deadline is not None:
        limits.append(max(1, submission.deadline - time.time_ns() // 1_000_000))
    return min(limits, default=0)


def _context(submission: Submission) -> bytes:
    """What travels with every event of the task besides its data; mostly nothing."""
    context: dict[str, object] = {}
    if submission.traceparent:
        context["traceparent"] = submission.traceparent
    if submission.tracestate:
        context["tracestate"] = submission.tracestate
    if submission.session_id:
        context["session_id"] = submission.session_id
    if submission.metadata:
        context["metadata"] = submission.metadata
    if submission.tenant:
        context["tenant"] = submission.tenant
    if submission.deadline is not None:
        context["deadline"] = submission.deadline / 1000
    return msgspec.json.encode(context) if context else b""
