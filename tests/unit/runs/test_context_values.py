"""How the values of two branches are merged, compared and written as JSON."""

from __future__ import annotations

import json
import math

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.runs.context_values import MISSING, Conflict, Ledger, checked, from_plain, plain, same
from runtime_core.runs.shared_context import Context


def session(**values: object) -> Context:
    context = Context("s", "t", "lead")
    for key, value in values.items():
        context.put(key, value)
    return context


def forks(top: Context, count: int = 2) -> list[Context]:
    return [top.fork() for _ in range(count)]


def test_lists_appended_by_both_are_joined_in_the_order_of_the_branches() -> None:
    top = session(found=["0"])
    one, two = forks(top)
    two.get("found").append("two")
    one.get("found").append("one")
    one.put("new", ["x"])
    two.put("new", ["x"])
    top.merge(one)
    top.merge(two)
    assert top.get("found") == ["0", "one", "two"]
    assert top.get("new") == ["x", "x"], "an equal entry of another branch is a write of its own"
    assert top.conflicts == []


def test_appended_items_survive_concurrent_changes_of_the_list() -> None:
    for appends_first in (True, False):
        top = session(found=["a", "b"])
        one, two = forks(top)
        appending, changing = (one, two) if appends_first else (two, one)
        appending.get("found").append("c")
        changing.get("found").remove("a")
        top.merge(one)
        top.merge(two)
        assert (top.get("found"), top.conflicts) == (["b", "c"], [])


def test_two_that_rewrite_a_list_are_in_conflict() -> None:
    top = session(found=["a", "b"])
    one, two = forks(top)
    one.put("found", ["b"])
    two.put("found", ["a"])
    top.merge(one)
    assert [conflict.key for conflict in top.merge(two)] == ["found"]
    assert top.get("found") == ["a"]


def test_objects_are_merged_name_by_name() -> None:
    top = session(plan={"title": "a", "done": {"x": 1}, "old": 1})
    one, two = forks(top)
    one.get("plan")["done"]["y"] = 2
    del one.get("plan")["old"]
    two.get("plan")["done"]["z"] = 3
    top.merge(one)
    top.merge(two)
    assert top.get("plan") == {"title": "a", "done": {"x": 1, "y": 2, "z": 3}}


def test_sets_merge_additions_and_removals() -> None:
    top = session(tags={"a", "b"})
    one, two = forks(top)
    one.get("tags").add("c")
    two.get("tags").discard("a")
    two.get("tags").add("d")
    top.merge(one)
    top.merge(two)
    assert top.get("tags") == {"b", "c", "d"}


def test_the_later_branch_wins_for_scalars_and_the_conflict_is_recorded() -> None:
    top = session(title="draft")
    one, two, three = forks(top, 3)
    one.put("title", "one")
    two.put("title", "two")
    three.put("title", "two")
    assert top.merge(one) == []
    assert top.merge(two) == [Conflict("title", "draft", "one", "two", two.id)]
    assert top.merge(three) == [], "it says the same"
    assert top.get("title") == "two"
    assert [conflict.key for conflict in top.conflicts] == ["title"]


def test_a_conflict_inside_an_object_names_its_place() -> None:
    top = session(plan={"who": {"name": "a"}})
    one, two = forks(top)
    one.get("plan")["who"]["name"] = "b"
    del two.get("plan")["who"]
    top.merge(one)
    (conflict,) = top.merge(two)
    assert (conflict.key, conflict.theirs) == ("plan.who", MISSING)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        "text",
        [1, [True]],
        {"a": {"b": [None]}},
        {2, 1},
        {"$set": [1]},
        {"$object": {"$set": 1}},
        {"$missing": 1},
    ],
)
def test_a_value_comes_back_from_its_json(value: object) -> None:
    """Also an object of the user's that looks like one of the marks."""
    back = from_plain(json.loads(json.dumps(plain(value))))
    assert same(back, value)
    assert type(back) is type(value)


def test_a_missing_value_comes_back_as_missing() -> None:
    assert from_plain(plain({"a": [MISSING]}))["a"][0] is MISSING


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), ([0], [False]), ({"a": 1}, {"a": True}), ({}, [])])
def test_values_of_different_types_in_json_are_not_the_same(one: object, other: object) -> None:
    assert not same(one, other)
    assert same(one, one)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a.b[1]: object cannot be stored"),
        (math.inf, "a.b[1]: float cannot be stored"),
        ({1: 2}, "a.b[1]: has a member whose name is not text"),
        ({(1, 2)}, "a.b[1]: is a set of more than scalars"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_by_its_place(value: object, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        checked({"b": [1, value]}, "a")
    assert str(refused.value).startswith(message)


def test_a_tuple_is_kept_as_a_list() -> None:
    assert checked({"a": (1, (2,))}, "x") == {"a": [1, [2]]}


def test_an_amount_of_a_ledger_counts_once_by_any_path() -> None:
    one, two, top = Ledger({"tokens": 5}), Ledger(), Ledger()
    one.add("one", "tokens", 3)
    one.add("one", "tokens", -1)
    two.take(one.slots)
    two.add("two", "tokens", 10)
    for taken in (one, two, one, two):
        top.take(taken.slots)
    assert top.totals() == {"tokens": 12}
    assert one.totals() == {"tokens": 7}
    top.fold()
    assert (top.totals(), top.slots) == ({"tokens": 12}, {})
