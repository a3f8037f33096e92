"""What a user asks for: a Task with all that it needs, and its TaskConfig."""

from __future__ import annotations

import dataclasses
import difflib
import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runtime_core.aworld.swarm import Swarm
from runtime_core.codec import quoted
from runtime_core.declare.hook_points import point_named
from runtime_core.engines.runtime_engine import ENGINE_WAIT_SECONDS
from runtime_core.errors import InvalidInput
from runtime_core.ids import TASK_ID_RULE, is_task_id
from runtime_core.wire.commands import ENGINES
from runtime_core.wire.results import StreamingMode, streaming_mode

if TYPE_CHECKING:
    from runtime_core.aworld.handles import Surroundings
    from runtime_core.wire.results import TaskResponse

RUN_MODES = ("one_way", "interactive")


class TaskStatus(StrEnum):
    """How far a task is, in the words of `Task.task_status`."""

    INIT = "init"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"

    @classmethod
    def of(cls, response: TaskResponse) -> TaskStatus:
        """The status of a task that ended so."""
        if response.status == "failed":
            late = (response.error or {}).get("type") == "TimeLimit"
            return cls.TIMEOUT if late else cls.FAILED
        return cls.SUCCESS if response.success else cls.CANCELLED


@dataclass(frozen=True)
class TaskConfig(Mapping[str, object]):
    """How a task runs. Reads like a dict: `conf.get("max_depth", 3)` looks at the fields, then at `ext`.

    `max_steps` bounds the loops of runners, swarms and agents; `timeout` is in seconds, 0 for none; `ext` holds what
    a runner of your own reads.
    """

    max_steps: int = 100
    timeout: float = 0.0
    run_mode: str = "one_way"
    """`one_way`, or `interactive` for a task that may ask a human."""
    stream: bool = False
    check_input: bool = False
    """Refuse a task without an input before it begins."""
    exit_on_failure: bool = False
    """Of several tasks given at once: begin no further one after this one has failed."""
    trajectory_strategy: str = ""
    engine: str = "local"
    """What `ctx.engine()` stands for in its agents."""
    engine_wait_seconds: float = ENGINE_WAIT_SECONDS
    """How long steps of the task wait for an engine that is away; 0: they fail at once."""
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Category of messages → name in `app.handlers`, in place of the default handler."""
    ext: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput that names the field, as in `conf.max_steps`."""
        _whole("conf.max_steps", self.max_steps, 1)
        _seconds("conf.timeout", self.timeout)
        _one_of("conf.run_mode", self.run_mode, RUN_MODES)
        _one_of("conf.engine", self.engine, ENGINES)
        _seconds("conf.engine_wait_seconds", self.engine_wait_seconds, "0 means not to wait")
        _text("conf.trajectory_strategy", self.trajectory_strategy)
        if not isinstance(self.handlers, Mapping) or not all(
            isinstance(each, str) for pair in self.handlers.items() for each in pair
        ):
            raise InvalidInput("conf.handlers", f"{self.handlers!r} is not a dict of category to handler name")
        for name in ("stream", "check_input", "exit_on_failure"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"conf.{name}", f"{getattr(self, name)!r} is not True or False")

    @classmethod
    def of(cls, given: TaskConfig | Mapping[str, object] | None, *, extras: bool = False) -> TaskConfig:
        """A config from itself or from a dict. Raises InvalidInput for wrong values and unknown names.

        With `extras`, unknown names are for the task's own runner, and go into `ext`.
        """
        if isinstance(given, TaskConfig):
            return given
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InvalidInput("conf", f"{given!r} is neither a TaskConfig nor a dict")
        known: dict[str, Any] = {name: value for name, value in given.items() if name in _CONF}  # Any: checked below
        others = {name: value for name, value in given.items() if name not in _CONF}
        if others and not extras:
            raise _unknown("conf", next(iter(others)), _CONF, "; what a runner of your own reads belongs into conf.ext")
        ext = known.pop("ext", {})
        if not isinstance(ext, Mapping):
            raise InvalidInput("conf.ext", f"{ext!r} is not a dict")
        return cls(**known, ext={**ext, **others})

    def changed(self) -> dict[str, object]:
        """What differs from the defaults, as a dict that `of` reads."""
        different: dict[str, object] = {}
        for name, default in _CONF.items():
            value = getattr(self, name)
            if value != default:
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
    """A task, with the objects that it needs or their names.

    `agent`, `swarm`, `tools` and `runner_cls` may be objects where the task runs in this process; where services run
    it, they stand for what the services' app has declared under their names. `input` is any JSON value.
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
    endless_threshold: int = 3
    """How often the same handing over may repeat with the same content."""
    runner_cls: type[Any] | str | None = None  # Any: a Runner, whose module stands on this one
    hooks: dict[str, list[str]] = field(default_factory=dict)
    """Hook point → names of declared hooks."""
    context: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    is_sub_task: bool = False
    group_id: str = ""
    parent_task: str = ""
    """The id of the task that this one is a part of."""
    max_retry_count: int = 0
    """How often the whole task is tried again after an error."""
    timeout: float = 0.0
    """Seconds; 0: as `conf.timeout` says."""
    observation: Any = None  # Any: an Observation or the JSON of its content
    streaming_mode: StreamingMode | str | None = None
    task_status: TaskStatus = TaskStatus.INIT
    """Kept by Runners while they run the task."""
    surroundings: Surroundings | None = field(default=None, repr=False, compare=False)
    """Set inside the task's run: what its runner works with."""

    def __post_init__(self) -> None:
        """Raises InvalidInput that names the field. None stands for a field's default."""
        self._defaults()
        if not isinstance(self.id, str) or not is_task_id(self.id):
            raise InvalidInput("id", f"{self.id!r} is not a task id: {TASK_ID_RULE}")
        _whole("max_retry_count", self.max_retry_count, 0)
        _whole("endless_threshold", self.endless_threshold, 1)
        _seconds("timeout", self.timeout)
        for name in ("name", "user_id", "session_id", "group_id"):
            _text(name, getattr(self, name))
        if self.swarm is not None and not isinstance(self.swarm, Swarm | str):
            raise InvalidInput("swarm", f"{self.swarm!r} is neither a Swarm nor the name of one: write Swarm(…)")
        self.tools = _listed("tools", self.tools, "functions, or objects with a step method")
        self.tool_names = _listed("tool_names", self.tool_names, "names of tools")
        for place, tool in enumerate(self.tool_names):
            _text(f"tool_names.{place}", tool)
        if not isinstance(self.context, Mapping) or not all(isinstance(key, str) for key in self.context):
            raise InvalidInput("context", f"{self.context!r} is not a dict of names and values")
        if self.agent is not None and self.swarm is not None:
            raise InvalidInput("swarm", "a task has an agent or a swarm, not both: put the agent into the swarm")
        if isinstance(self.parent_task, Task):
            self.parent_task = self.parent_task.id
        _text("parent_task", self.parent_task)
        if self.streaming_mode is not None:
            self.streaming_mode = streaming_mode("streaming_mode", _value(self.streaming_mode))
        self.hooks = _named_hooks(self.hooks)
        self.conf = TaskConfig.of(self.conf, extras=self.runner_cls is not None)

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
        """`streaming_mode`, checked; with none, `conf.stream` asks for all pieces of output."""
        if self.streaming_mode is None:
            return StreamingMode.CHUNK_OUTPUT if self.config.stream else None
        return StreamingMode(self.streaming_mode)

    @property
    def timeout_seconds(self) -> float | None:
        """The task's time limit; None: none."""
        return self.timeout or self.config.timeout or None


