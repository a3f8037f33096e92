"""Values of run nodes and groups: their trees, their statuses and the transitions between these."""

from __future__ import annotations

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.nodes.store import (
    ENDED,
    NEXT,
    NodeGroup,
    RunNode,
    RunNodeBusiType,
    RunNodeStatus,
    RunNodeTree,
    busi_type_of,
    status_of,
    tree_of,
)


def node(node_id: str, parent: str = "") -> RunNode:
    return RunNode(node_id=node_id, busi_type=RunNodeBusiType.AGENT, parent_node_id=parent)


def shape(trees: list[RunNodeTree]) -> list[object]:
    return [[tree.node.node_id, *shape(tree.children)] for tree in trees]


def test_nodes_are_below_their_parents_in_their_order() -> None:
    nodes = [node("b", "a"), node("a"), node("c", "a"), node("d", "b"), node("e", "gone")]
    assert shape(tree_of(nodes)) == [["a", ["b", ["d"]], ["c"]], ["e"]]


def test_a_final_status_has_no_next_one() -> None:
    assert set(NEXT) == set(RunNodeStatus)
    assert {status for status, following in NEXT.items() if not following} == ENDED
    assert all(RunNodeStatus.FAILED in NEXT[status] for status in RunNodeStatus if status not in ENDED)
    assert {status for status in RunNodeStatus if status.ended} == ENDED


def test_types_and_statuses_are_texts_or_members() -> None:
    assert busi_type_of("TOOL") is busi_type_of(RunNodeBusiType.TOOL) is RunNodeBusiType.TOOL
    assert status_of("FAILED") is RunNodeStatus.FAILED
    for call, field in ((lambda: busi_type_of("tool"), "busi_type"), (lambda: status_of(3, "wanted"), "wanted")):
        with pytest.raises(InvalidInput, match="is not one of") as refused:
            call()
        assert refused.value.field == field


def test_a_group_names_its_failed_members() -> None:
    statuses = {"a": RunNodeStatus.FAILED, "b": RunNodeStatus.SUCCESS, "c": RunNodeStatus.RUNNING}
    group = NodeGroup(group_id="g", sub_groups=statuses)
    assert (group.root_node_ids, group.failed_root_node_ids, group.ended) == (["a", "b", "c"], ["a"], False)
    assert NodeGroup(group_id="g", status=RunNodeStatus.FAILED).ended
