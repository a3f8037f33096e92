"""`StateManager`: the state of tasks and of work that user code counts itself, and waits that the broker wakes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from runtime_core.aworld.nodes.runs import TaskRuns, ended_node, in_order, recorded_nodes
from runtime_core.aworld.nodes.stored import (
    HandleResult,
    NodeGroup,
    RunNode,
    RunNodeBusiType,
    RunNodeStatus,
    RunNodeTree,
    StoredNodes,
    busi_type_of,
    status_of,
    tree_of,
)
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusError, InvalidInput
from runtime_core.ids import ROOT_RUN, idempotency_key, is_task_id

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore


LOOK_SECONDS = 30.0
BLOCK_MS = 5000
Found = TypeVar("Found")
Look = Callable[[str], Awaitable[Found | None]]


class StateWaits:
    """Waits for runs, nodes and groups of one partition. The partition's stream of states wakes them, without polling.

    All waits of a partition share one blocking read. A wait looks at its run, node or group first, and again whenever
    it is woken, so the stream need not be complete. After a reconnect every wait is woken. The same happens once in a
    while, in case the broker has lost its last writes.

    A `name` is as on the stream of states: `node/<id>`, `group/<id>`, `run/<task>/<run>`.
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
        self._waiting: dict[str, list[asyncio.Future[str]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._cursor = ""
        """Where the stream is read from; empty while that has to be found out."""

    async def until(self, name: str, look: Look[Found]) -> Found:
        """Wait until `look` gives something. It is given the status of which the stream told, or an empty text."""
        told = ""
        while True:
            # Expected before the look: what happens in between wakes it.
            woken = self._expect(name)
            try:
                found = await look(told)
                if found is not None:
                    return found
                told = await woken
            finally:
                self._forget(name, woken)

    async def close(self) -> None:
        """Stop reading; waits that are left are cancelled."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    def _expect(self, name: str) -> asyncio.Future[str]:
        woken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(woken)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="states")
        return woken

    def _forget(self, name: str, woken: asyncio.Future[str]) -> None:
        futures = self._waiting[name]
        futures.remove(woken)
        if not futures:
            del self._waiting[name]

    async def _read(self) -> None:
        """Read the stream, from the first wait on."""
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
                except BusError:
                    # What was said meanwhile may be lost: start again from what is there, and let everybody look.
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
            # With a task all its runs are over. One that had an end of its own was told of it before.
            for other in [waited for waited in self._waiting if waited.startswith(name + "/")]:
                self._set(other, "cancelled")

    def _wake_all(self) -> None:
        for name in list(self._waiting):
            self._set(name, "")

    def _set(self, name: str, status: str) -> None:
        for woken in self._waiting.get(name, ()):
            if not woken.done():
                woken.set_result(status)


LIMIT = 1000
"""How many of the newest tasks `query_by_session` and `query_by_agent` look at, where nothing else is said."""


class Connected(Protocol):
    """What a `StateManager` needs of a client."""

    @property
    def buses(self) -> Sequence[EventBus]:
        """The partitions; none before it is connected."""
        ...

    async def open_reader(self, bus: EventBus) -> Transport:
        """A connection for blocking reads of a partition."""
        ...


class StateManager:
    """Nodes, groups and waits of a namespace, over a connected client: `async with StateManager(client) as state`.

    Two kinds of nodes have one face. The runs of tasks are read from the broker while it holds them, and from the
    trajectory store (`store`) afterwards; nobody can change them from here. Nodes and groups that user code makes
    (`create_node`, `create_group`) are kept on the broker: a week from their last change while they are open, and as
    long as an ended task once they have ended.

    Every method may be called from any process, and from an agent through `ctx.step(state.create_node, …)`.
    """

    def __init__(
        self, client: Connected, store: TrajectoryStore | None = None, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """`look_seconds`: how often a wait looks again by itself, for a broker that has lost its last writes."""
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

    # -- nodes that user code makes ------------------------------------------------------------------------------

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
        """Make a node with status INIT. The same call with the same `node_id` again gives the node that is there.

        Without a `node_id` it gets a random one. With a `group_id` it is a member of the sub group that
        `sub_group_root_id` names, or of its own. Raises InvalidInput with the field that is wrong.
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
        """INIT or BREAKED → RUNNING. Of several callers one is told True, all others False.

        This and the methods below raise InvalidInput for an unknown node, and TransitionRefused where the node's
        status does not allow it. They return False where the node had this status already.
        """
        return await self._stored().move(node_id, RunNodeStatus.RUNNING)

    async def run_break(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """RUNNING → BREAKED: it waits for something; `run_node` takes it up again."""
        return await self._stored().move(node_id, RunNodeStatus.BREAKED, result_msg, results)

    async def run_succeed(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """RUNNING or BREAKED → SUCCESS."""
        return await self._stored().move(node_id, RunNodeStatus.SUCCESS, result_msg, results)

    async def run_failed(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """→ FAILED; its group fails with it."""
        return await self._stored().move(node_id, RunNodeStatus.FAILED, result_msg, results)

    async def run_timeout(self, node_id: str, result_msg: str = "", results: Iterable[HandleResult] = ()) -> bool:
        """→ TIMEOUT; its group fails with it."""
        return await self._stored().move(node_id, RunNodeStatus.TIMEOUT, result_msg, results)

    async def save_result(self, node_id: str, *results: HandleResult) -> None:
        """Keep results with a node, by their names; saving a name again replaces it."""
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
        """Make a group with one sub group for each root node; the nodes may be made before or after it.

        With a `parent_group_id` it is itself a sub group of that one, which waits for it and fails with it. The same
        call again gives the group that is there.
        """
        if isinstance(root_node_ids, str):
            raise InvalidInput("root_node_ids", f"{root_node_ids!r} is one text: give a list of ids")
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
        """Add a sub group to a group that has not ended; False where it has one of this root."""
        return await self._stored().add_sub_group(group_id, root_node_id)

    async def finish_sub_group(
        self,
        group_id: str,
        root_node_id: str,
        status: RunNodeStatus | str = RunNodeStatus.SUCCESS,
        result_msg: str = "",
    ) -> bool:
        """Finish a sub group, SUCCESS or FAILED. With the last one the group ends SUCCESS, with a failed one FAILED."""
        return await self._stored().finish_sub_group(group_id, root_node_id, status_of(status), result_msg)

    async def get_group(self, group_id: str) -> NodeGroup | None:
        """A group; None where there is none (any more)."""
        return await self._stored().group(group_id)

    async def query_by_group(self, group_id: str) -> list[RunNode]:
        """The members of a group, oldest first."""
        return await self._stored().indexed(f"group/{_named('group_id', group_id)}")

    # -- what there is -------------------------------------------------------------------------------------------

    async def get_node(self, node_id: str) -> RunNode | None:
        """A node of user code by its id, or a run by `<task>/<run>`; None where there is none (any more)."""
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
        """The runs, calls and questions of a task and the nodes that user code made for it, oldest first.

        Finished calls and runs are there only with a trajectory store.
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
        """The first runs of a session's tasks and its nodes of user code, oldest first. `query_by_task` has more."""
        return await self._first_runs(limit, session=_named("session_id", session_id))

    async def query_by_agent(self, agent: str, limit: int = LIMIT) -> list[RunNode]:
        """The first runs of the tasks that this agent was given and its nodes of user code, oldest first."""
        return await self._first_runs(limit, agent=_named("agent", agent))

    async def tree(self, task_id: str) -> list[RunNodeTree]:
        """The nodes of a task below what started them."""
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
                # The record has more of what has ended: names, times, outputs.
                if known is None or not (known.ended and node.ended):
                    found[node.node_id] = node
        own = await self._stored().indexed(f"task/{task_id}")
        return sorted([*found.values(), *own], key=in_order)

    async def _first_runs(self, limit: int, session: str | None = None, agent: str | None = None) -> list[RunNode]:
        if not isinstance(limit, int) or limit < 1:
            raise InvalidInput("limit", f"{limit!r} is not a whole number from 1")
        found: dict[str, RunNode] = {}
        if self._store is not None:
            for end in await self._store.tasks(self._namespace(), session=session, agent=agent, limit=limit):
                node = ended_node(end)
                found[node.node_id] = node
        runs = self._runs()
        wanted = [
            task
            for task, head in await runs.tasks(limit)
            if (session is None or head[9:10] == [session]) and (agent is None or head[1] == agent)
        ]
        for running in await asyncio.gather(*(runs.node(task, ROOT_RUN) for task in wanted)):
            if running is not None:
                found[running.node_id] = running
        index = f"session/{session}" if session is not None else f"busi/{RunNodeBusiType.AGENT}/{agent}"
        own = await self._stored().indexed(index)
        return sorted([*found.values(), *own], key=in_order)

    # -- waits ---------------------------------------------------------------------------------------------------

    async def wait_for_node(self, node_id: str, timeout: float | None = None) -> RunNode:
        """Wait until a node of user code, a run (`<task>/<run>`) or a task (its id) has ended.

        Raises InvalidInput (`node_id`) where there is none (any more), and TimeoutError after `timeout` seconds; the
        node is left as it is.
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
                    raise _unknown("node_id", node_id)
                return await self._waits_of(bus).until(f"node/{node_id}", lambda _: self._ended_node(node_id))
        except TimeoutError:
            if timeout is None:
                raise
            raise TimeoutError(f"node {node_id} has not ended within {timeout:g} s") from None

    async def wait_for_task(self, task_id: str, timeout: float | None = None) -> RunNode:
        """Wait for the end of a task, whoever has submitted it. Raises as `wait_for_node`."""
        return await self.wait_for_node(idempotency_key(_named("task_id", task_id), ROOT_RUN), timeout)

    async def wait_for_group(self, group_id: str, timeout: float | None = None) -> NodeGroup:
        """Wait until a group has ended, SUCCESS or FAILED. Raises as `wait_for_node`."""
        bus = await self._stored().bus_of("group", _named("group_id", group_id))
        if bus is None:
            raise _unknown("group_id", group_id)
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

        async def look(told: str) -> RunNode | None:
            nonlocal gone
            # Each time, since a broker that lost its last writes has lost this too.
            await bus.call("watch", task, "n")
            # A run that is gone with its task, and of whose end the stream has lost what it told, was not finished.
            found = await self._run(task, run, told or ("cancelled" if gone else ""))
            if found is None:
                if node is None or gone:
                    raise _unknown("node_id", idempotency_key(task, run))
                gone = True  # it has ended since the first look: the stream is about to tell how
                return None
            return found if found.ended else None

        node = await self._run(task, run)
        if node is not None and node.task_id != task and not node.ended:
            # It lives in another partition, as a task of its own.
            return await self._wait_for_run(node.task_id, ROOT_RUN)
        return await self._waits_of(bus).until(f"run/{task}/{run}", look)

    async def _run(self, task: str, run: str, told: str = "") -> RunNode | None:
        if not is_task_id(task):
            return None
        found = await self._runs().node(task, run, told)
        if (found is None or (told and found.ended)) and self._store is not None:
            recorded = {node.node_id: node for node in await self._of_task(task)}
            found = recorded.get(idempotency_key(task, run), found)
        return found

    async def _ended_node(self, node_id: str) -> RunNode | None:
        node = await self._stored().node(node_id)
        if node is None:
            raise _unknown("node_id", node_id)
        return node if node.ended else None

    async def _ended_group(self, group_id: str) -> NodeGroup | None:
        group = await self._stored().group(group_id)
        if group is None:
            raise _unknown("group_id", group_id)
        return group if group.ended else None

    # -- parts ---------------------------------------------------------------------------------------------------

    def _buses(self) -> Sequence[EventBus]:
        buses = self._client.buses
        if not buses:
            raise InvalidInput("client", "is not connected: use StateManager inside `async with Client.connect(…)`")
        return buses

    def _stored(self) -> StoredNodes:
        return StoredNodes(self._buses())

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
        raise InvalidInput(field, f"{value!r} is no id: give a text that is not empty")
    return value


def _unknown(field: str, id: str) -> InvalidInput:
    return InvalidInput(field, f"no {field.removesuffix('_id')} {id!r} is known; it may be past its retention time")