def _unknown(where: str, name: str, known: Mapping[str, object], remedy: str) -> InvalidInput:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}{remedy}"
    return InvalidInput(f"{where}.{name}", f"is not known; {hint}")


def _named_hooks(value: object) -> dict[str, list[str]]:
    if not isinstance(value, Mapping):
        raise InvalidInput("hooks", f"{quoted(value)} is not an object of hook points and the names of hooks")
    found: dict[str, list[str]] = {}
    for point, names in value.items():
        point_named(point, f"hooks.{point}")
        if not isinstance(names, list | tuple):
            raise InvalidInput(f"hooks.{point}", f"{quoted(names)} is not a list of names of hooks")
        found[str(point)] = list(names)
    return found


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidInput(name, f"{value!r} is no text")


def _listed(name: str, value: object, of: str) -> list[Any]:  # Any: what the caller checks
    if not isinstance(value, list | tuple):
        raise InvalidInput(name, f"{value!r} is not a list of {of}")
    return list(value)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(name, f"{value!r} is not a whole number from {least} up")


def _seconds(name: str, value: object, zero: str = "0 means no limit") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidInput(name, f"{value!r} is not a number of seconds; {zero}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(name, f"{value!r} is not one of {', '.join(allowed)}")


def _value(mode: StreamingMode | str) -> str:
    value: str = mode.value if isinstance(mode, StreamingMode) else mode
    return value
