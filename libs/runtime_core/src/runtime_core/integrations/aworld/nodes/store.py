"""Run nodes and groups: their values and allowed transitions, and the broker store of those that user code creates."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import msgspec

from runtime_core.bus.connection import Argument, texts
from runtime_core.bus.connection import fields as hash_fields
from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput, Rejected, WeftError
from runtime_core.wire.ids import TASK_ID_RULE, has_control, is_task_id, partition_of

Kind = TypeVar("Kind", bound=StrEnum)


class RunNodeStatus(StrEnum):
    """The status of a node. `SUCCESS`, `FAILED` and `TIMEOUT` are final."""

    INIT = "INIT"
    """Created, not started."""
    RUNNING = "RUNNING"
    BREAKED = "BREAKED"
    """Interrupted: waiting for a human, a step or a group, without a process."""
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"

    @property
    def ended(self) -> bool:
        """Whether the status is final."""
        return self in ENDED


ENDED = frozenset({RunNodeStatus.SUCCESS, RunNodeStatus.FAILED, RunNodeStatus.TIMEOUT})


class RunNodeBusiType(StrEnum):
    """The kind of work of a node."""

    AGENT = "AGENT"
    TOOL = "TOOL"
    TASK = "TASK"
    TOOL_CALLBACK = "TOOL_CALLBACK"
    HUMAN = "HUMAN"
    CONTEXT = "CONTEXT"
    MEMORY = "MEMORY"


class HandleResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one handler. A node keeps one result per name; saving a name again replaces it."""

    name: str
    status: RunNodeStatus = RunNodeStatus.SUCCESS
    result_msg: str = ""
    result: Any = None  # Any: the handler's own JSON


class RunNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of work with a status. Times are epoch seconds; None: not yet."""

    node_id: str
    """`<task>/<run>` for a run of a task, as in `t-1/r/2`. Ids of nodes from user code have no slash."""
    busi_type: RunNodeBusiType
    busi_id: str = ""
    """The name of the agent or tool that does the work. Empty for an open call."""
    task_id: str = ""
    session_id: str = ""
    parent_node_id: str = ""
    msg_id: str = ""
    msg_from: str = ""
    status: RunNodeStatus = RunNodeStatus.INIT
    result_msg: str = ""
    results: list[HandleResult] = []
    """In the order in which they were first saved."""
    create_time: float = 0.0
    execute_time: float | None = None
    end_time: float | None = None
    group_id: str = ""
    sub_group_root_id: str = ""
    metadata: dict[str, Any] = {}  # Any: the user's own JSON

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED


class RunNodeTree(msgspec.Struct, frozen=True):
    """A node and what it started, in order of creation."""

    node: RunNode
    children: list[RunNodeTree]


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sub groups to wait for together, each named after its root node.

    A group ends with SUCCESS when every sub group has finished, and with FAILED as soon as a member fails.
    """

    group_id: str
    session_id: str = ""
    parent_group_id: str = ""
    status: RunNodeStatus = RunNodeStatus.INIT
    result_msg: str = ""
    sub_groups: dict[str, RunNodeStatus] = {}
    """Root node (or nested group) → status of its sub group."""
    create_time: float = 0.0
    end_time: float | None = None
    metadata: dict[str, Any] = {}  # Any: the user's own JSON

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED

    @property
    def root_node_ids(self) -> list[str]:
        """The ids of the root nodes of all sub groups."""
        return list(self.sub_groups)

    @property
    def failed_root_node_ids(self) -> list[str]:
        """The ids of the root nodes of the failed sub groups."""
        return [root for root, status in self.sub_groups.items() if status is RunNodeStatus.FAILED]


def tree_of(nodes: list[RunNode]) -> list[RunNodeTree]:
    """Return nodes as trees. A node whose parent is not in `nodes` is a root."""
    trees = {node.node_id: RunNodeTree(node, []) for node in nodes}
    roots: list[RunNodeTree] = []
    for node in nodes:
        parent = trees.get(node.parent_node_id)
        (parent.children if parent is not None else roots).append(trees[node.node_id])
    return roots


def busi_type_of(value: object) -> RunNodeBusiType:
    """Return the business type of a text or member. Raises InvalidInput (`busi_type`)."""
    return _member(RunNodeBusiType, "busi_type", value)


def status_of(value: object, field: str = "status") -> RunNodeStatus:
    """Return the status of a text or member. Raises InvalidInput."""
    return _member(RunNodeStatus, field, value)


