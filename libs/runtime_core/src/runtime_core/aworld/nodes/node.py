"""Run nodes and groups of them as values, and which status may follow which."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from runtime_core.errors import InvalidInput, WeftError

Kind = TypeVar("Kind", bound=StrEnum)


class RunNodeStatus(StrEnum):
    """Where a node stands. `SUCCESS`, `FAILED` and `TIMEOUT` are final."""

    INIT = "INIT"
    """Made, and not begun."""
    RUNNING = "RUNNING"
    BREAKED = "BREAKED"
    """Interrupted: it waits for a person, a step or a group, and holds no process."""
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return self in ENDED


ENDED = frozenset({RunNodeStatus.SUCCESS, RunNodeStatus.FAILED, RunNodeStatus.TIMEOUT})


class RunNodeBusiType(StrEnum):
    """What kind of work a node stands for."""

    AGENT = "AGENT"
    TOOL = "TOOL"
    TASK = "TASK"
    TOOL_CALLBACK = "TOOL_CALLBACK"
    HUMAN = "HUMAN"
    CONTEXT = "CONTEXT"
    MEMORY = "MEMORY"


class HandleResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one handler made of a node. A node keeps one result per name; saving a name again replaces it."""

    name: str
    status: RunNodeStatus = RunNodeStatus.SUCCESS
    result_msg: str = ""
    result: Any = None  # Any: the handler's own JSON


class RunNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of work and where it stands. Times are epoch seconds; None: it has not come to that."""

    node_id: str
    """`<task>/<run>` for a run of a task, as in `t-1/r/2`; without a slash for a node that user code has made."""
    busi_type: RunNodeBusiType
    busi_id: str = ""
    """What does the work: the agent's or the tool's name. Empty for an open call, whose name is with the call."""
    task_id: str = ""
    session_id: str = ""
    parent_node_id: str = ""
    msg_id: str = ""
    msg_from: str = ""
    status: RunNodeStatus = RunNodeStatus.INIT
    result_msg: str = ""
    results: list[HandleResult] = []
    """By the time when each was first saved."""
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
    """Sub groups, each named by its root node, that are waited for together.

    It ends SUCCESS when every sub group is finished, and FAILED with the first member that fails: whoever waits goes
    on either way.
    """

    group_id: str
    session_id: str = ""
    parent_group_id: str = ""
    status: RunNodeStatus = RunNodeStatus.INIT
    result_msg: str = ""
    sub_groups: dict[str, RunNodeStatus] = {}
    """Root node (or nested group) → where its sub group stands."""
    create_time: float = 0.0
    end_time: float | None = None
    metadata: dict[str, Any] = {}  # Any: the user's own JSON

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED

    @property
    def root_node_ids(self) -> list[str]:
        """All sub groups by the ids of their root nodes."""
        return list(self.sub_groups)

    @property
    def failed_root_node_ids(self) -> list[str]:
        """The sub groups in which a member has failed."""
        return [root for root, status in self.sub_groups.items() if status is RunNodeStatus.FAILED]


def tree_of(nodes: list[RunNode]) -> list[RunNodeTree]:
    """Nodes below their parents; those whose parent is not among them are roots."""
    trees = {node.node_id: RunNodeTree(node, []) for node in nodes}
    roots: list[RunNodeTree] = []
    for node in nodes:
        parent = trees.get(node.parent_node_id)
        (parent.children if parent is not None else roots).append(trees[node.node_id])
    return roots


def busi_type_of(value: object) -> RunNodeBusiType:
    """The business type that a text or a member names. Raises InvalidInput (`busi_type`)."""
    return _member(RunNodeBusiType, "busi_type", value)


def status_of(value: object, field: str = "status") -> RunNodeStatus:
    """The status that a text or a member names. Raises InvalidInput."""
    return _member(RunNodeStatus, field, value)


def _member(kind: type[Kind], field: str, value: object) -> Kind:
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidInput(field, f"{value!r} is none; there are {', '.join(kind)}") from None


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
    """A node cannot go from the status that it has to the one that was asked for."""

    def __init__(self, what: str, status: RunNodeStatus, wanted: RunNodeStatus) -> None:
        allowed = ", ".join(NEXT[status])
        rest = f"from {status} it may become {allowed}" if allowed else f"{status} is final"
        super().__init__(f"{what} is {status} and cannot become {wanted}: {rest}")
        self.status = status
        self.wanted = wanted
