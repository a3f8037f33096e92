"""The sort key of steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput
from runtime_core.record.step import PLACE_MAX, place

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


def test_odd_paths_keep_apart() -> None:
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
