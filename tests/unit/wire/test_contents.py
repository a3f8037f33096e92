"""The search for message lists that the store lacks starts at their ends, so its cost depends only on new messages."""

from __future__ import annotations

import msgspec

from runtime_core.wire.contents import Contents, Node, missing_nodes
from runtime_core.wire.step import ENCODER


def contents_of(*lists: list[object]) -> tuple[Contents, list[bytes]]:
    contents, heads = Contents(), []
    for messages in lists:
        data = ENCODER.encode({"messages": messages})
        _, references = contents.extract(data.decode(), data)
        heads += [bytes.fromhex(reference.digest) for reference in references]
    return contents, heads


def search(heads: list[bytes], nodes: dict[bytes, Node], stored: set[bytes]) -> tuple[list[bytes], int, int]:
    """Return what is missing, how many digests were looked up, and in how many rounds."""
    finding = missing_nodes(heads, nodes)
    looked, rounds = 0, 0
    try:
        asked = next(finding)
        while True:
            looked += len(asked)
            rounds += 1
            asked = finding.send(stored.intersection(asked))
    except StopIteration as found:
        return found.value, looked, rounds


def test_a_list_that_continues_costs_its_new_messages() -> None:
    before, _ = contents_of(list(range(1_000)))
    now, heads = contents_of(list(range(1_002)))
    found, looked, _ = search(heads, now.nodes, set(before.nodes))
    assert len(found) == 2
    assert looked <= 10


def test_a_new_list_takes_few_rounds_and_parents_come_first() -> None:
    contents, heads = contents_of(list(range(1_000)), [*range(500), "aside"])
    found, looked, rounds = search(heads, contents.nodes, set())
    assert (len(found), looked) == (1_001, 1_001)
    assert rounds <= 7
    places = {digest: place for place, digest in enumerate(found)}
    for digest in found:
        parent = contents.nodes[digest].parent
        assert parent is None or places[parent] < places[digest]


def test_stored_contents_are_not_missing() -> None:
    contents, heads = contents_of([1, 2, 3], [1, 2])
    assert search(heads, contents.nodes, set(contents.nodes))[:2] == ([], 2)


def test_the_same_message_in_another_place_is_another_node_and_one_content() -> None:
    contents, _ = contents_of(["a", "b", "a"])
    assert (len(contents.nodes), len(contents.values)) == (3, 2)


def test_json_that_cannot_be_read_stays_unchanged() -> None:
    for text in ('{"messages":[1', '{"messages" 1}', '{"messages":[1]} x'):
        contents = Contents()
        assert contents.extract(text, text.encode()) == (text, [])
        assert not contents.nodes


def test_missing_messages_are_restored_as_an_empty_list() -> None:
    data = ENCODER.encode({"messages": [1, 2], "n": 1})
    text, references = Contents().extract(data.decode(), data)
    assert msgspec.json.decode(Contents().restore(text, references)) == {"messages": [], "n": 1}
