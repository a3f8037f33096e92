"""The sort key of steps, and how a step is shown."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput
from runtime_core.wire.step import CALL_CHARACTERS, MOST_AMOUNT, PLACE_MAX, Usage, as_call, place

NUMBERS = st.lists(st.integers(0, 200), min_size=1, max_size=3).map(tuple)
RUNS = st.lists(NUMBERS, max_size=3).map(tuple)


def text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@given(st.lists(st.tuples(RUNS, NUMBERS | st.just(())), max_size=8))
def test_places_sort_as_paths_of_numbers_do(keys: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]) -> None:
    places = {(run, step): place("/".join(["r", *map(text, run)]), text(step)) for run, step in keys}
    assert sorted(places, key=lambda key: places[key]) == sorted(places)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_two_paths_never_share_a_place(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (place(*one) == place(*other)) == (one == other)


def test_unusual_paths_stay_distinct() -> None:
    odd = [("a/b", "c"), ("a", "b/c"), ("1", ""), ("01", ""), ("~r", ""), ("r", ""), ("r 1", ""), ("r", "1"), ("", "")]
    assert len({place(*path) for path in odd}) == len(odd)


def test_a_place_needs_no_locale() -> None:
    assert place("r/é\0", "1").isascii()


def test_long_numbers_still_sort() -> None:
    runs = [f"r/{10**exponent}" for exponent in range(9)]
    assert all(place(one, "") < place(other, "") for one, other in pairwise(runs))


def test_a_path_that_no_index_can_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match=str(PLACE_MAX)):
        place("r" + "/1" * PLACE_MAX, "")


@pytest.mark.parametrize(
    ("kind", "name", "key", "data", "shown"),
    [
        ("tool", "search", "", b'{"query":"x","top":3}', 'ctx.tool("search", query="x", top=3)'),
        ("tool", "now", "", b"{}", 'ctx.tool("now")'),
        ("agent", "writer", "k", b'{"a":1}', 'ctx.agent("writer", {"a":1}, key="k")'),
        ("send", "audit", "", b'"done"', 'ctx.send("audit", "done")'),
        ("publish", "news", "s", b"1", 'ctx.publish("news", 1, source="s")'),
        ("ray", "rank", "", b'{"items":[1]}', 'ctx.engine("ray").call("rank", items=[1])'),
        ("engine", "rank", "", b'{"items":[1]}', 'ctx.engine().call("rank", items=[1])'),
        ("step", "load", "", b'{"args":[1,"a"],"x":2}', 'ctx.step("load", 1, "a", x=2)'),
        ("step", "load", "", b"", 'ctx.step("load")'),
        ("timer", "sleep", "", b"1500", "ctx.sleep(1.5)"),
        ("timer", "sleep", "", b"", "ctx.sleep()"),
        ("human", "Publish?", "", b"null", 'ctx.human("Publish?")'),
        ("human", "Publish?", "", b"[1]", 'ctx.human("Publish?", [1])'),
        ("human", "human", "", b'{"request_id":"r:1","prompt":"Publish?","data":[1]}', 'ctx.human("Publish?", [1])'),
        ("emit", "emit", "", b'"hi"', 'ctx.emit("hi")'),
        ("message", "found", "", b"2", 'ctx.note("found", 2)'),
        ("usage", "usage", "", b'{"tokens":2}', "ctx.spend(tokens=2)"),
        ("patch", "new", "", b"", 'ctx.patched("new")'),
        ("tool", "search", "", b"no json", 'ctx.tool("search", "no json")'),
        ("tool", "a\nb", "", b'{"x":"\xff"}', 'ctx.tool("a\\nb", '),
    ],
)
def test_a_step_is_shown_as_the_call_that_made_it(kind: str, name: str, key: str, data: bytes, shown: str) -> None:
    assert as_call(kind, name, key, data).startswith(shown)


def test_a_shown_call_is_short() -> None:
    large = msgspec.json.encode({f"argument-{number}": "x" * 10_000 for number in range(1_000)})
    assert len(as_call("tool", "n" * 10_000, "", large)) <= CALL_CHARACTERS


@pytest.mark.parametrize("amount", [1e308, MOST_AMOUNT * 2, 10**400, float("inf"), float("nan"), -1, True, "3"])
def test_usage_that_the_broker_cannot_sum_is_refused(amount: object) -> None:
    """A sum that is infinite cannot be stored, and the answer of a model call with it: it would be paid again."""
    with pytest.raises(InvalidInput, match=r"spend\.tokens: .* is not a number from 0 to 1e\+15"):
        Usage.of({"tokens": amount})
    assert Usage.of({"tokens": MOST_AMOUNT})["tokens"] == MOST_AMOUNT