def _member(kind: type[Kind], field: str, value: object) -> Kind:
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidInput(field, f"{value!r} is not one of {', '.join(kind)}") from None


_S = RunNodeStatus
NEXT: dict[RunNodeStatus, tuple[RunNodeStatus, ...]] = {
    _S.INIT: (_S.RUNNING, _S.FAILED, _S.TIMEOUT),
    _S.RUNNING: (_S.BREAKED, _S.SUCCESS, _S.FAILED, _S.TIMEOUT),
    _S.BREAKED: (_S.RUNNING, _S.SUCCESS, _S.FAILED, _S.TIMEOUT),
    _S.SUCCESS: (),
    _S.FAILED: (),
    _S.TIMEOUT: (),
}


class TransitionRefused(WeftError):
    """A node cannot change from its status to the requested one."""

    def __init__(self, what: str, status: RunNodeStatus, wanted: RunNodeStatus) -> None:
        allowed = ", ".join(NEXT[status])
        rest = f"from {status} it may become {allowed}" if allowed else f"{status} is final"
        super().__init__(f"{what} is {status} and cannot become {wanted}: {rest}")
        self.status = status
        self.wanted = wanted


OPEN_SECONDS = 7 * 24 * 3600
"""How long the broker keeps an open node or group after its last change."""
MEMBERS_MAX = 1000
"""The most nodes of a group. Groups may be nested."""


