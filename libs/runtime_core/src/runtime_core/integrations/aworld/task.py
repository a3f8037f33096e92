"""A Task and its TaskConfig: what a user gives to a runner."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runtime_core.declare.manifest import point_named
from runtime_core.engines.runtime_engine import ENGINE_WAIT_SECONDS
from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.orchestration import Swarm
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import ENGINES, is_own_engine
from runtime_core.wire.events import StreamingMode, streaming_mode
from runtime_core.wire.ids import TASK_ID_RULE, is_task_id
from runtime_core.wire.step import Status

if TYPE_CHECKING:
    from runtime_core.integrations.aworld.orchestration import RunScope
    from runtime_core.wire.events import TaskResponse

TASK_AGENT = "weft.task"
"""The agent that runs tasks that name no runner."""

RUN_MODES = ("one_way", "interactive")
STRATEGIES = ("default", "memory")
"""Names of trajectory strategies."""
CONTEXT_CONFIG = ("session", "response")
"""The members of a task's `context_config`."""
CONTEXT_STEP = "weft.context"
"""The step of a task's run that records the values of its context."""
TYPING_ERROR = 0.85
"""How similar a name must be to a known one to be taken for a typing error."""
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")


class TaskStatus(StrEnum):
    """The state of a task, as `Task.task_status` shows it."""

    INIT = "init"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"

    @classmethod
    def named(cls, value: object) -> TaskStatus:
        """Return the status of this name, in any case. Raises InvalidInput."""
        try:
            return cls(str(value).lower())
        except ValueError:
            raise InvalidInput(
                "task_status", f"{value!r} is not a status; choose from {', '.join(each.value for each in cls)}"
            ) from None

    @classmethod
    def of(cls, response: TaskResponse) -> TaskStatus:
        """Return the status of a task that ended with this response."""
        if response.status == Status.FAILED:
            late = (response.error or {}).get("type") == "TimeLimit"
            return cls.TIMEOUT if late else cls.FAILED
        return cls.SUCCESS if response.success else cls.CANCELLED


@dataclass(frozen=True)
class TaskConfig(Mapping[str, object]):
    """How a task runs. It is also a mapping: `conf.get("max_depth", 3)` looks at the fields, then at `ext`.

    `max_steps` bounds the loops of runners, swarms and agents. `timeout` is in seconds; 0 means no limit. `ext` holds
    settings for your own runner.
    """

    max_steps: int = 100
    timeout: float = 0.0
    run_mode: str = "one_way"
    """`one_way` or `interactive`, in any case: whether Runners ask its questions on standard input."""
    stream: bool = False
    check_input: bool = False
    """Refuse a task that has no input."""
    exit_on_failure: bool = False
    """When several tasks run together, start no more of them once this one has failed."""
    engine: str = "local"
    """The default engine of `ctx.engine()` in the task's agents; `package.module:Class` for your own."""
    engine_wait_seconds: float = ENGINE_WAIT_SECONDS
    """How long steps wait for an unavailable engine; 0: they fail immediately."""
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Message category → a name in `app.handlers` that replaces the default handler."""
    trajectory_strategy: object = None
    """What builds `response.trajectory`: `default`, `memory`, a TrajectoryStrategy or a subclass of it, or
    `package.module.Class`; None: `default`."""
    ext: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput that names the field, as in `conf.max_steps`."""
        _whole("conf.max_steps", self.max_steps, 1)
        _seconds("conf.timeout", self.timeout)
        mode = self.run_mode.lower() if isinstance(self.run_mode, str) else self.run_mode
        _one_of("conf.run_mode", mode, RUN_MODES)
        object.__setattr__(self, "run_mode", mode)
        if not is_own_engine(self.engine):
            _one_of("conf.engine", self.engine, (*ENGINES, "package.module:Class"))
        _seconds("conf.engine_wait_seconds", self.engine_wait_seconds, "0 means not to wait")
        if not isinstance(self.handlers, Mapping) or not all(
            isinstance(each, str) for pair in self.handlers.items() for each in pair
        ):
            raise InvalidInput("conf.handlers", f"{self.handlers!r} is not a dict of categories and handler names")
        _check_strategy(self.trajectory_strategy)
        for name in ("stream", "check_input", "exit_on_failure"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"conf.{name}", f"{getattr(self, name)!r} is not True or False")
        for extra in self.ext:
            _text("conf.ext", extra)

    @classmethod
    def of(cls, given: TaskConfig | Mapping[str, object] | None, *, extras: bool = False) -> TaskConfig:
        """Return `given` as a config. Raises InvalidInput for wrong values and unknown names.

        With `extras`, unknown names go into `ext`, for the task's own runner.
        """
        if isinstance(given, TaskConfig):
            return given
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InvalidInput("conf", f"{given!r} is neither a TaskConfig nor a dict")
        known: dict[str, Any] = {name: value for name, value in given.items() if name in _CONF}  # Any: checked below
        others = {name: value for name, value in given.items() if name not in _CONF}
        for name in others:
            # A runner has its own settings, but a name that is almost a field is still a mistake.
            if not extras or difflib.get_close_matches(str(name), _CONF, n=1, cutoff=TYPING_ERROR):
                raise _unknown("conf", str(name), _CONF, "; settings for your own runner belong in conf.ext")
        ext = known.pop("ext", {})
        if not isinstance(ext, Mapping):
            raise InvalidInput("conf.ext", f"{ext!r} is not a dict")
        return cls(**known, ext={**ext, **others})

    def changed(self) -> dict[str, object]:
        """Return the fields that differ from their defaults, as a dict that `of` reads."""
        different: dict[str, object] = {}
        for name, default in _CONF.items():
            value = getattr(self, name)
            # A strategy of the caller's own works where the caller is.
            if value != default and (name != "trajectory_strategy" or value in STRATEGIES):
                different[name] = value
        return different

    def __getitem__(self, name: str) -> object:
        if name in _CONF:
            value: object = getattr(self, name)
            return value
        return self.ext[name]

    def __iter__(self) -> Iterator[str]:
        yield from _CONF
        yield from self.ext

    def __len__(self) -> int:
        return len(_CONF) + len(self.ext)


