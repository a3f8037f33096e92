"""`StateManager`: the state of tasks and of nodes that user code creates, with waits that the broker wakes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusError, BusLost, InvalidInput
from runtime_core.integrations.aworld.nodes.store import (
    HandleResult,
    NodeGroup,
    NodeStore,
    RunNode,
    RunNodeBusiType,
    RunNodeStatus,
    RunNodeTree,
    busi_type_of,
    status_of,
    tree_of,
    unknown,
)
from runtime_core.integrations.aworld.nodes.task_runs import TaskRuns, ended_node, in_order, recorded_nodes
from runtime_core.wire.ids import ROOT_RUN, idempotency_key, is_task_id

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore


LOOK_SECONDS = 30.0
BLOCK_MS = 5000
Found = TypeVar("Found")
Look = Callable[[str], Awaitable[Found | None]]


@dataclass(slots=True, eq=False)
class _Wait:
    woken: asyncio.Future[None]
    status: str = ""
    """The status from the stream, which may come after another reason to wake, before the wait continues."""


class StateWaits:
    """Waits for runs, nodes and groups of one partition. The partition's stream of states wakes them, without polling.

    All waits share one blocking read of the stream. A wait reads its run, node or group before it waits and each time
    it is woken, so the stream may be incomplete. All waits wake after a reconnect, and every `look_seconds`, in case
    the broker lost its last writes.

    A `name` is a name in the stream of states: `node/<id>`, `group/<id>`, `run/<task>/<run>`.
    """

    def __init__(
        self,
        bus: EventBus,
        open_reader: Callable[[EventBus], Awaitable[Transport]],
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._bus = bus
        self._open_reader = open_reader
        self._look_seconds = look_seconds
        self._waiting: dict[str, list[_Wait]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._cursor = ""
        """The position in the stream; empty if it has to be read first."""

    async def until(self, name: str, look: Look[Found]) -> Found:
        """Wait until `look` returns a value. It gets the status from the stream, or an empty text."""
        reported = ""
        while True:
            # Register before the check, so that a change in between wakes this wait.
            wait = self._expect(name)
            try:
                found = await look(reported)
                if found is not None:
                    return found
                await wait.woken
                reported = wait.status
            finally:
                self._forget(name, wait)

    async def close(self) -> None:
        """Stop reading, and cancel all waits."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        for waits in self._waiting.values():
            for wait in waits:
                wait.woken.cancel()

    def _expect(self, name: str) -> _Wait:
        wait = _Wait(asyncio.get_running_loop().create_future())
        self._waiting.setdefault(name, []).append(wait)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="states")
        return wait

    def _forget(self, name: str, wait: _Wait) -> None:
        waits = self._waiting[name]
        waits.remove(wait)
        if not waits:
            del self._waiting[name]

    async def _read(self) -> None:
        """Read the stream and wake waits."""
        reader: Transport | None = None
        try:
            look_at = 0.0
            while True:
                try:
                    reader = reader or await self._open_reader(self._bus)
                    if not self._cursor:
                        self._cursor = await self._last()
                        self._wake_all()
                        look_at = time.monotonic() + self._look_seconds
                    reply = await reader.blocking(
                        "XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", self._bus.keys.states, self._cursor
                    )
                except BusLost as lost:
                    for wait in [wait for waits in self._waiting.values() for wait in waits]:
                        if not wait.woken.done():
                            wait.woken.set_exception(lost)
                    return
                except BusError:
                    # Entries may be lost: continue at the end of the stream, and wake all waits.
                    self._cursor = ""
                    await asyncio.sleep(0.1)
                    continue
                for entry, fields in cast(list[list[list[Any]]], reply)[0][1] if reply else ():  # Any: RESP2 shapes
                    self._cursor = entry.decode()
                    self._wake(fields[1].decode(), fields[3].decode())
                if time.monotonic() > look_at:
                    self._cursor = ""
        finally:
            if reader is not None and reader is not self._bus.transport:
                await reader.close()

    async def _last(self) -> str:
        newest = await self._bus.transport.call("XREVRANGE", self._bus.keys.states, "+", "-", "COUNT", 1)
        entries = cast(list[list[bytes]], newest)
        return entries[0][0].decode() if entries else "0-0"

    def _wake(self, name: str, status: str) -> None:
        self._set(name, status)
        if name.startswith("run/") and name.endswith("/r"):
            # The task has ended, and so have all its runs. Those that ended earlier were woken then.
            for other in [waited for waited in self._waiting if waited.startswith(name + "/")]:
                self._set(other, "cancelled")

    def _wake_all(self) -> None:
        for name in list(self._waiting):
            self._set(name, "")

    def _set(self, name: str, status: str) -> None:
        for wait in self._waiting.get(name, ()):
            wait.status = status or wait.status
            if not wait.woken.done():
                wait.woken.set_result(None)


