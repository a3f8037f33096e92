"""A task as JSON: the input of the agent that runs it.

The JSON refers to agents, tools and swarms by name, and only declared ones run. A client in any language can write it:
`{"agent": "weft.task", "input": {"agent": "researcher", "input": "streams"}}`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from runtime_core.declare.declaration import label
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.orchestration import Swarm
from runtime_core.integrations.aworld.task import TASK_AGENT, Task, TaskConfig
from runtime_core.integrations.aworld.topology import (
    HANDOFF,
    Loop,
    Loopable,
    Member,
    Nested,
    Node,
    Parallel,
    Serial,
    Topology,
)

NameOf = Callable[[str, object], str]
"""Returns the name under which an `agent`, a `tool` or a `swarm` is declared. Raises InvalidInput if it has none."""

Json = dict[str, Any]  # Any: JSON


class Description(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of a Task as JSON. An absent field has Task's default."""

    id: str = ""
    """Empty: the id of the task on the broker."""
    name: str = ""
    user_id: str = ""
    session_id: str = ""
    input: Any = None  # Any: JSON
    conf: Json = {}
    tool_names: list[str] = []
    swarm: Json | None = None
    agent: str = ""
    event_driven: bool = True
    endless_threshold: int = 3
    runner: str = ""
    """The runner's class as the task named it; its last part is the name in the agent `weft.task.<name>`."""
    hooks: dict[str, list[str]] = {}
    context: Json = {}
    is_sub_task: bool = False
    group_id: str = ""
    parent_task: str = ""
    max_retry_count: int = 0
    timeout: float = 0.0
    observation: Any = None  # Any: JSON of an Observation or of its content
    tools_conf: Json = {}
    context_config: dict[str, bool] = {}
    streaming_mode: str = ""


_AS_IN_TASK = (
    "name", "user_id", "input", "event_driven", "endless_threshold", "hooks", "context", "is_sub_task", "group_id",
    "parent_task", "max_retry_count", "timeout", "observation", "tools_conf", "context_config",
)  # fmt: skip
"""Fields with the same value in a Task."""
_DECODER = msgspec.json.Decoder(Description)


def read_description(data: bytes) -> Description:
    """Decode the input of a task's agent. Raises InvalidInput (`input…`)."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        text, _, where = str(error).partition(" - at `$")
        raise InvalidInput(f"input{where.rstrip('`')}", text) from None


def describe(task: Task, name_of: NameOf) -> Description:
    """Return a task as JSON. Raises InvalidInput for objects without a name and values that JSON cannot hold."""
    swarm = task.swarm
    agent = "" if task.agent is None else name_of("agent", task.agent)
    described = None
    if isinstance(swarm, Swarm) and not _needs_code(swarm.node):
        described = _swarm(swarm, name_of)
    elif swarm is not None:
        agent = name_of("swarm", swarm)
    found = Description(
        **{name: getattr(task, name) for name in _AS_IN_TASK},
        id=task.id,
        session_id=task.session_id,
        conf=task.config.changed(),
        tool_names=[*task.tool_names, *(name_of("tool", tool) for tool in task.tools)],
        swarm=described,
        agent=agent,
        runner=runner_text(task.runner_cls),
        streaming_mode="" if task.streaming_mode is None else str(getattr(task.streaming_mode, "value", "")),
    )
    for name in ("input", "context", "observation", "conf", "tools_conf"):
        setattr(found, name, msgspec.json.decode(encode(getattr(found, name), name)))
    return found


def task_of(found: Description, task_id: str, session_id: str) -> Task:
    """Return the described task, with agents and tools by name. Raises InvalidInput."""
    return Task(
        **{name: getattr(found, name) for name in _AS_IN_TASK},
        id=found.id or task_id,
        session_id=found.session_id or session_id,
        conf=TaskConfig.of(found.conf),
        tool_names=found.tool_names,
        swarm=None if found.swarm is None else _read_swarm(found.swarm, "input.swarm"),
        agent=found.agent or None,
        runner_cls=found.runner or None,
        streaming_mode=found.streaming_mode or None,
    )


def class_named(runner: object) -> object:
    """Return the class that `package.module.Class` names, if that module is loaded here; otherwise `runner` itself.

    A package may offer a class under a name that differs from its module's, as `weft.aworld.TaskRunner`.
    """
    module, _, name = runner.rpartition(".") if isinstance(runner, str) else ("", "", "")
    found = getattr(sys.modules.get(module), name, None) if module else None
    return found if inspect.isclass(found) else runner


def runner_text(runner: object) -> str:
    """Return a runner's name, or the full name of its class."""
    runner = class_named(runner)
    if runner is None or isinstance(runner, str):
        return runner or ""
    return f"{getattr(runner, '__module__', '')}.{getattr(runner, '__qualname__', repr(runner))}"