class NodeStore:
    """Creates, changes and reads nodes and groups in the partitions of a namespace.

    The nodes of a session are in one partition, and so are a group and its members.
    """

    def __init__(self, buses: Sequence[EventBus]) -> None:
        self._buses = buses

    # -- create --------------------------------------------------------------------------------------------------

    async def create_node(self, node: RunNode) -> None:
        """Create a node; creating the same node again changes nothing.

        Raises InvalidInput for an id that is taken, and for a group that is unknown, full or ended. Raises Rejected
        (`overloaded`) if the broker takes no new work.
        """
        check_id("node_id", node.node_id)
        for field in ("busi_id", "task_id", "session_id", "parent_node_id", "msg_id", "msg_from"):
            _check_text(field, getattr(node, field))
        bus = await self._place(node.node_id, node.session_id, node.group_id)
        root = node.sub_group_root_id or node.node_id if node.group_id else ""
        indexes = [
            f"{name}/{value}"
            for name, value in (("task", node.task_id), ("session", node.session_id), ("group", node.group_id))
            if value
        ]
        if node.busi_id:
            indexes.append(f"busi/{node.busi_type}/{node.busi_id}")
        fixed = _fixed(node, "node_id", "status", "group_id", "sub_group_root_id")
        reply = await self._create(bus, "node", node.node_id, fixed, node.group_id, root, "\n".join(indexes))
        _check_created("node", node.node_id, reply)

    async def create_group(self, group: NodeGroup, roots: Sequence[str]) -> None:
        """Create a group with these sub groups. Raises like `create_node`."""
        check_id("group_id", group.group_id)
        _check_text("session_id", group.session_id)
        roots = list(dict.fromkeys(roots))
        for root in roots:
            check_id("root_node_ids", root)
        bus = await self._place(group.group_id, group.session_id, group.parent_group_id)
        for root in roots if len(self._buses) > 1 else ():
            there = await self._find("node", root)
            if there is not None and there is not bus:
                raise InvalidInput(
                    "root_node_ids",
                    f"the node {root!r} is in another partition than the group: create the group first, or give "
                    "both the same session_id",
                )
        fixed = encode({"roots": roots, **msgspec.json.decode(_fixed(group, "group_id", "status"))}, "metadata")
        parent, name = group.parent_group_id, group.group_id if group.parent_group_id else ""
        _check_created("group", group.group_id, await self._create(bus, "group", name or group.group_id, fixed, parent,
                                                                   name, "", *roots))  # fmt: skip

    async def _create(
        self, bus: EventBus, kind: str, id: str, fixed: bytes, group: str, root: str, indexes: str, *roots: str
    ) -> list[str]:
        return texts(await bus.call("create_node", kind, id, fixed, group, root, OPEN_SECONDS, indexes, *roots))

    # -- change --------------------------------------------------------------------------------------------------

    async def move(
        self, node_id: str, to: RunNodeStatus, message: str = "", results: Iterable[HandleResult] = ()
    ) -> bool:
        """Change a node's status; return False if it had it already. Raises TransitionRefused and InvalidInput."""
        bus = await self._known("node", node_id)
        # A resend over a new connection has the same token, and so gets the answer to the first send.
        token = secrets.token_hex(8)
        reply = texts(await bus.call("node", "move", node_id, OPEN_SECONDS, to.value, token, message, *_pairs(results)))
        if reply[0] == "refused":
            raise TransitionRefused(f"node {node_id!r}", RunNodeStatus(reply[1]), to)
        _check_known("node", node_id, reply)
        return reply[0] == "moved"

    async def save(self, node_id: str, results: Iterable[HandleResult]) -> None:
        """Save results with a node of any status. Raises InvalidInput (`node_id`)."""
        bus = await self._known("node", node_id)
        _check_known("node", node_id, texts(await bus.call("node", "save", node_id, OPEN_SECONDS, *_pairs(results))))

    async def add_sub_group(self, group_id: str, root: str) -> bool:
        """Add a sub group to an open group; return False if the group has one with this root."""
        check_id("root_node_id", root)
        bus = await self._known("group", group_id)
        reply = texts(await bus.call("node", "sub", group_id, OPEN_SECONDS, root))
        _check_known("group", group_id, reply)
        if reply[0] == "refused":
            raise InvalidInput("group_id", f"the group {group_id!r} is {reply[1]}: you cannot add to it")
        if reply[0] == "full":
            raise _full(group_id)
        return reply[0] == "moved"

    async def finish_sub_group(self, group_id: str, root: str, status: RunNodeStatus, message: str = "") -> bool:
        """Finish a sub group with SUCCESS or FAILED; return False if it was finished already."""
        if status not in (RunNodeStatus.SUCCESS, RunNodeStatus.FAILED):
            raise InvalidInput("status", f"a sub group ends with SUCCESS or FAILED, not {status}")
        bus = await self._known("group", group_id)
        reply = texts(await bus.call("node", "finish", group_id, OPEN_SECONDS, root, status.value, message))
        _check_known("group", group_id, reply)
        if reply[0] == "no_sub_group":
            raise InvalidInput("root_node_id", f"the group {group_id!r} has no sub group {root!r}: create it first")
        if reply[0] == "refused":
            raise TransitionRefused(f"sub group {group_id}/{root}", RunNodeStatus(reply[1]), status)
        return reply[0] == "moved"

    # -- read ----------------------------------------------------------------------------------------------------

    async def node(self, node_id: str) -> RunNode | None:
        """Return a node, or None if it does not exist or has expired."""
        bus = await self._find("node", node_id)
        if bus is None:
            return None
        return _node(node_id, hash_fields(await bus.transport.call("HGETALL", bus.keys.node(node_id))))

    async def group(self, group_id: str) -> NodeGroup | None:
        """Return a group, or None if it does not exist or has expired."""
        bus = await self._find("group", group_id)
        if bus is None:
            return None
        return _group(group_id, hash_fields(await bus.transport.call("HGETALL", bus.keys.group(group_id))))

    async def indexed(self, index: str) -> list[RunNode]:
        """Return the nodes of an index such as `task/t-1`, oldest first."""
        found = []
        for bus in self._buses:
            call, keys = bus.transport.call, bus.keys
            ids = [item.decode() for item in cast(list[bytes], await call("ZRANGE", keys.nodes(index), 0, -1))]
            reads = [call("HGETALL", keys.node(id)) for id in ids]
            found += [_node(id, hash_fields(await read)) for id, read in zip(ids, reads, strict=True)]
        return sorted([node for node in found if node is not None], key=lambda node: (node.create_time, node.node_id))

    async def bus_of(self, kind: str, id: str) -> EventBus | None:
        """Return the partition of a `node` or `group`, or None if it does not exist."""
        return await self._find(kind, id)

    # -- partitions --------------------------------------------------------------------------------------------------

    async def _place(self, id: str, session_id: str, group_id: str) -> EventBus:
        """Return the partition for a new node or group: that of its group, or else of its session."""
        if group_id:
            found = await self._find("group", group_id)
            if found is None:
                raise InvalidInput("group_id", f"no group {group_id!r} is known: create it first")
            return found
        return self._buses[partition_of(session_id or id, len(self._buses), "session_id" if session_id else "id")]

    async def _find(self, kind: str, id: str) -> EventBus | None:
        reads = [bus.transport.call("EXISTS", f"{bus.keys.base}{kind}:{id}") for bus in self._buses]
        found = [bus for bus, read in zip(self._buses, reads, strict=True) if await read == 1]
        return found[0] if found else None

    async def _known(self, kind: str, id: str) -> EventBus:
        found = self._buses[0] if len(self._buses) == 1 else await self._find(kind, id)
        if found is None:
            raise unknown(kind, id)
        return found


