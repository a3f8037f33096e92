"""The runs of tasks as nodes, read from the broker while it holds them, and then from the trajectory store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from runtime_core.bus.connection import Reply
from runtime_core.bus.connection import fields as hash_fields
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import group_of
from runtime_core.bus.tasks import find_place
from runtime_core.errors import ServerError
from runtime_core.integrations.aworld.nodes.store import HandleResult, RunNode, RunNodeBusiType, RunNodeStatus
from runtime_core.runs.shared_context import unwrapped
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.ids import ROOT_RUN, RunField, RunHeader, child_run, idempotency_key
from runtime_core.wire.step import ENDED, RESULT_OK, Status, Step, TaskEnd

_KINDS = {
    "agent": RunNodeBusiType.AGENT,
    "tool": RunNodeBusiType.TOOL,
    "engine": RunNodeBusiType.TOOL,
    "human": RunNodeBusiType.HUMAN,
}
"""The kinds of steps that are nodes. Others (sleeps, deltas, local steps) are not."""


def recorded_nodes(recorded: TaskTrajectory) -> list[RunNode]:
    """Return the runs, calls and questions of a recorded task; of several attempts, the last one."""
    found: dict[str, RunNode] = {}
    for step in recorded.steps:
        if step.kind in _KINDS:
            node = _node(recorded.task, step, recorded.end)
            found[node.node_id] = node
    if recorded.end is not None:
        root = idempotency_key(recorded.task, ROOT_RUN)
        # A task that was cancelled or timed out may have no row for its root run.
        found.setdefault(root, ended_node(recorded.end))
        if recorded.end.status != Status.COMPLETED:
            found[root] = msgspec.structs.replace(
                found[root], status=_status(recorded.end.status, _type(recorded.end)), result_msg=_message(recorded.end)
            )
    return list(found.values())


def ended_node(end: TaskEnd) -> RunNode:
    """Return a task's root run, from the record of the task's end."""
    return RunNode(
        node_id=idempotency_key(end.task, ROOT_RUN),
        busi_type=RunNodeBusiType.AGENT,
        busi_id=end.agent,
        task_id=end.task,
        session_id=end.session,
        status=_status(end.status, _type(end)),
        result_msg=_message(end),
        create_time=end.created / 1000,
        end_time=end.ended / 1000,
    )


def _node(task: str, step: Step, end: TaskEnd | None) -> RunNode:
    run = child_run(step.run, step.step) if step.step else step.run
    above = run.rpartition("/")[0]
    status = _status(step.status, step.error.type if step.error else "")
    message = f"{step.error.type}: {step.error.message}" if step.error else ""
    output = msgspec.json.decode(step.output) if bytes(step.output) else None
    metadata: dict[str, object] = {"key": step.key} if step.key else {}
    if step.attempt > 1:
        metadata["attempts"] = step.attempt
    return RunNode(
        node_id=idempotency_key(task, run),
        busi_type=_KINDS[step.kind],
        busi_id=step.name,
        task_id=task,
        session_id=end.session if end else "",
        parent_node_id=idempotency_key(task, above) if above else "",
        status=status,
        result_msg=message,
        results=[HandleResult(step.name, status, message, output)],
        create_time=step.started / 1000,
        execute_time=step.started / 1000,
        end_time=step.ended / 1000,
        metadata=metadata,
    )


def _status(status: str, error: str) -> RunNodeStatus:
    if status == Status.COMPLETED:
        return RunNodeStatus.SUCCESS
    return RunNodeStatus.TIMEOUT if error in ("TimeLimit", "HumanTimeout") else RunNodeStatus.FAILED


def _type(end: TaskEnd) -> str:
    return end.error.type if end.error else ""


def _message(end: TaskEnd) -> str:
    return f"{end.error.type}: {end.error.message}" if end.error else ""


Fields = dict[str, bytes]

_NOT_BEGUN = ("mail", "nest")
_STATUSES = {
    Status.COMPLETED: RunNodeStatus.SUCCESS,
    Status.FAILED: RunNodeStatus.FAILED,
    Status.CANCELLED: RunNodeStatus.FAILED,
}
_OPEN_STEPS = {
    "t": RunNodeBusiType.TOOL,
    "r": RunNodeBusiType.TOOL,
    "s": RunNodeBusiType.TOOL,
    "h": RunNodeBusiType.HUMAN,
}
"""The letter of an open step → its type. Called agents have separate runs, and sleeps are not nodes."""


class TaskRuns:
    """Reads the tasks of a namespace."""

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses

    async def bus_of(self, task: str) -> EventBus:
        return await find_place(self._buses, task)

    async def nodes(self, task: str) -> list[RunNode]:
        """Return the runs and open steps of a task, oldest first; an empty list if the broker does not have it."""
        bus = await self.bus_of(task)
        call, keys = bus.transport.call, bus.keys
        root = hash_fields(await call("HGETALL", keys.task(task)))
        if "status" not in root:
            return []
        session = _header(root.get("h")).session
        elsewhere: list[tuple[str, str]] = []
        children = []
        for name, value in root.items():
            if name.startswith("k:") and value.startswith(b"@"):
                elsewhere.append((name[2:], value.decode().partition(":")[2]))
            elif name.startswith("k:"):
                children.append((name[2:], call("HGETALL", keys.run(task, name[2:]))))
        runs = {ROOT_RUN: root} | {run: fields for run, read in children if (fields := hash_fields(await read))}
        # Concurrently: each one asks the broker whether a consumer holds its entry.
        found = await asyncio.gather(*(self._run(bus, task, run, fields, session) for run, fields in runs.items()))
        for run, fields in runs.items():
            found += _open_steps(task, run, fields, session)
        others = await asyncio.gather(*(self.node(other, ROOT_RUN) for _, other in elsewhere))
        for (run, _), there in zip(elsewhere, others, strict=True):
            if there is not None:
                found.append(msgspec.structs.replace(there, parent_node_id=_parent(task, run)))
        return sorted(found, key=in_order)

    async def node(self, task: str, run: str, reported: str = "") -> RunNode | None:
        """Return a run, from the broker or from `reported`, its end in the stream of states; None if neither has it.

        A run in another partition is a separate task there; its root run is returned.
        """
        bus = await self.bus_of(task)
        call, keys = bus.transport.call, bus.keys
        fields = hash_fields(await call("HGETALL", keys.run(task, run)))
        if "h" in fields or "status" in fields:
            head = fields.get("h") if run == ROOT_RUN else await call("HGET", keys.task(task), RunField.HEADER)
            return await self._run(bus, task, run, fields, _header(head).session)
        if run == ROOT_RUN:
            return None
        above, _, step = run.rpartition("/")
        place, journaled, head = await _together(
            call("HGET", keys.task(task), f"k:{run}"),
            call("HGET", keys.run(task, above), f"j:{step}"),
            call("HGET", keys.task(task), RunField.HEADER),
        )
        if isinstance(place, bytes) and place.startswith(b"@"):
            return await self.node(place.decode().partition(":")[2], ROOT_RUN)
        if isinstance(journaled, bytes):
            return _finished(task, run, _header(head).session, journaled)
        if reported in _STATUSES:
            return RunNode(
                node_id=idempotency_key(task, run),
                busi_type=RunNodeBusiType.AGENT,
                task_id=task,
                parent_node_id=_parent(task, run),
                status=_STATUSES[reported],
                result_msg="Cancelled: its task has ended" if reported == "cancelled" else "",
            )
        return None

    async def tasks(self, limit: int) -> list[tuple[str, RunHeader]]:
        """Return the newest tasks on the broker, as (id, header), newest first."""
        found: list[tuple[int, str, RunHeader]] = []
        for bus in self._buses:
            call, keys = bus.transport.call, bus.keys
            ids = [item.decode() for item in cast(list[bytes], await call("ZRANGE", keys.index, -limit, -1))]
            reads = [call("HGET", keys.task(task), RunField.HEADER) for task in ids]
            for task, read in zip(ids, reads, strict=True):
                head = await read
                if head is not None:
                    header = _header(head)
                    found.append((header.created_ms, task, header))
        found.sort(reverse=True)
        return [(task, header) for _, task, header in found[:limit]]

    async def _run(self, bus: EventBus, task: str, run: str, fields: Fields, session: str) -> RunNode:
        header = _header(fields.get("h"))
        status = await self._status(bus, header.stream, fields)
        final = msgspec.json.decode(fields["out"]) if "out" in fields else {}
        error: Mapping[str, str] = final.get("error") or {}
        if error.get("type") == "TimeLimit":
            status = RunNodeStatus.TIMEOUT
        message = ": ".join(part for part in (error.get("type", ""), error.get("message", "")) if part)
        results = [HandleResult(header.agent, status, message, final.get("output"))] if final else []
        return RunNode(
            node_id=idempotency_key(task, run),
            busi_type=RunNodeBusiType.AGENT,
            busi_id=header.agent,
            task_id=task,
            session_id=session,
            parent_node_id=_parent(task, run),
            msg_id=header.event_id,
            msg_from=header.source,
            status=status,
            result_msg=message,
            results=results,
            create_time=header.created_ms / 1000,
            end_time=int(fields["ended"]) / 1000 if "ended" in fields else None,
            metadata={"key": header.key} if header.key else {},
        )

    async def _status(self, bus: EventBus, stream: str, fields: Fields) -> RunNodeStatus:
        status, cur = fields.get("status", b"").decode(), fields.get("cur", b"").decode()
        if status in ENDED:
            return _STATUSES[status]
        if cur in _NOT_BEGUN:
            return RunNodeStatus.INIT
        if "-" not in cur:
            return RunNodeStatus.BREAKED  # held, retry, pend, park: it waits without a process
        # Its entry is waiting on the stream, or a handler has it.
        try:
            pending = await bus.transport.call("XPENDING", bus.keys.stream(stream), group_of(stream), cur, cur, 1)
        except ServerError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            pending = None  # no handler has ever read this stream
        if pending:
            return RunNodeStatus.RUNNING
        return RunNodeStatus.BREAKED if "u" in fields else RunNodeStatus.INIT


def in_order(node: RunNode) -> tuple[float, str]:
    """Return the sort key of a node: creation, then id, so that a run precedes the runs that it started."""
    return node.create_time, node.node_id


def _open_steps(task: str, run: str, fields: Fields, session: str) -> Iterable[RunNode]:
    begun = _header(fields.get("h")).created
    for name, value in fields.items():
        if not name.startswith("m:") or (kind := _OPEN_STEPS.get(chr(value[8]))) is None:
            continue
        step = name[2:]
        asked = fields.get(f"q:{step}") if kind is RunNodeBusiType.HUMAN else None
        metadata: dict[str, Any] = {"engine": {"r": "ray", "s": "spark"}[chr(value[8])]} if value[8] in b"rs" else {}
        if asked is not None:
            metadata["question"] = msgspec.json.decode(asked[13:])
        yield RunNode(
            node_id=idempotency_key(task, child_run(run, step)),
            busi_type=kind,
            task_id=task,
            session_id=session,
            parent_node_id=idempotency_key(task, run),
            status=RunNodeStatus.BREAKED if kind is RunNodeBusiType.HUMAN else RunNodeStatus.RUNNING,
            # The broker keeps no time for an open call, so use that of its run.
            create_time=int((asked[:13] if asked else begun) or 0) / 1000,
            metadata=metadata,
        )


def _finished(task: str, run: str, session: str, journaled: bytes) -> RunNode:
    """Return an ended run from its result in the journal of the run that called it."""
    status = RunNodeStatus.SUCCESS if journaled[8:9] == RESULT_OK else RunNodeStatus.FAILED
    payload = msgspec.json.decode(unwrapped(journaled[22:])[0])
    message = "" if status is RunNodeStatus.SUCCESS else f"{payload.get('type', '')}: {payload.get('message', '')}"
    return RunNode(
        node_id=idempotency_key(task, run),
        busi_type=RunNodeBusiType.AGENT,
        task_id=task,
        session_id=session,
        parent_node_id=_parent(task, run),
        status=status,
        result_msg=message,
        results=[HandleResult("", status, message, payload if not message else None)],
        end_time=int(journaled[9:22]) / 1000,
    )


def _parent(task: str, run: str) -> str:
    above = run.rpartition("/")[0]
    return idempotency_key(task, above) if above else ""


def _header(field: Reply) -> RunHeader:
    return RunHeader.parse(field if isinstance(field, bytes) else None)


async def _together(*reads: Any) -> list[Reply]:  # Any: calls of a transport
    return [await read for read in reads]