def agent_of_runner(runner: object) -> str:
    """Return the agent that runs tasks with this runner: a class, a declared name, or `package.module.Class`."""
    runner = class_named(runner)
    name = runner.rpartition(".")[2] if isinstance(runner, str) else getattr(runner, "__name__", "")
    return f"{TASK_AGENT}.{name}" if name and name != "TaskRunner" else TASK_AGENT


def agents_of(found: Description) -> list[str]:
    if found.swarm is None:
        return [found.agent] if found.agent else []
    return [label(agent) for agent in _read_swarm(found.swarm, "swarm").ordered_agents]


# ---- swarms as JSON -------------------------------------------------------------------------------------------


def _needs_code(node: Node) -> bool:
    """Whether the node contains a stop condition, which is code and cannot be sent."""
    match node:
        case Member():
            return False
        case Serial(nodes) | Parallel(nodes):
            return any(_needs_code(each) for each in nodes)
        case Loop(inner, _, stop):
            return stop is not None or _needs_code(inner)
        case Nested(swarm):
            return _needs_code(swarm.node)


def _swarm(swarm: Topology, name_of: NameOf) -> Json:
    described: Json = {"name": swarm.name, "build_type": swarm.build_type.value}
    if swarm.max_steps is not None:
        described["max_steps"] = swarm.max_steps
    described["root_agent"] = name_of("agent", swarm.root_agent)
    if swarm.build_type is HANDOFF:
        described["topology"] = [[name_of("agent", agent) for agent in edge] for edge in swarm.edges]
    else:
        described["topology"] = [_part(node, name_of) for node in swarm.node.nodes]
    return described


def _part(node: Node, name_of: NameOf) -> object:
    match node:
        case Member(agent):
            return name_of("agent", agent)
        case Serial(nodes):
            return {"serial": [_part(each, name_of) for each in nodes]}
        case Parallel(nodes):
            return {"parallel": [_part(each, name_of) for each in nodes]}
        case Loop(inner, times, _):
            return {"loop": _part(inner, name_of), "max_run_times": times}
        case Nested(swarm):
            return {"swarm": _swarm(swarm, name_of)}


def _read_swarm(described: object, path: str) -> Swarm:
    if not isinstance(described, Mapping):
        raise InvalidInput(path, f"{described!r} is not an object with a topology")
    topology = described.get("topology")
    if not isinstance(topology, list):
        raise InvalidInput(f"{path}.topology", f"{topology!r} is not a list")
    return Swarm(
        *(_read_part(part, f"{path}.topology.{place}") for place, part in enumerate(topology)),
        name=str(described.get("name", "swarm")),
        build_type=described.get("build_type"),
        max_steps=described.get("max_steps"),
        root_agent=described.get("root_agent"),
    )


def _read_part(part: object, path: str) -> object:
    match part:
        case str():
            return part
        case [str(), str()]:
            return tuple(part)
        case {"serial": [*parts]}:
            return tuple(_read_part(each, f"{path}.{place}") for place, each in enumerate(parts))
        case {"parallel": [*parts]}:
            return [_read_part(each, f"{path}.{place}") for place, each in enumerate(parts)]
        case {"loop": inner, "max_run_times": int(times)}:
            return Loopable(_read_part(inner, path), times)
        case {"swarm": inner}:
            return _read_swarm(inner, path)
    raise InvalidInput(path, f"{part!r} is neither an agent's name nor one of serial, parallel, loop and swarm")