_CONF: dict[str, object] = {
    part.name: {} if part.name in ("ext", "handlers") else part.default for part in dataclasses.fields(TaskConfig)
}
"""Field → default."""


@dataclass
class Task:
    """A task, with its agents, tools and runner as objects or names.

    Services run only what their app declares: there, an object stands for the declaration of its name. `input` is any
    JSON value.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str = ""
    user_id: str = ""
    session_id: str = ""
    input: Any = None  # Any: whatever JSON can hold
    conf: TaskConfig | Mapping[str, Any] | None = None  # Any: checked by TaskConfig.of
    tools: list[object] = field(default_factory=list)
    """Functions, or objects with a `step` method."""
    tool_names: list[str] = field(default_factory=list)
    swarm: Swarm | str | None = None
    agent: object = None
    """A name, an async function, an Agent class, or an object or class with `async_policy` or `policy`."""
    event_driven: bool = True
    """Whether TaskRunner works with messages and their handlers; False: it calls the agents in a loop."""
    endless_threshold: int = 3
    """How often the same handoff may repeat with the same content."""
    runner_cls: type[Any] | str | None = None  # Any: a Runner, whose module imports this one
    hooks: dict[str, list[str]] = field(default_factory=dict)
    """Hook point → names of declared hooks."""
    context: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    is_sub_task: bool = False
    group_id: str = ""
    parent_task: str = ""
    """The id of the task that this one belongs to."""
    max_retry_count: int = 0
    """How often the whole task is retried after an error."""
    timeout: float = 0.0
    """Seconds; 0: `conf.timeout` applies."""
    observation: Any = None  # Any: an Observation or the JSON of its content
    outputs: Any = None  # Any: an object with `add_output`, such as Outputs
    """Gets each event while Runners run the task: `add_output(event)`, sync or async."""
    trace_id: str = ""
    """The trace of the task: 32 hexadecimal digits. Empty: one that derives from the task's id."""
    tools_conf: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: JSON
    """Tool → its settings, which the tool reads as `ToolContext.conf`."""
    mcp_servers_conf: dict[str, Any] = field(default_factory=dict)  # Any: see `mcp_settings`
    """MCP servers for the task, by name: `{"files": {"command": "…", "args": […]}}`, also under `mcpServers`."""
    context_config: dict[str, bool] = field(default_factory=dict)
    """`session`: whether the task's context begins with its session's, and goes back into it. `response`: whether
    `TaskResponse.context` is filled (True)."""
    streaming_mode: StreamingMode | str | None = None
    task_status: TaskStatus | str = TaskStatus.INIT
    """Runners update it while they run the task. Set it to `cancelled` or `interrupted` to cancel the task."""
    scope: RunScope | None = field(default=None, repr=False, compare=False)
    """The agents and tools of the task's run; set inside it."""
    cancel: Callable[[str], object] | None = field(default=None, repr=False, compare=False)
    """Cancels the task for a reason; set while Runners run it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "task_status" and value is not None:
            value = TaskStatus.named(value)
        super().__setattr__(name, value)
        if name == "task_status" and self.wants_cancel and self.__dict__.get("cancel") is not None:
            self.cancel(f"its task_status was set to {value}")  # type: ignore[misc]  # not None

    @property
    def wants_cancel(self) -> bool:
        """Whether `task_status` asks for the end of the task."""
        return self.task_status in (TaskStatus.CANCELLED, TaskStatus.INTERRUPTED)

    def note_status(self, status: TaskStatus) -> None:
        """Record the state of the task. A requested interruption ends as one."""
        if status is TaskStatus.CANCELLED and self.task_status == TaskStatus.INTERRUPTED:
            return
        object.__setattr__(self, "task_status", status)

    def __post_init__(self) -> None:
        """Check all fields; None stands for a field's default. Raises InvalidInput that names the field."""
        self._defaults()
        if not isinstance(self.id, str) or not is_task_id(self.id):
            raise InvalidInput("id", f"{self.id!r} is not a task id: {TASK_ID_RULE}")
        _whole("max_retry_count", self.max_retry_count, 0)
        _whole("endless_threshold", self.endless_threshold, 1)
        _seconds("timeout", self.timeout)
        for name in ("name", "user_id", "session_id", "group_id"):
            _text(name, getattr(self, name))
        for name in ("agent", "swarm", "runner_cls"):
            if getattr(self, name) == "":
                raise InvalidInput(name, "is empty: give a name, or leave it out")
        if self.swarm is not None and not isinstance(self.swarm, Swarm | str):
            raise InvalidInput("swarm", f"{self.swarm!r} is neither a Swarm nor the name of one: write Swarm(…)")
        self.tools = _listed("tools", self.tools, "functions, or objects with a step method")
        self.tool_names = _listed("tool_names", self.tool_names, "names of tools")
        for place, tool in enumerate(self.tool_names):
            _text(f"tool_names.{place}", tool)
        for name in ("context", "tools_conf", "mcp_servers_conf", "context_config"):
            _mapping(name, getattr(self, name))
        self._check_settings()
        if self.agent is not None and self.swarm is not None:
            raise InvalidInput("swarm", "a task has an agent or a swarm, not both: put the agent in the swarm")
        if isinstance(self.parent_task, Task):
            self.parent_task = self.parent_task.id
        _text("parent_task", self.parent_task)
        if self.streaming_mode is not None:
            self.streaming_mode = streaming_mode("streaming_mode", _value(self.streaming_mode))
        self.hooks = _named_hooks(self.hooks)
        self.conf = TaskConfig.of(self.conf, extras=self.runner_cls is not None)
        if not self.event_driven and self.conf.handlers:
            raise InvalidInput("conf.handlers", "has no effect with event_driven=False: remove one of them")

    def _check_settings(self) -> None:
        """Raises InvalidInput."""
        for name in ("event_driven", "is_sub_task"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, f"{getattr(self, name)!r} is not True or False")
        if self.outputs is not None and not callable(getattr(self.outputs, "add_output", None)):
            raise InvalidInput("outputs", f"{self.outputs!r} has no add_output(event): pass Outputs()")
        _text("trace_id", self.trace_id)
        if self.trace_id and not _TRACE_ID.fullmatch(self.trace_id):
            raise InvalidInput("trace_id", f"{self.trace_id!r} is not 32 hexadecimal digits (0-9, a-f), not all zero")
        for tool, settings in self.tools_conf.items():
            _mapping(f"tools_conf.{tool}", settings)
        for name, value in self.context_config.items():
            if name not in CONTEXT_CONFIG:
                raise _unknown("context_config", name, dict.fromkeys(CONTEXT_CONFIG), "")
            if not isinstance(value, bool):
                raise InvalidInput(f"context_config.{name}", f"{value!r} is not True or False")
        if self.context_config.get("session") and not self.session_id:
            raise InvalidInput("context_config.session", "the task has no session: set its session_id, too")
        self.mcp_servers_conf = dict(_servers(self.mcp_servers_conf))

    def _defaults(self) -> None:
        for part in dataclasses.fields(self):
            if getattr(self, part.name) is not None:
                continue
            if part.default_factory is not dataclasses.MISSING:
                setattr(self, part.name, part.default_factory())
            elif part.default is not None:
                setattr(self, part.name, part.default)

    @property
    def config(self) -> TaskConfig:
        """`conf`, checked."""
        assert isinstance(self.conf, TaskConfig)  # __post_init__ has made it one
        return self.conf

    @property
    def streaming(self) -> StreamingMode | None:
        """`streaming_mode`, checked. Without one, `conf.stream` means all pieces of output."""
        if self.streaming_mode is None:
            return StreamingMode.CHUNK_OUTPUT if self.config.stream else None
        return StreamingMode(self.streaming_mode)

    @property
    def timeout_seconds(self) -> float | None:
        """The task's time limit; None for no limit."""
        return self.timeout or self.config.timeout or None


