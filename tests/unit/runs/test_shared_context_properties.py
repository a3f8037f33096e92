"""Properties of contexts for arbitrary branches."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime_core.runs.shared_context import Context

KEYS = st.sampled_from(["a", "b", "c", "d"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES), st.lists(st.dictionaries(st.text(min_size=1, max_size=3), VALUES), max_size=4))
def test_branches_that_write_other_keys_join_in_any_grouping(
    begun: dict[str, object], writes: list[dict[str, object]]
) -> None:
    def branches(top: Context) -> list[Context]:
        made = []
        for number, written in enumerate(writes):
            branch = top.fork(name=str(number))
            for key, value in written.items():
                branch.put(f"{number}.{key}", value)
            made.append(branch)
        return made

    def begin() -> Context:
        top = Context()
        for key, value in begun.items():
            top.put(key, value)
        return top

    left, right = begin(), begin()
    for branch in branches(left):
        left.merge(branch)
    joined = branches(right)
    for earlier, later in zip(joined[-2::-1], joined[:0:-1], strict=True):
        earlier.merge(later)
    if joined:
        right.merge(joined[0])
    assert dict(left.context_info) == dict(right.context_info)
    assert left.conflicts == right.conflicts == []
    wanted = {f"{number}.{key}": value for number, written in enumerate(writes) for key, value in written.items()}
    assert dict(left.context_info) == begun | wanted


@given(st.data())
def test_no_write_is_lost_and_no_token_is_counted_twice_in_any_tree_of_branches(data: st.DataObject) -> None:
    top = Context()
    top.put("log", [])
    top.put("tags", set())
    top.put("by", {})
    contexts, parents = [top], {top.id: top}
    written: list[str] = []
    tokens = 0
    for number in range(data.draw(st.integers(1, 25), label="steps")):
        context = data.draw(st.sampled_from(contexts), label="context")
        match data.draw(st.sampled_from(["write", "fork", "child", "merge", "twice", "restore"]), label="what"):
            case "write":
                context.get("log").append(number)
                context.get("tags").add(number)
                context.get("by")[str(number)] = number
                context.put(f"key {number}", number)
                context.increment("writes")
                context.add_token({"input_tokens": number})
                written.append(str(number))
                tokens += number
            case "fork" | "child" as kind:
                branch = context.fork() if kind == "fork" else context.child()
                contexts.append(branch)
                parents[branch.id] = context
            case "merge" | "twice" as kind if context is not top:
                parents[context.id].merge(context)
                if kind == "twice":
                    parents[context.id].merge(context)
            case "restore" if context.parent is None and not any(each.parent is context for each in contexts):
                again = Context.restore(context.snapshot())
                contexts[contexts.index(context)] = again
                for name, parent in list(parents.items()):
                    if parent is context:
                        parents[name] = again
                if context is top:
                    top = again
    # The innermost ones first, each into what it was made of.
    for context in sorted(contexts, key=lambda each: each.id.count("."), reverse=True):
        if context is not top:
            parents[context.id].merge(context)
    assert sorted(map(str, top.get("log"))) == sorted(written)
    assert {str(number) for number in top.get("tags")} == set(written)
    assert set(top.get("by")) == set(written)
    assert {key.removeprefix("key ") for key in top.context_info if key.startswith("key ")} == set(written)
    assert top.token_usage.get("input_tokens", 0) == tokens
    assert top.count("writes") == len(written)
    assert top.conflicts == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 9)), max_size=40), st.integers())
def test_tokens_are_exact_however_often_and_by_whichever_way_branches_come_in(
    plan: list[tuple[int, int, int]], seed: int
) -> None:
    top = Context()
    contexts = [top]
    total = 0
    for at, other, amount in plan:
        context = contexts[at % len(contexts)]
        branch = context.fork()
        branch.add_token({"output_tokens": amount})
        total += amount
        contexts.append(branch)
        wherever = contexts[other % len(contexts)]
        if wherever is not branch:
            wherever.merge_changes(Context.restore(branch.snapshot()).export_changes())
    rest = contexts[1:] * 2
    random.Random(seed).shuffle(rest)
    for branch in rest:
        top.merge(branch)
    assert top.token_usage.get("output_tokens", 0) == total


@given(st.dictionaries(st.text(max_size=4), VALUES))
def test_a_snapshot_gives_the_same_context(values: dict[str, object]) -> None:
    context = Context("s", "t", "a")
    for key, value in values.items():
        context.put(key, value)
    again = Context.restore(context.snapshot())
    assert dict(again.context_info) == dict(context.context_info) == values
    assert again.snapshot() == context.snapshot()
