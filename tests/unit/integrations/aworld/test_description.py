"""A task as JSON: what it keeps, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from runtime_core.declare.declaration import label
from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.description import describe, read_description, task_of
from runtime_core.integrations.aworld.task import Task
from runtime_core.wire.events import StreamingMode


def test_a_task_travels_as_json_and_comes_back() -> None:
    task = Task(
        id="t-1",
        name="n",
        user_id="u",
        session_id="s",
        input={"a": [1]},
        conf={"max_steps": 7},
        tool_names=["x"],
        agent="writer",
        endless_threshold=5,
        hooks={"start": ["one"]},
        context={"k": 1},
        is_sub_task=True,
        group_id="g",
        parent_task="p",
        max_retry_count=2,
        timeout=3.0,
        observation={"content": "c", "info": {"x": 1}},
        streaming_mode=StreamingMode.ALL,
    )
    data = msgspec.json.encode(describe(task, lambda kind, named: label(named)))
    assert task_of(read_description(data), "other", "other") == task


def test_a_description_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^input: .*`agnet`"):
        read_description(b'{"agnet": "x"}')
    with pytest.raises(InvalidInput, match=r"^input.max_retry_count: Expected `int`"):
        read_description(b'{"max_retry_count": "x"}')
    with pytest.raises(InvalidInput, match=r"^input.swarm.topology.0"):
        task_of(read_description(b'{"swarm": {"topology": [5]}}'), "t", "")


def test_invalid_json_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^input: "):
        describe(Task(input=object()), lambda kind, named: label(named))