def check_id(field: str, id: object) -> None:
    """Raise InvalidInput if `id` cannot be part of the key of a node or group."""
    if not isinstance(id, str) or not is_task_id(id):
        raise InvalidInput(field, f"{id!r} is not a valid id: use {TASK_ID_RULE}")


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or has_control(text):
        raise InvalidInput(field, f"{text!r} is not text without control characters")


def _check_created(kind: str, id: str, reply: list[str]) -> None:
    match reply:
        case ["created" | "known"]:
            return
        case ["other"]:
            raise InvalidInput(f"{kind}_id", f"a {kind} {id!r} with different content exists")
        case ["overloaded", message]:
            raise Rejected("overloaded", message, retry_after_seconds=1.0)
        case ["no_group", group]:
            raise InvalidInput("group_id", f"no group {group!r} is known: create it first")
        case ["no_sub_group", root]:
            raise InvalidInput("sub_group_root_id", f"the group has no sub group {root!r}: create it first")
        case ["ended", what, status]:
            raise InvalidInput("group_id", f"{what!r} is {status}: you cannot add to it")
        case ["full", group]:
            raise _full(group)
    raise WeftError(f"unknown reply of the broker to the creation of a {kind}: {reply}")


def _full(group_id: str) -> InvalidInput:
    return InvalidInput("group_id", f"the group {group_id!r} has {MEMBERS_MAX} members: nest groups in it")


def _check_known(kind: str, id: str, reply: list[str]) -> None:
    if reply[0] == "unknown":
        raise unknown(kind, id)


def unknown(kind: str, id: str) -> InvalidInput:
    """Return the error for a `node` or `group` that does not exist."""
    return InvalidInput(f"{kind}_id", f"no {kind} {id!r} is known; it may be past its retention time")


def _pairs(results: Iterable[HandleResult]) -> list[Argument]:
    flat: list[Argument] = []
    for result in results:
        _check_text("results.name", result.name)
        flat += [result.name, encode(result, f"results.{result.name}")]
    return flat


def _fixed(value: RunNode | NodeGroup, *without: str) -> bytes:
    """Return the fields that never change, as JSON."""
    fields = cast(dict[str, Any], msgspec.to_builtins(value))  # Any: JSON
    return encode({name: part for name, part in fields.items() if name not in without}, "metadata")


def _node(node_id: str, fields: Mapping[str, bytes]) -> RunNode | None:
    if "v" not in fields:
        return None
    saved = sorted((value, name) for name, value in fields.items() if name.startswith("r:"))
    values = cast(dict[str, Any], msgspec.json.decode(fields["v"]))  # Any: JSON
    values |= {
        "node_id": node_id,
        "status": fields["s"].decode(),
        "result_msg": fields.get("m", b"").decode(),
        "results": [msgspec.json.decode(value[13:]) for value, _ in saved],
        "create_time": int(fields["c"]) / 1000,
        "execute_time": int(fields["x"]) / 1000 if "x" in fields else None,
        "end_time": int(fields["d"]) / 1000 if "d" in fields else None,
        "group_id": fields.get("g", b"").decode(),
        "sub_group_root_id": fields.get("root", b"").decode(),
    }
    return msgspec.convert(values, RunNode)


def _group(group_id: str, fields: Mapping[str, bytes]) -> NodeGroup | None:
    if "v" not in fields:
        return None
    values = cast(dict[str, Any], msgspec.json.decode(fields["v"]))  # Any: JSON
    subs = {name[4:]: value.decode() for name, value in fields.items() if name.startswith("sub:")}
    first = [root for root in values.pop("roots") if root in subs]
    values |= {
        "group_id": group_id,
        "status": fields["s"].decode(),
        "result_msg": fields.get("m", b"").decode(),
        # First those given at creation, in that order, then those added later.
        "sub_groups": {root: subs[root] for root in dict.fromkeys([*first, *sorted(subs)])},
        "create_time": int(fields["c"]) / 1000,
        "end_time": int(fields["d"]) / 1000 if "d" in fields else None,
    }
    return msgspec.convert(values, NodeGroup)
