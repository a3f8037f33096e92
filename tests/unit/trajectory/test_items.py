"""Trajectory items: how strategies build them from recorded steps, and how they are scored and exported."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from runtime_core.trajectory import export
from runtime_core.trajectory.export import export_items_jsonl, export_items_parquet, trajectory_items
from runtime_core.trajectory.items import (
    DefaultTrajectoryStrategy,
    FilteredTrajectoryStrategy,
    MemoryTrajectoryStrategy,
    RewardFunction,
    TrajectoryItem,
    TrajectoryStrategy,
)
from runtime_core.trajectory.parquet import ITEM_SCHEMA
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.step import ENCODER, Step, StepFailure, TaskEnd
from weft import App
from weft.errors import ConfigurationError, InvalidInput

MESSAGES = [{"role": "user", "content": "find it"}]
ANSWER = {
    "content": "I will search",
    "usage": {"input_tokens": 12, "output_tokens": 3, "details": {"cached": 1}, "cheap": True},
    "logprobs": [-0.1, -0.2],
}


def json_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(ENCODER.encode(value))


def row(run: str, path: str, kind: str, name: str, at: float, **changes: object) -> Step:
    for part in ("input", "output"):
        if part in changes:
            changes[part] = json_of(changes[part])
    return msgspec.structs.replace(
        Step(run=run, step=path, kind=kind, name=name, status="completed", started=at, ended=at + 5), **changes
    )


def model(path: str, at: float, *, output: object = ANSWER) -> Step:
    return row("r", path, "step", "ask", at, input={"args": [], "messages": MESSAGES}, output=output)


STEPS = [
    row("r", "", "agent", "lead", 0, input="a question", output="an answer", key="one"),
    row("r", "1", "step", "prepare", 1, output=1),
    model("2", 2),
    model("5", 30, output={"choices": [{"message": {"content": "done", "tool_calls": [{"id": "c"}]}, "logprobs": 1}]}),
    row("r/3", "", "tool", "search", 10, input={"q": "x"}, output=["found"]),
    row("r/4", "", "agent", "helper", 20, input="help", output="helped"),
    row("r/4/1", "", "tool", "look", 21, status="failed", error=StepFailure("ValueError", "no", "a trace")),
]
END = TaskEnd("t", "completed", "lead", len(STEPS), 0.0, 99.0, session="s")


def task(*steps: Step, end: TaskEnd | None = END) -> TaskTrajectory:
    return TaskTrajectory("weft", "t", end, list(steps or STEPS))


def test_an_item_is_a_model_call_with_what_followed_it() -> None:
    first, helper, last = DefaultTrajectoryStrategy().items(task())
    assert [item.id for item in (first, helper, last)] == ["t:r:2", "t:r/4:", "t:r:5"]
    assert msgspec.to_builtins(first.meta) == {
        "session_id": "s",
        "task_id": "t",
        "run_id": "r",
        "agent": "lead",
        "step": 1,
        "step_id": "2",
        "execute_time": 2.0,
        "pre_agent": None,
    }
    assert (first.state.input, first.state.messages) == ("a question", MESSAGES)
    assert first.state.context == {"key": "one", "attempt": 1}
    assert first.action.content == "I will search"
    assert first.action.tool_calls == [
        {"id": "r/3", "type": "tool", "name": "search", "arguments": {"q": "x"}},
        {"id": "r/4", "type": "agent", "name": "helper", "arguments": "help"},
    ]
    assert first.action.usage == {"input_tokens": 12.0, "output_tokens": 3.0}
    assert first.action.logprobs == [-0.1, -0.2]
    assert not first.action.is_agent_finished
    assert [output["output"] for output in first.reward.tool_outputs] == [["found"], "helped"]
    assert (first.reward.status, first.reward.score) == ("completed", None)
    assert (last.action.content, last.action.tool_calls) == ("done", [{"id": "c"}])
    assert last.action.logprobs == 1
    assert last.action.is_agent_finished
    assert last.meta.pre_agent == "helper"


def test_a_run_without_model_calls_is_one_item() -> None:
    helper = DefaultTrajectoryStrategy().items(task())[1]
    assert (helper.meta.agent, helper.meta.step_id, helper.meta.pre_agent) == ("helper", "", "lead")
    assert (helper.state.messages, helper.action.content) == (None, "helped")
    assert helper.action.is_agent_finished
    assert helper.reward.tool_outputs == [
        {
            "id": "r/4/1",
            "name": "look",
            "status": "failed",
            "output": None,
            "error": {"type": "ValueError", "message": "no"},
        }
    ]


def test_a_step_is_shown_by_its_last_attempt() -> None:
    failed = row("r/3", "", "tool", "search", 3, attempt=1, status="failed")
    again = row("r/3", "", "tool", "search", 4, attempt=2, output="at last")
    (item,) = DefaultTrajectoryStrategy().items(task(STEPS[0], failed, again))
    assert [output["output"] for output in item.reward.tool_outputs] == ["at last"]


def test_tokens_that_a_run_reports_are_those_of_the_model_call_before() -> None:
    silent = model("1", 1, output="yes")
    reports = [row("r", path, "usage", "m", 2, usage={"input_tokens": 2.5, "cost": 0.5}) for path in ("2", "3")]
    told = model("4", 3)
    late = row("r", "5", "usage", "m", 4, usage={"input_tokens": 99.0})
    first, second = DefaultTrajectoryStrategy().items(task(STEPS[0], silent, *reports, told, late))
    assert first.action.usage == {"input_tokens": 5.0, "cost": 1.0}
    assert second.action.usage == {"input_tokens": 12.0, "output_tokens": 3.0}, "what the call itself says is enough"
    assert first.reward.tool_outputs == []


def test_a_run_that_continues_has_items_too() -> None:
    (item,) = DefaultTrajectoryStrategy().items(task(model("2", 2), end=None))
    assert (item.meta.agent, item.meta.session_id, item.action.is_agent_finished) == ("", "", False)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"agents": {"lead"}}, [1, 3]),
        ({"steps": [2]}, [2]),
        ({"steps": ["5"]}, [3]),
        ({"where": lambda item: item.action.usage}, [1]),
        ({"agents": {"lead"}, "where": lambda item: item.action.is_agent_finished}, [3]),
    ],
)
def test_a_filter_keeps_items_and_their_numbers(filters: dict[str, Any], kept: list[int]) -> None:
    assert [item.meta.step for item in FilteredTrajectoryStrategy(**filters).items(task())] == kept


def test_a_memory_item_has_the_messages_of_its_agent() -> None:
    plain = [
        msgspec.structs.replace(step, kind="model", input=json_of({"args": []})) if step.name == "ask" else step
        for step in STEPS
    ]
    first, helper, last = MemoryTrajectoryStrategy().items(task(*plain))
    assert first.state.messages == [{"role": "user", "content": "a question"}]
    assert helper.state.messages == [{"role": "user", "content": "help"}]
    assert last.state.messages is not None
    assert [message["role"] for message in last.state.messages] == ["user", "assistant", "tool", "tool"]
    assert last.state.messages[2] == {"role": "tool", "name": "search", "content": ["found"]}
    assert MemoryTrajectoryStrategy().items(task())[0].state.messages == MESSAGES, "what is recorded stays"


def test_a_custom_strategy_changes_a_part() -> None:
    class Shouting(TrajectoryStrategy):
        def build_action(self, decision: Any) -> Any:
            action = super().build_action(decision)
            action.content = str(action.content).upper()
            return action

        def keep(self, item: TrajectoryItem) -> bool:
            return item.meta.agent == "helper"

    assert [item.action.content for item in Shouting().items(task())] == ["HELPED"]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrajectoryStore]:
    opened = await TrajectoryStore.open(f"sqlite:///{tmp_path}/trajectory.db")
    for number, (name, session) in enumerate([("t", "s"), ("u", "s"), ("v", "other")], 1):
        end = msgspec.structs.replace(END, task=name, session=session)
        await opened.write("weft", 0, 1, [RecordEntry(f"{number}-0", name, ENCODER.encode(STEPS), end)])
    yield opened
    await opened.close()


async def scored(store: TrajectoryStore, reward: RewardFunction, **more: Any) -> list[TrajectoryItem]:
    return [item async for item in trajectory_items(store, "weft", tasks=["t"], reward=reward, **more)]


async def by_tokens(item: TrajectoryItem, end: TaskEnd | None) -> float:
    assert end is not None
    return item.action.usage.get("input_tokens", 0.0) + (end.status == "completed") * 0.5


async def test_a_reward_may_be_a_number_or_an_object_sync_or_async(store: TrajectoryStore) -> None:
    assert [item.reward.score for item in await scored(store, by_tokens)] == [12.5, 0.5, 0.5]
    graded = await scored(store, lambda item, end: {"score": 1, "why": item.meta.agent})
    assert (graded[0].reward.score, graded[0].reward.details) == (1.0, {"why": "lead"})
    assert [item.reward.score for item in await scored(store, lambda item, end: None)] == [None] * 3


async def test_items_below_a_reward_are_left_out(store: TrajectoryStore) -> None:
    assert [item.meta.step for item in await scored(store, by_tokens, min_reward=0.6)] == [1]
    assert await scored(store, lambda item, end: None, min_reward=0.0) == []


@pytest.mark.parametrize("given", [True, "much", float("nan"), {"score": []}])
async def test_an_invalid_score_names_the_item(store: TrajectoryStore, given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"reward: .* for item t:r:2 is not a score: .* finite number"):
        await scored(store, lambda item, end: given)


async def test_a_reward_function_that_raises_names_the_item(store: TrajectoryStore) -> None:
    def broken(item: TrajectoryItem, end: TaskEnd | None) -> float:
        raise KeyError("score")

    with pytest.raises(InvalidInput, match=r"reward: failed for item t:r:2: KeyError"):
        await scored(store, broken)


async def test_a_line_holds_an_item(store: TrajectoryStore) -> None:
    out = io.BytesIO()
    count = await export_items_jsonl(out, trajectory_items(store, "weft", session="s", reward=by_tokens))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert count == len(lines) == 6
    assert [line["meta"]["task_id"] for line in lines] == ["t"] * 3 + ["u"] * 3
    assert set(lines[0]) == {"id", "meta", "state", "action", "reward"}
    assert lines[0]["reward"]["score"] == 12.5


async def test_a_parquet_file_of_items_has_typed_columns(
    store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROW_GROUP_ROWS", 4)
    path = tmp_path / "items.parquet"
    assert await export_items_parquet(path, trajectory_items(store, "weft", reward=by_tokens)) == 9
    table = pq.read_table(path)
    assert table.schema.names == ITEM_SCHEMA.names
    assert pq.ParquetFile(path).num_row_groups == 3
    first, helper, last = table.to_pylist()[:3]
    assert (first["score"], first["usage"]) == (12.5, [("input_tokens", 12.0), ("output_tokens", 3.0)])
    assert json.loads(first["messages"]) == MESSAGES
    assert json.loads(first["logprobs"]) == [-0.1, -0.2]
    assert (helper["messages"], helper["logprobs"], helper["pre_agent"]) == (None, None, "lead")
    assert last["is_agent_finished"] is True


def test_an_app_has_one_reward_function() -> None:
    app, other = App("one"), App("other")

    @app.reward
    def reward(item: TrajectoryItem, end: TaskEnd | None) -> float:
        return 1.0

    app.reward(reward)
    assert app.reward_function is reward
    other.include(app)
    assert other.reward_function is reward
    with pytest.raises(ConfigurationError, match="reward function"):
        app.reward(lambda item, end: 0.0)
    with pytest.raises(ConfigurationError, match="is not callable"):
        app.reward(3)  # type: ignore[type-var]  # what a user may give
