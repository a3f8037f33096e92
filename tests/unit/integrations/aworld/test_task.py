"""What a Task, its config and its response accept, and how they refuse everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.task import Task, TaskConfig
from runtime_core.wire.events import TaskResponse


def test_a_task_has_the_fields_of_aworlds() -> None:
    names = (
        "id name user_id session_id trace_id input conf tools tool_names tools_conf mcp_servers_conf swarm agent "
        "event_driven endless_threshold outputs runner_cls hooks context context_config is_sub_task group_id "
        "parent_task max_retry_count timeout observation task_status streaming_mode"
    )
    public = {field.name for field in dataclasses.fields(Task) if field.compare}
    assert public == set(names.split())


def test_a_config_reads_like_a_dict() -> None:
    conf = Task(conf={"max_steps": 20, "run_mode": "interactive", "check_input": True, "ext": {"depth": 2}}).config
    assert (conf.max_steps, conf.run_mode, conf.check_input) == (20, "interactive", True)
    assert (conf.get("max_steps"), conf.get("depth", 3), conf.get("breadth", 3)) == (20, 2, 3)
    assert conf["run_mode"] == "interactive"
    assert Task(conf={"run_mode": "INTERACTIVE"}).config == Task(conf={"run_mode": "interactive"}).config
    given = TaskConfig(max_steps=20, run_mode="interactive", check_input=True, ext={"depth": 2})
    assert Task(conf=given).config == given == conf


def test_names_for_a_custom_runner_are_kept() -> None:
    assert Task(conf={"max_depth": 2}, runner_cls="Tree").config.get("max_depth", 3) == 2
    with pytest.raises(InvalidInput, match=r"^conf.max_step: is not known; did you mean max_steps\?"):
        Task(conf={"max_step": 2})
    with pytest.raises(InvalidInput, match=r"belong in conf.ext$"):
        Task(conf={"depth": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "a b"}, "id: 'a b' is not a task id"),
        ({"max_retry_count": -1}, "max_retry_count: -1"),
        ({"timeout": -1}, "timeout: -1"),
        ({"endless_threshold": 0}, "endless_threshold: 0"),
        ({"agent": ""}, "agent: is empty: give a name, or leave it out"),
        ({"swarm": ""}, "swarm: is empty"),
        ({"runner_cls": ""}, "runner_cls: is empty"),
        ({"is_sub_task": "yes"}, "is_sub_task: 'yes' is not True or False"),
        ({"conf": {"ext": {1: 2}}}, "conf.ext: 1 is not text"),
        ({"agent": "a", "swarm": "b"}, "swarm: a task has an agent or a swarm, not both"),
        ({"streaming_mode": "some"}, 'streaming_mode: "some" is not a streaming mode; choose from core'),
        ({"conf": 5}, "conf: 5 is neither"),
        ({"hooks": ["start"]}, 'hooks: ["start"] is not an object of hook points'),
        ({"hooks": {"strat": ["alert"]}}, "hooks.strat: is not a hook point; choose from task_created"),
        ({"hooks": {"start": "alert"}}, 'hooks.start: "alert" is not a list of hook names'),
        ({"hooks": {"start": [3]}}, "hooks.start.0: 3 is not text"),
        ({"conf": {"max_steps": True}}, "conf.max_steps: True"),
        ({"conf": {"run_mode": "both"}}, "conf.run_mode: 'both' is not one of one_way, interactive"),
        ({"conf": {"stream": "yes"}}, "conf.stream: 'yes' is not True or False"),
        ({"conf": {"engine": "gpu"}}, "conf.engine: 'gpu' is not one of"),
        ({"conf": {"engine_wait_seconds": -1}}, "conf.engine_wait_seconds: -1 is not a number of seconds; 0 means not"),
        (
            {"conf": {"trajectory_storage": "x"}},
            "conf.trajectory_storage: is not known; did you mean trajectory_strategy",
        ),
        (
            {"conf": {"trajectory_strategy": "best"}},
            "conf.trajectory_strategy: 'best' is not a strategy; choose from default, memory",
        ),
        ({"conf": {"max_stepz": 3}, "runner_cls": "Mine"}, "conf.max_stepz: is not known; did you mean max_steps"),
        ({"event_driven": 1}, "event_driven: 1 is not True or False"),
        (
            {"event_driven": False, "conf": {"handlers": {"agent": "mine"}}},
            "conf.handlers: has no effect with event_driven=False",
        ),
        ({"outputs": []}, "outputs: [] has no add_output(event)"),
        ({"trace_id": "t-1"}, "trace_id: 't-1' is not 32 hexadecimal digits"),
        ({"tools_conf": {"search": 5}}, "tools_conf.search: 5 is not a dict"),
        (
            {"mcp_servers_conf": {"files": {"comand": "x"}}},
            "mcp_servers_conf.files.comand: is not known; did you mean command",
        ),
        (
            {"mcp_servers_conf": {"mcpServers": {"f": {"type": "sse"}}}},
            'mcp_servers_conf.f.type: "sse" is not one of stdio',
        ),
        ({"context_config": {"sesion": True}}, "context_config.sesion: is not known; did you mean session"),
        ({"context_config": {"session": True}}, "context_config.session: the task has no session"),
        ({"task_status": "done"}, "task_status: 'done' is not a status; choose from init, running"),
        ({"conf": {"run_mode": 3}}, "conf.run_mode: 3 is not one of one_way, interactive"),
        ({"conf": {"handlers": {3: "mine"}}}, "conf.handlers: {3: 'mine'} is not a dict"),
        ({"name": 3}, "name: 3 is not text"),
        ({"user_id": 3}, "user_id: 3 is not text"),
        ({"session_id": b"s"}, "session_id: b's' is not text"),
        ({"group_id": 3}, "group_id: 3 is not text"),
        ({"parent_task": 3}, "parent_task: 3 is not text"),
        ({"swarm": ["a", "b"]}, "swarm: ['a', 'b'] is neither a Swarm nor the name of one"),
        ({"tools": len}, "tools: <built-in function len> is not a list of functions"),
        ({"tool_names": "add"}, "tool_names: 'add' is not a list of names"),
        ({"tool_names": ["add", 3]}, "tool_names.1: 3 is not text"),
        ({"context": ["a"]}, 'context: ["a"] is not a dict'),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:  # Any: what a user might write
    with pytest.raises(InvalidInput) as caught:
        Task(**fields)
    assert message in str(caught.value)


def test_none_stands_for_the_default_of_a_field() -> None:
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Task))  # Any: None for all
    given = Task(**nothing)
    assert given == Task(id=given.id)


def test_a_response_accepts_and_offers_the_names_of_other_runtimes() -> None:
    done = TaskResponse(task_id="t", content="x", status="success")
    assert done == TaskResponse("t", "completed", "x") == TaskResponse(id="t", answer="x", success=True)
    assert (done.id, done.answer, done.content, done.output, done.success, done.msg) == ("t", "x", "x", "x", True, "")
    failed = TaskResponse(task_id="t", content="went wrong", status="failed")
    assert (failed.success, failed.msg, failed.error) == (
        False,
        "went wrong",
        {"type": "TaskFailed", "message": "went wrong"},
    )
    assert TaskResponse("t", success=False, msg="no").status == TaskResponse("t", msg="no").status == "failed"
    assert TaskResponse("t", "completed", answer=0).output == 0
    with pytest.raises(InvalidInput, match=r"^status: 'done' is not one of completed"):
        TaskResponse("t", "done")


def test_a_config_of_the_wrong_kind_is_one_clear_error() -> None:
    with pytest.raises(InvalidInput, match=r"^conf.ext: 5 is not a dict"):
        TaskConfig.of({"ext": 5})
