"""From a valid submit to a started task: the checks that need the broker, the same for every way in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from runtime_core.bus.claims import find_place, submit_once
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import DEFAULT_PRIORITY, Begun, NewTask, Submitted
from runtime_core.declare.manifest import InputCheck, Manifest
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import instance_address, partition_of
from runtime_core.wire.commands import Conf, Submission, default_task_id

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
        self._read_at = -MANIFEST_SECONDS

    async def admit(
        self,
        submission: Submission,
        *,
        reply: str | Callable[[int], str] = "",
        epoch: str = "",
        streamed: bool = False,
        begun: Begun | None = None,
    ) -> Submitted:
        """Check and start a task; `begun` makes it a fork of another.

        `streamed`: its output is wanted as a stream, whatever its conf says. `reply` is where its end is told, or gives
        that for the task's partition.

        Raises `Rejected` (or its `NotYet`) with the field, `InvalidInput` for an input that its agent's schema
        refuses, `Fenced` where `epoch` is not the newest admitter's.
        """
        await self._check_input(submission)
        if begun is None:  # a fork repeats a task that another agent has started
            self._check_outside(submission.agent)
        hooks = await self._hooks_of(submission) if submission.hooks else {}
        if submission.deadline is not None and submission.deadline <= time.time() * 1000:
            raise Rejected("deadline", "has passed before the task was admitted", task_id=submission.task_id)

        def new_task(partition: int) -> NewTask:
            return NewTask(
                task=submission.task_id,
                source=submission.source,
                event_id=submission.event_id,
                digest=submission.digest,
                agent=submission.agent,
                data=submission.input_json,
                key=submission.key,
                reply=reply if isinstance(reply, str) else reply(partition),
                context=_context(submission, hooks),
                session=submission.session_id,
                max_steps=submission.conf.max_steps or 0,
                timeout_ms=_timeout_ms(submission),
                epoch=epoch,
                streamed=_streamed(submission.conf, streamed),
                limits=_limits(submission.conf),
                begun=begun,
                tenant=submission.tenant,
                priority=DEFAULT_PRIORITY if submission.conf.priority is None else submission.conf.priority,
                in_turn=True,
            )

        id_home = partition_of(default_task_id(submission.source, submission.event_id), len(self._buses))
        return await submit_once(self._buses, self.partition_for(submission), id_home, new_task)

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

    def partition_for(self, submission: Submission) -> int:
        """A task lives with the instance that it asks, where the user gave that a key; else by its own id."""
        if submission.key:
            return partition_of(instance_address(submission.agent, submission.key), len(self._buses))
        return partition_of(submission.partition_key, len(self._buses))

    async def find(self, task: str) -> EventBus:
        """The partition of a task that was submitted to this namespace."""
        return await find_place(self._buses, task)

    async def _check_input(self, submission: Submission) -> None:
        check = self._checks.get(submission.agent)
        if check is None or time.monotonic() - self._read_at > MANIFEST_SECONDS:
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
        from runtime_core.hooks.selection import named_in_submit  # here, since most submits name none

        try:
            return named_in_submit(submission, self._apps.get(submission.agent))
        except Rejected:
            await self._read_manifests()  # the hook may be newer than what was read last
            return named_in_submit(submission, self._apps.get(submission.agent))

    async def _read_manifests(self) -> None:
        """All inputs that the apps of this namespace have declared. Unknown agents are the broker's to refuse."""
        bus = self._buses[0]
        stored = cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))
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
        self._checks, self._apps, self._internal = checks, apps, internal
        self._read_at = time.monotonic()


def _streamed(conf: Conf, wanted: bool) -> int:
    if conf.streaming_mode is not None:
        return 2 if conf.streaming_mode.steps else 1
    return int(wanted)


def _limits(conf: Conf) -> bytes:
    limits = {"tokens": conf.max_tokens, "cost": conf.max_cost}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return msgspec.json.encode(given) if given else b""


def _timeout_ms(submission: Submission) -> int:
    """The shorter of the task's own limit and what is left until its deadline; 0 for none."""
    limits = []
    if submission.conf.timeout_seconds is not None:
        limits.append(max(1, int(submission.conf.timeout_seconds * 1000)))
    if submission.deadline is not None:
        limits.append(max(1, submission.deadline - time.time_ns() // 1_000_000))
    return min(limits, default=0)


def _context(submission: Submission, hooks: dict[str, list[str]]) -> bytes:
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
    if submission.conf.engine_wait_seconds is not None:
        context["engine_wait_seconds"] = submission.conf.engine_wait_seconds
    if submission.conf.engine:
        context["engine"] = submission.conf.engine
    if hooks:
        context["hooks"] = hooks
    return msgspec.json.encode(context) if context else b""