LIMIT = 1000
"""How many of the newest tasks `query_by_session` and `query_by_agent` read by default."""


class Connected(Protocol):
    """The part of a client that `StateManager` needs."""

    @property
    def buses(self) -> Sequence[EventBus]:
        """The partitions; empty before the client is connected."""
        ...

    async def open_reader(self, bus: EventBus) -> Transport:
        """Open a connection for blocking reads of a partition."""
        ...


class StateManager:
    """Nodes, groups and waits of a namespace, over a connected client: `async with StateManager(client) as state`.

    There are two kinds of nodes. The runs of tasks are read-only: they come from the broker while it holds them, and
    later from the trajectory store (`store`). User code creates other nodes and groups (`create_node`, `create_group`)
    on the broker. Open ones expire a week after their last change; ended ones are kept as long as ended tasks.

    Any process may call any method, and an agent may through `ctx.step(state.create_node, …)`.
    """

    def __init__(
        self, client: Connected, store: TrajectoryStore | None = None, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """`look_seconds`: how often a wait reads its node again, in case the broker lost its last writes."""
        self._client = client
        self._store = store
        self._look_seconds = look_seconds
        self._waits: dict[int, StateWaits] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all waits. The client stays open."""
        for waits in self._waits.values():
            await waits.close()
        self._waits = {}

    # -- nodes of user code --------------------------------------------------------------------------------------

    async def create_node(
        self,
        node_id: str | None = None,
        busi_type: RunNodeBusiType | str = RunNodeBusiType.TASK,
        busi_id: str = "",
        *,
        session_id: str = "",
        task_id: str = "",
        parent_node_id: str = "",
        msg_id: str = "",
        msg_from: str = "",
        group_id: str = "",
        sub_group_root_id: str = "",
        metadata: Mapping[str, Any] | None = None,  # Any: the user's own JSON
    ) -> RunNode:
        """Create a node with status INIT. Repeating the call with the same `node_id` returns the existing node.

        Without a `node_id` it gets a random one. With a `group_id` it is a member of the sub group `sub_group_root_id`,
        or else the root of a new one. Raises InvalidInput that names the wrong field.
        """
        node = RunNode(
            node_id=uuid.uuid4().hex if node_id is None else node_id,
            busi_type=busi_type_of(busi_type),
            busi_id=busi_id,
            session_id=session_id,
            task_id=task_id,
            parent_node_id=parent_node_id,
            msg_id=msg_id,
            msg_from=msg_from,
            group_id=group_id,
            sub_group_root_id=sub_group_root_id,
            metadata=dict(metadata or {}),
        )
        stored = self._stored()
        await stored.create_node(node)
        return await stored.node(node.node_id) or node

    async def run_node(self, node_id: str) -> bool:
        """INIT or BREAKED → RUNNING. Only one of several callers gets True.

        This method and those below return False if the node has the new status already. They raise InvalidInput for
        an unknown node, and TransitionRefused if its status does not allow the change.
        """
        return await self._stored().move(node_id, RunNodeStatus.RUNNING)

    async def run_break(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """RUNNING → BREAKED: the node waits for something. `run_node` resumes it."""
        return await self._stored().move(node_id, RunNodeStatus.BREAKED, result_msg, results)

    async def run_succeed(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """RUNNING or BREAKED → SUCCESS."""
        return await self._stored().move(node_id, RunNodeStatus.SUCCESS, result_msg, results)

    async def run_failed(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """→ FAILED; its group fails, too."""
        return await self._stored().move(node_id, RunNodeStatus.FAILED, result_msg, results)

    async def run_timeout(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """→ TIMEOUT; its group fails, too."""
        return await self._stored().move(node_id, RunNodeStatus.TIMEOUT, result_msg, results)

    async def save_result(self, node_id: str, *results: HandleResult) -> None:
        """Save results with a node, by name; saving a name again replaces it."""
        await self._stored().save(node_id, results)

    # -- groups --------------------------------------------------------------------------------------------------

    async def create_group(
        self,
        group_id: str | None = None,
        root_node_ids: Sequence[str] = (),
        *,
        session_id: str = "",
        parent_group_id: str = "",
        metadata: Mapping[str, Any] | None = None,  # Any: the user's own JSON
    ) -> NodeGroup:
        """Create a group with a sub group for each root node. The nodes may be created before or after it.

        With a `parent_group_id` it is itself a sub group of that group, which waits for it and fails with it. Repeating
        the call returns the existing group.
        """
        if isinstance(root_node_ids, str):
            raise InvalidInput("root_node_ids", f"{root_node_ids!r} is a single text: pass a list of ids")
        group = NodeGroup(
            group_id=uuid.uuid4().hex if group_id is None else group_id,
            session_id=session_id,
            parent_group_id=parent_group_id,
            metadata=dict(metadata or {}),
        )
        stored = self._stored()
        await stored.create_group(group, root_node_ids)
        return await stored.group(group.group_id) or group

    async def create_sub_group(self, group_id: str, root_node_id: str) -> bool:
        """Add a sub group to an open group. Return False if the group has one with this root."""
        return await self._stored().add_sub_group(group_id, root_node_id)

    async def finish_sub_group(
        self,
        group_id: str,
        root_node_id: str,
        status: RunNodeStatus | str = RunNodeStatus.SUCCESS,
        result_msg: str = "",
    ) -> bool:
        """Finish a sub group with SUCCESS or FAILED. The last SUCCESS and the first FAILED end the group."""
        return await self._stored().finish_sub_group(group_id, root_node_id, status_of(status), result_msg)

    async def get_group(self, group_id: str) -> NodeGroup | None:
        """Return a group, or None if it does not exist or has expired."""
        return await self._stored().group(group_id)

    async def query_by_group(self, group_id: str) -> list[RunNode]:
        """Return the members of a group, oldest first."""
        return await self._stored().indexed(f"group/{_named('group_id', group_id)}")

    # -- queries -------------------------------------------------------------------------------------------------

    async def get_node(self, node_id: str) -> RunNode | None:
        """Return a node of user code by its id, or a run by `<task>/<run>`; None if it does not exist any more."""
        if "/" not in _named("node_id", node_id):
            return await self._stored().node(node_id)
        task, _, run = node_id.partition("/")
        return await self._run(task, run)

    async def query_by_task(
        self,
        task_id: str,
        busi_type: RunNodeBusiType | str | None = None,
        status: RunNodeStatus | str | None = None,
    ) -> list[RunNode]:
        """Return the runs, calls and questions of a task, and its nodes of user code, oldest first.

        Finished calls and runs require a trajectory store.
        """
        _named("task_id", task_id)
        wanted = None if busi_type is None else busi_type_of(busi_type)
        standing = None if status is None else status_of(status)
        nodes = await self._of_task(task_id)
        return [
            node
            for node in nodes
            if (wanted is None or node.busi_type is wanted) and (standing is None or node.status is standing)
        ]

    async def query_by_session(self, session_id: str, limit: int = LIMIT) -> list[RunNode]:
        """Return the root runs of a session's tasks, and its nodes of user code, oldest first."""
        return await self._first_runs(limit, session=_named("session_id", session_id))

    async def query_by_agent(self, agent: str, limit: int = LIMIT) -> list[RunNode]:
        """Return the root runs of an agent's tasks, and its nodes of user code, oldest first."""
        return await self._first_runs(limit, agent=_named("agent", agent))

    async def tree(self, task_id: str) -> list[RunNodeTree]:
        """Return the nodes of a task as trees, each below the node that started it."""
        return tree_of(await self.query_by_task(task_id))

    async def _of_task(self, task_id: str) -> list[RunNode]:
        found: dict[str, RunNode] = {}
        if self._store is not None:
            recorded = await self._store.task(self._namespace(), task_id)
            if recorded is not None:
                found.update((node.node_id, node) for node in recorded_nodes(recorded))
        if is_task_id(task_id):
            for node in await self._runs().nodes(task_id):
                known = found.get(node.node_id)
                # The record of an ended run has more: names, times, outputs.
                if known is None or not (known.ended and node.ended):
                    found[node.node_id] = node
        own = await self._stored().indexed(f"task/{task_id}")
        return sorted([*found.values(), *own], key=in_order)

    async def _first_runs(self, limit: int, session: str | None = None, agent: str | None = None) -> list[RunNode]:
        if not isinstance(limit, int) or limit < 1:
            raise InvalidInput("limit", f"{limit!r} is not a whole number of at least 1")
        found: dict[str, RunNode] = {}
        if self._store is not None:
            for end in await self._store.tasks(self._namespace(), session=session, agent=agent, limit=limit):
                node = ended_node(end)
                found[node.node_id] = node
        runs = self._runs()
        wanted = [
            task
            for task, header in await runs.tasks(limit)
            if (session is None or header.session == session) and (agent is None or header.agent == agent)
        ]
        for running in await asyncio.gather(*(runs.node(task, ROOT_RUN) for task in wanted)):
            if running is not None:
                found[running.node_id] = running
        index = f"session/{session}" if session is not None else f"busi/{RunNodeBusiType.AGENT}/{agent}"
        own = await self._stored().indexed(index)
        return sorted([*found.values(), *own], key=in_order)

    # -- waits ---------------------------------------------------------------------------------------------------

    async def wait_for_node(self, node_id: str, timeout: float | None = None) -> RunNode:
        """Wait for the end of a node of user code, a run (`<task>/<run>`) or a task (its id).

        Raises InvalidInput (`node_id`) if it does not exist, and TimeoutError after `timeout` seconds; a timeout does
        not change the node.
        """
        _named("node_id", node_id)
        try:
            async with asyncio.timeout(timeout):
                if "/" in node_id:
                    task, _, run = node_id.partition("/")
                    return await self._wait_for_run(task, run)
                bus = await self._stored().bus_of("node", node_id)
                if bus is None and await self._runs().node(node_id, ROOT_RUN) is not None:
                    return await self._wait_for_run(node_id, ROOT_RUN)
                if bus is None:
                    raise unknown("node", node_id)
                return await self._waits_of(bus).until(f"node/{node_id}", lambda _: self._ended_node(node_id))
        except TimeoutError:
            if timeout is None:
                raise
            raise TimeoutError(f"node {node_id} has not ended within {timeout:g} s") from None

    async def wait_for_task(self, task_id: str, timeout: float | None = None) -> RunNode:
        """Wait for the end of any task. Raises like `wait_for_node`."""
        return await self.wait_for_node(idempotency_key(_named("task_id", task_id), ROOT_RUN), timeout)

    async def wait_for_group(self, group_id: str, timeout: float | None = None) -> NodeGroup:
        """Wait for the end of a group, with SUCCESS or FAILED. Raises like `wait_for_node`."""
        bus = await self._stored().bus_of("group", _named("group_id", group_id))
        if bus is None:
            raise unknown("group", group_id)
        try:
            async with asyncio.timeout(timeout):
                return await self._waits_of(bus).until(f"group/{group_id}", lambda _: self._ended_group(group_id))
        except TimeoutError:
            if timeout is None:
                raise
            raise TimeoutError(f"group {group_id} has not ended within {timeout:g} s") from None

    async def _wait_for_run(self, task: str, run: str) -> RunNode:
        bus = await self._runs().bus_of(task)

        gone = False

        async def look(reported: str) -> RunNode | None:
            nonlocal gone
            # Subscribe each time: a broker that lost its last writes lost the subscription, too.
            await bus.call("watch", task, "n")
            # A run that vanished with its task, without an entry in the stream, was cancelled.
            found = await self._run(task, run, reported or ("cancelled" if gone else ""))
            if found is None:
                if node is None or gone:
                    raise unknown("node", idempotency_key(task, run))
                gone = True  # it ended after the first look: the stream is about to have its status
                return None
            return found if found.ended else None

        node = await self._run(task, run)
        if node is not None and node.task_id != task and not node.ended:
            # The run is a separate task in another partition.
            return await self._wait_for_run(node.task_id, ROOT_RUN)
        return await self._waits_of(bus).until(f"run/{task}/{run}", look)

    async def _run(self, task: str, run: str, reported: str = "") -> RunNode | None:
        if not is_task_id(task):
            return None
        found = await self._runs().node(task, run, reported)
        if (found is None or (reported and found.ended)) and self._store is not None:
            recorded = {node.node_id: node for node in await self._of_task(task)}
            found = recorded.get(idempotency_key(task, run), found)
        return found

    async def _ended_node(self, node_id: str) -> RunNode | None:
        node = await self._stored().node(node_id)
        if node is None:
            raise unknown("node", node_id)
        return node if node.ended else None

    async def _ended_group(self, group_id: str) -> NodeGroup | None:
        group = await self._stored().group(group_id)
        if group is None:
            raise unknown("group", group_id)
        return group if group.ended else None

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _buses(self) -> Sequence[EventBus]:
        buses = self._client.buses
        if not buses:
            raise InvalidInput("client", "is not connected: use StateManager inside `async with Client.connect(…)`")
        return buses

    def _stored(self) -> NodeStore:
        return NodeStore(self._buses())

    def _runs(self) -> TaskRuns:
        return TaskRuns(self._buses())

    def _namespace(self) -> str:
        return self._buses()[0].keys.namespace

    def _waits_of(self, bus: EventBus) -> StateWaits:
        partition = bus.keys.partition
        if partition not in self._waits:
            self._waits[partition] = StateWaits(bus, self._client.open_reader, look_seconds=self._look_seconds)
        return self._waits[partition]


def _named(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(field, f"{value!r} is not an id: pass non-empty text")
    return value
