"""Contexts: levels, merged branches, and their JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.runs.shared_context import Context


def session(**values: object) -> Context:
    context = Context("s", "t", "lead")
    for key, value in values.items():
        context.put(key, value)
    return context


# -- levels ------------------------------------------------------------------------------------------------------------


def test_a_level_reads_its_own_value_over_its_parents() -> None:
    top = session(color="red", size=1)
    task = top.child(task_id="t-2")
    agent = task.child(agent="writer")
    agent.put("color", "blue")
    top.put("late", True)
    assert (agent.get("color"), task.get("color"), agent.get("size"), agent.get("late")) == ("blue", "red", 1, True)
    assert agent.get("none", "default") == "default"
    assert dict(agent.context_info) == {"color": "blue", "size": 1, "late": True}
    assert (agent.session_id, agent.task_id, agent.agent) == ("s", "t-2", "writer")


def test_a_deletion_hides_the_value_of_the_level_above() -> None:
    top = session(color="red")
    task = top.child()
    task.delete("color")
    assert (task.get("color"), top.get("color")) == (None, "red")
    assert "color" not in task.context_info
    with pytest.raises(KeyError):
        task.delete("color")
    top.merge(task)
    assert top.get("color") is None


def test_tasks_that_share_an_agent_do_not_see_each_other() -> None:
    top = session(notes=["shared"])
    one, two = top.child(task_id="1", agent="a"), top.child(task_id="2", agent="a")
    one.get("notes").append("of one")
    one.put("secret", 1)
    assert two.get("notes") == ["shared"]
    assert two.get("secret") is None
    assert top.get("notes") == ["shared"]


def test_a_fork_is_a_deep_copy() -> None:
    top = session(plan={"steps": ["a"]})
    fork = top.fork()
    fork.get("plan")["steps"].append("b")
    top.get("plan")["steps"].append("c")
    assert fork.get("plan") == {"steps": ["a", "b"]}
    assert top.get("plan") == {"steps": ["a", "c"]}


# -- merges ------------------------------------------------------------------------------------------------------------


def forks(top: Context, count: int = 2) -> list[Context]:
    return [top.fork() for _ in range(count)]


def test_counters_add_up() -> None:
    top = session()
    assert top.increment("tries", 2) == 2
    one, two = forks(top)
    one.increment("tries", 3)
    two.increment("tries", -1)
    assert one.count("tries") == 5
    top.merge(one)
    top.merge(two)
    assert (top.count("tries"), top.counters) == (4, {"tries": 4})


def test_values_that_a_branch_did_not_change_stay() -> None:
    top = session(title="draft", found=["0"])
    fork = top.fork()
    top.put("title", "changed here")
    top.get("found").append("here")
    fork.get("found")
    assert top.merge(fork) == []
    assert (top.get("title"), top.get("found")) == ("changed here", ["0", "here"])


def test_agent_info_is_merged_too() -> None:
    top = session()
    one, two = forks(top)
    one.agent_info["writer"] = {"state": "busy"}
    two.agent_info["reader"] = {"state": "idle"}
    top.merge(one)
    top.merge(two)
    assert dict(top.agent_info) == {"writer": {"state": "busy"}, "reader": {"state": "idle"}}


def test_merging_twice_is_merging_once() -> None:
    top = session(found=["0"])
    fork = top.fork()
    fork.get("found").append("1")
    fork.add_token({"input_tokens": 5})
    copy = Context.restore(fork.snapshot())
    for _ in range(2):
        top.merge(fork)
    top.merge(copy)
    assert (top.get("found"), top.token_usage) == (["0", "1"], {"input_tokens": 5})


def test_a_branch_continues_after_its_merge() -> None:
    top = session(found=["0"])
    fork = top.fork()
    fork.get("found").append("1")
    top.merge(fork)
    fork.get("found").append("2")
    fork.add_token({"input_tokens": 5})
    top.merge(fork)
    assert (top.get("found"), top.token_usage) == (["0", "1", "2"], {"input_tokens": 5})


def test_a_nested_branch_is_merged_once_on_any_path() -> None:
    for order in ("inner first", "outer first", "both ways", "a copy last"):
        top = session(found=["0"])
        outer = top.fork()
        inner = outer.fork()
        inner.get("found").append("inner")
        inner.add_token({"input_tokens": 5})
        copy = Context.restore(inner.snapshot())
        if order in ("inner first", "both ways"):
            top.merge(inner)
        if order != "inner first":
            outer.merge(inner)
        top.merge(outer)
        if order != "a copy last":
            top.merge(inner)
        top.merge(copy)
        assert top.get("found") == ["0", "inner"], order
        assert top.token_usage == {"input_tokens": 5}, order


def test_another_copy_of_a_branch_with_other_changes_is_refused() -> None:
    top = session()
    fork = top.fork()
    copy = Context.restore(fork.snapshot())
    fork.put("title", "one")
    copy.put("title", "two")
    copy.add_token({"input_tokens": 9})
    top.merge(fork)
    with pytest.raises(InvalidInput, match="branch: another copy"):
        top.merge(copy)
    assert (top.get("title"), top.token_usage) == ("one", {}), "and nothing of it is merged"
    with pytest.raises(InvalidInput, match="itself"):
        top.merge(top)


def test_a_branch_travels_as_json() -> None:
    top = session(found=["0"], tags={"a"})
    top.add_token({"input_tokens": 1})
    there = Context.restore(top.fork(name="r/2").snapshot())
    assert not there.changed
    there.get("found").append("1")
    there.get("tags").add("b")
    there.add_token({"input_tokens": 2})
    assert there.changed
    data = there.export_changes()
    for _ in range(2):
        top.merge_changes(data)
    assert (top.get("found"), top.get("tags"), top.token_usage) == (["0", "1"], {"a", "b"}, {"input_tokens": 3})


def test_a_long_lived_context_forgets_who_added_what() -> None:
    top = session()
    for _ in range(100):
        fork = Context.restore(top.fork().snapshot())
        fork.add_token({"input_tokens": 1})
        fork.increment("tasks")
        top.merge_changes(fork.export_changes(), fold=True)
    assert (top.token_usage, top.count("tasks")) == ({"input_tokens": 100}, 100)
    assert len(top.snapshot()) < 700


# -- what can be kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), {"a": b"x"}, float("nan"), {1: 2}, {("a", "b")}, [1, {2: 3}]])
def test_invalid_json_is_refused_and_changes_nothing(value: Any) -> None:
    top = session(key="before")
    with pytest.raises(InvalidInput, match=r"^key"):
        top.put("key", value)
    assert top.get("key") == "before"


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="key"):
        session().put("key", loop)


@pytest.mark.parametrize("usage", [{"input": -1}, {"input": "5"}, {"input": True}])
def test_an_invalid_amount_of_tokens_is_refused(usage: Any) -> None:
    with pytest.raises(InvalidInput, match=r"usage\.input"):
        session().add_token(usage)


def test_invalid_keys_numbers_and_contexts_are_refused() -> None:
    top: Any = session()
    for wrong, named in (
        (lambda: top.put(3, "x"), "key: 3 is not a string"),
        (lambda: top.increment(3), "key: 3 is not a string"),
        (lambda: top.increment("visits", "one"), r"counters\.visits: 'one' is not a finite number"),
        (lambda: top.increment("visits", float("nan")), r"counters\.visits: nan is not a finite number"),
        (lambda: top.add_token(812), "usage: 812 is not an object"),
        (lambda: top.add_token({"input": float("inf")}), r"usage\.input: inf is not a finite number"),
        (lambda: top.merge("branch"), "branch: 'branch' is not a Context"),
        (lambda: Context.restore({}), "snapshot: is damaged or not from a context"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match=f"^{named}"):
            wrong()
    assert (top.counters, top.token_usage) == ({}, {})


def test_a_snapshot_includes_later_changes_of_a_list() -> None:
    top = session(found=[])
    top.get("found").append(object())
    with pytest.raises(InvalidInput, match="values of the context"):
        top.snapshot()


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_everything() -> None:
    top = session(found=["0"], tags={"b", "a"}, odd={"$set": [1]}, none=None)
    top.add_token({"input_tokens": 5})
    level = top.child(agent="writer")
    level.get("found").append("1")
    level.delete("none")
    level.put("own", 1.5)
    level.increment("n")
    level.agent_info["writer"] = {"busy": True}
    again = Context.restore(level.snapshot())
    assert dict(again.context_info) == dict(level.context_info)
    assert dict(again.agent_info) == dict(level.agent_info)
    assert (again.token_usage, again.counters) == (level.token_usage, level.counters)
    assert (again.id, again.session_id, again.task_id, again.agent) == (level.id, "s", "t", "writer")
    assert again.export_changes() == level.export_changes()
    assert again.snapshot() == level.snapshot()
    top.merge(again)
    assert top.get("found") == ["0", "1"]
    assert top.get("odd") == {"$set": [1]}


def test_snapshots_are_the_same_in_each_process() -> None:
    assert session(tags={"x", "y", "z"}).snapshot() == session(tags={"z", "y", "x"}).snapshot()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: b"{}",
        lambda data: b"null",
        lambda data: data.replace(b"draft", b"trick"),
        lambda data: data.replace(b'"weft.context":1', b'"weft.context":2'),
        lambda data: data.replace(b'"kind":"snapshot"', b'"kind":"branch"'),
        lambda data: session().export_changes(),
    ],
)
def test_a_damaged_snapshot_is_an_error_and_never_an_empty_context(damage: Any) -> None:
    data = session(title="draft").snapshot()
    assert json.loads(data)["weft.context"] == 1
    with pytest.raises(InvalidInput, match=r"^snapshot: "):
        Context.restore(damage(data))
