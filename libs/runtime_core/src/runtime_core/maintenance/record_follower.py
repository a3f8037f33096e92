"""Follows a partition's record: counts, logs and traces ended tasks, and lets the record be trimmed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import cast

import msgspec

from runtime_core.bus.connection import Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.spans import task_span
from runtime_core.errors import ServerError
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import STATUSES
from runtime_core.telemetry.spans import tracing

LINES_MAX = 20
READ_BATCH = 5000
AGENTS_SECONDS = 5.0
"""How long the list of agents is cached."""
OTHER = "other"
"""Label of tasks of agents that no app declares, such as task-end hooks."""

logger = logging.getLogger(__name__)


class _Error(msgspec.Struct):
    type: str = ""


_ERROR = msgspec.json.Decoder(_Error)


class RecordFollower:
    """Reads the record as the group `state-manager`."""

    def __init__(self, bus: EventBus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._cursor = ""
        self._agents: set[str] = set()
        self._agents_read = float("-inf")
        for status in STATUSES:
            metrics.task_seconds[status]  # exports 0 from the start, so that a first failure is an increase
            metrics.tasks_ended[OTHER, status]

    async def follow(self) -> None:
        """Count ended tasks, then publish this group's position: the record is trimmed behind its slowest group."""
        call, keys = self._bus.transport.call, self._bus.keys
        if not self._cursor:
            self._cursor = await self._published_cursor()
        self._cursor = await self._bus.within_record(self._cursor)
        if time.monotonic() - self._agents_read > AGENTS_SECONDS:
            await self._read_agents()
        while True:
            reply = cast(
                list[list[Reply]], await call("XRANGE", keys.record, f"({self._cursor}", "+", "COUNT", READ_BATCH)
            )
            if not reply:
                return
            ends = [end for entry in reply if (end := _task_end(cast(list[bytes], entry[1]))) is not None]
            if any(end.agent not in self._agents for end in ends):
                await self._read_agents()
            for end in ends:
                agent = end.agent if end.agent in self._agents else OTHER
                self._metrics.tasks_ended[agent, end.status].inc()
                self._metrics.task_seconds[end.status].observe(end.seconds)
            if tracing():
                for end in ends:
                    self._trace(end)
            _log(ends)
            self._cursor = cast(bytes, reply[-1][0]).decode()
            await self._bus.publish_cursor(STATE_MANAGER, self._cursor)

    async def _read_agents(self) -> None:
        """Read the declared agents: each has its own metric series from the start."""
        self._agents_read = time.monotonic()
        known = cast(list[bytes], await self._bus.transport.call("HKEYS", self._bus.keys.agents))
        for agent in {name.decode() for name in known} - self._agents:
            self._agents.add(agent)
            for status in STATUSES:
                self._metrics.tasks_ended[agent, status]

    def _trace(self, end: _End) -> None:
        task_span(
            self._bus.keys.namespace,
            end.task,
            traceparent=end.trace,
            agent=end.agent,
            status=end.status,
            steps=int(end.steps),
            created_ms=end.created_ms,
            ended_ms=end.ended_ms,
            error=end.error,
            again=end.again,
        )

    async def _published_cursor(self) -> str:
        call, keys = self._bus.transport.call, self._bus.keys
        try:
            groups = cast(list[list[Reply]], await call("XINFO", "GROUPS", keys.record))
        except ServerError:
            await self._bus.make_groups(())
            return "0-0"
        for group in groups:
            named = dict(zip(group[::2], group[1::2], strict=True))
            if named[b"name"] == STATE_MANAGER.encode():
                return cast(bytes, named[b"last-delivered-id"]).decode()
        return "0-0"


@dataclass(slots=True)
class _End:
    """An ended task in the record."""

    task: str
    status: str
    agent: str
    steps: str
    created_ms: float
    ended_ms: float
    error: str
    """The error type of a failed task."""
    trace: str
    """The traceparent of its context, or empty."""
    again: bool
    """Whether it had ended before and was reopened."""

    @property
    def seconds(self) -> float:
        return max(0.0, (self.ended_ms - self.created_ms) / 1000)


def _task_end(fields: list[bytes]) -> _End | None:
    if len(fields) < 6 or fields[4] != b"e":
        return None
    status, agent, steps, created, ended, *_ = fields[5].decode().split("\n")
    error = _ERROR.decode(fields[7]).type if len(fields) > 7 and fields[7] else ""
    more = dict(zip(fields[8::2], fields[9::2], strict=True))
    trace = more.get(b"x", b"").decode()
    return _End(fields[1].decode(), status, agent, steps, float(created), float(ended), error, trace, b"g" in more)


def _log(ends: list[_End]) -> None:
    """Log one line per task, or one line for many."""
    if len(ends) > LINES_MAX:
        counts = Counter(end.status for end in ends)
        logger.info("%d tasks ended: %s", len(ends), ", ".join(f"{count} {status}" for status, count in counts.items()))
        return
    for end in ends:
        level = logging.INFO if end.status == "completed" else logging.WARNING
        logger.log(
            level, "task %s (%s) %s in %.2f s, %s steps", end.task, end.agent, end.status, end.seconds, end.steps
        )