def _unknown(where: str, name: str, known: Mapping[str, object], remedy: str) -> InvalidInput:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}{remedy}"
    return InvalidInput(f"{where}.{name}", f"is not known; {hint}")


def _named_hooks(value: object) -> dict[str, list[str]]:
    if not isinstance(value, Mapping):
        raise InvalidInput("hooks", f"{quoted(value)} is not an object of hook points and lists of hooks")
    found: dict[str, list[str]] = {}
    for point, names in value.items():
        point_named(point, f"hooks.{point}")
        if not isinstance(names, list | tuple):
            raise InvalidInput(f"hooks.{point}", f"{quoted(names)} is not a list of hook names")
        for place, name in enumerate(names):
            _text(f"hooks.{point}.{place}", name)
        found[str(point)] = list(names)
    return found


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(name, f"{quoted(value)} is not a dict of names and values")


def _servers(given: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """Return the servers by name. They may be under `mcpServers`, as other programs write them."""
    if set(given) == {"mcpServers"}:
        given = given["mcpServers"]
    for name, settings in given.items():
        mcp_settings(f"mcp_servers_conf.{name}", settings)
    return given


_MCP = ("command", "args", "env", "cwd", "url", "headers", "timeout", "type", "tools")


def mcp_settings(field: str, given: object) -> dict[str, Any]:  # Any: MCPSettings
    """Return the settings of one MCP server, as `App.add_mcp` takes them. Raises InvalidInput."""
    _mapping(field, given)
    assert isinstance(given, Mapping)  # checked above
    for name in given:
        if name not in _MCP:
            raise _unknown(field, name, dict.fromkeys(_MCP), "")
    if given.get("type") not in (None, "stdio", "http", "streamable-http", "streamable_http"):
        raise InvalidInput(f"{field}.type", f"{quoted(given['type'])} is not one of stdio, http, streamable-http")
    found = {name: given[name] for name in ("env", "cwd", "url", "headers", "tools") if given.get(name) is not None}
    if "timeout" in given:
        found["timeout_seconds"] = given["timeout"]
    if given.get("command"):
        command = given["command"]
        found["command"] = [*([command] if isinstance(command, str) else command), *given.get("args", ())]
    return found


def _check_strategy(value: object) -> None:
    """Raises InvalidInput for anything that cannot be a trajectory strategy."""
    named = isinstance(value, str) and (value in STRATEGIES or "." in value)
    made = callable(getattr(value, "items", None)) and callable(getattr(value, "build", None))
    if value is not None and not named and not made:
        raise InvalidInput(
            "conf.trajectory_strategy",
            f"{value!r} is not a strategy; choose from {', '.join(STRATEGIES)}, a TrajectoryStrategy or a subclass of "
            "it, and package.module.Class",
        )


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidInput(name, f"{value!r} is not text")


def _listed(name: str, value: object, of: str) -> list[Any]:  # Any: what the caller checks
    if not isinstance(value, list | tuple):
        raise InvalidInput(name, f"{value!r} is not a list of {of}")
    return list(value)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(name, f"{value!r} is not a whole number of at least {least}")


def _seconds(name: str, value: object, zero: str = "0 means no limit") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidInput(name, f"{value!r} is not a number of seconds; {zero}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(name, f"{value!r} is not one of {', '.join(allowed)}")


def _value(mode: StreamingMode | str) -> str:
    value: str = mode.value if isinstance(mode, StreamingMode) else mode
    return value
