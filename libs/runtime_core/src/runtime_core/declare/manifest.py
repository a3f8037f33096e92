"""The names and schemas of an app, which handlers publish on the broker, and the points at which hooks run."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Never

import msgspec

from runtime_core.base.text import shortened
from runtime_core.errors import InvalidInput
from runtime_core.telemetry.redaction import redactor

if TYPE_CHECKING:
    from jsonschema_rs import Validator


class HookPoint(StrEnum):
    """A point in a task's life. `HookPoint("start")` and AWorld's other names return the same members."""

    # Around a task, in its first run.
    TASK_CREATED = "task_created"
    SESSION_STARTED = "session_started"
    USER_INPUT_RECEIVED = "user_input_received"
    PRE_TASK_CALL = "pre_task_call"
    POST_TASK_CALL = "post_task_call"
    TASK_COMPLETED = "task_completed"
    TASK_FAILED = "task_failed"
    SESSION_FINISHED = "session_finished"
    SESSION_FAILED = "session_failed"
    # Around each agent's run.
    AGENT_STARTED = "agent_started"
    AGENT_STOPPED = "agent_stopped"
    # Around an agent's steps.
    BEFORE_LLM_CALL = "before_llm_call"
    AFTER_LLM_CALL = "after_llm_call"
    BEFORE_TOOL_CALL = "before_tool_call"
    AFTER_TOOL_CALL = "after_tool_call"
    TOOL_CALL_FAILED = "tool_call_failed"
    HUMAN_REQUESTED = "human_requested"
    HUMAN_ANSWERED = "human_answered"
    OUTPUT_PROCESS = "output_process"
    # Around a shortened conversation with a model; agents with other ways to shorten one fire them with `ctx.hook`.
    BEFORE_CONTEXT_COMPACT = "before_context_compact"
    AFTER_CONTEXT_COMPACT = "after_context_compact"

    # AWorld's names.
    START = TASK_CREATED
    FINISHED = TASK_COMPLETED
    ERROR = TASK_FAILED
    PRE_LLM_CALL = BEFORE_LLM_CALL
    POST_LLM_CALL = AFTER_LLM_CALL
    PRE_TOOL_CALL = BEFORE_TOOL_CALL
    POST_TOOL_CALL = AFTER_TOOL_CALL

    @classmethod
    def _missing_(cls, value: object) -> HookPoint | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) and value == value.lower() else None


AFTER_FAILED_TASK = (HookPoint.POST_TASK_CALL, HookPoint.TASK_FAILED, HookPoint.SESSION_FAILED)
"""The points of a task that failed or was cancelled; END_POINTS in `shared/hooks.lua`."""
OF_A_TASK = frozenset(
    {
        HookPoint.TASK_CREATED,
        HookPoint.SESSION_STARTED,
        HookPoint.USER_INPUT_RECEIVED,
        HookPoint.PRE_TASK_CALL,
        HookPoint.TASK_COMPLETED,
        HookPoint.SESSION_FINISHED,
        *AFTER_FAILED_TASK,
    }
)
"""Points that a task reaches once, however many agents work for it."""


GUARD_MARK = "!"
"""The prefix of a guard's name in a task's context: a process without the hook still knows that it guards."""


def point_named(name: object, field: str) -> HookPoint:
    """Return the point with this name, Weft's or AWorld's. Raises InvalidInput(field) with the known names."""
    try:
        return HookPoint(str(name))
    except ValueError:
        near = difflib.get_close_matches(str(name), HookPoint, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(HookPoint)}"
        raise InvalidInput(field, f"is not a hook point; {hint}") from None


FORMAT = 1
"""The version of the manifest's format."""

RUNTIME_MANIFEST = "actor."
"""The manifest of an agent type of a runtime begins with this, and ends with the type."""
END_AGENTS = "weft.task-ended."
"""The name of an agent that runs the hooks of ended tasks begins with this."""
TOOL_AGENTS = "weft.tool."
"""The name of an agent that makes one call of a tool, for a person, begins with this and ends with the app's name."""

Schema = dict[str, object]


class AgentEntry(msgspec.Struct, omit_defaults=True):
    input: Schema | None = None
    """JSON schema of the input; None: any input."""
    output: Schema | None = None
    """JSON schema of the output; None: not declared."""
    pool: str = ""
    description: str = ""
    interleave: bool = False
    """True: an instance handles events concurrently, not one at a time."""
    topics: list[str] = []
    """Topics that the agent subscribes to; `…*` is a prefix."""
    internal: bool = False
    """True: only other agents may call it; no submit or schedule starts it."""


class ToolEntry(msgspec.Struct, omit_defaults=True):
    arguments: Schema | None = None
    """JSON schema of the arguments, an object; None: any object."""
    result: Schema | None = None
    """JSON schema of the result; None: not declared."""
    pool: str = ""
    description: str = ""
    repeatable: bool = True
    """False: an attempt with an unknown outcome is not repeated."""


class EngineFunctionEntry(msgspec.Struct, omit_defaults=True):
    arguments: Schema | None = None
    result: Schema | None = None
    pool: str = ""
    description: str = ""
    version: str = ""
    """Also the end of its name, after `@`; empty: no version."""
    kind: str = "function"
    """`function`, `spark_job` (runs in the driver with a session), or `batch_job` (returns a command)."""
    resources: dict[str, object] = {}
    """The cluster resources of one call, if declared."""
    actors: int = 0
    """The number of long-lived workers for it; 0: any worker runs it."""


class HookEntry(msgspec.Struct, omit_defaults=True):
    order: int = 0
    guard: bool = False
    always: bool = False
    description: str = ""


class Manifest(msgspec.Struct):
    """An app's names and schemas, stored on the broker as JSON. Unknown fields of later formats are ignored."""

    app: str
    version: str
    format: int = FORMAT
    agents: dict[str, AgentEntry] = {}
    tools: dict[str, ToolEntry] = {}
    engine_functions: dict[str, EngineFunctionEntry] = {}
    hooks: dict[str, dict[str, HookEntry]] = {}
    """Point → name → hook."""

    def to_json(self) -> bytes:
        """Return the manifest as JSON; the same app has the same bytes in every process."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read a manifest from JSON. Raises InvalidInput if it is not one."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("manifest", f"cannot be read: {error}") from None


def agent_of_ends(app: str) -> str:
    """Return the name of the agent that runs an app's hooks of ended tasks."""
    return END_AGENTS + app


def end_hooks(manifest: Manifest) -> dict[str, str]:
    """Return, for each agent, the agent that runs the hooks of its ended tasks; empty if the app has no such hooks.

    Its name has the prefix `!` if some of these hooks always run, or `?` if only hooks that a task names run.
    """
    there = [hook for point in AFTER_FAILED_TASK for hook in manifest.hooks.get(point, {}).values()]
    if not there:
        return {}
    own = agent_of_ends(manifest.app)
    mark = "!" if any(hook.always for hook in there) else "?"
    return {name: mark + own for name in manifest.agents if name != own}


EXPLAINED_BYTES = 4096
"""The largest wrong value of which an error names the wrong part."""
EXPLAINED_SECONDS = 0.01
EXPLAINED_LEVELS = 5
"""Its deepest nesting: with alternatives inside alternatives, the time of an explanation doubles with each level."""
BACKTRACK_MAX = 10_000
"""Steps that a pattern which is not linear may take."""


ValueCheck = Callable[[object, str], None]
"""Raises InvalidInput for a value, with its field and the path of the wrong part, as in `data.input.topic`."""


def value_check(schema: Schema, *, formats: bool = False) -> ValueCheck:
    """Compile a schema of Draft 2020-12, or of the draft that it names. Raises InvalidInput with the wrong part.

    With `formats`, a text must have the format that the schema names, as in `date`.

    The time of a check is linear in the size of the value, since values come from models and publishers: patterns with
    lookaround or backreferences, which cannot be linear, may take a bounded number of steps.
    """
    # Imported here: it takes 40 ms, and plain schemas do not need it.
    from jsonschema_rs import Draft202012Validator, FancyRegexOptions, RegexOptions, ValidationError, validator_cls_for

    try:
        kind = validator_cls_for(schema)
    except (ValidationError, ValueError):  # it names a draft that nobody knows
        kind = Draft202012Validator
    reason: Exception
    for patterns in (RegexOptions(), FancyRegexOptions(backtrack_limit=BACKTRACK_MAX)):
        try:
            validator = kind(schema, validate_formats=formats, pattern_options=patterns, retriever=_refuse_to_fetch)
            return partial(_check_value, validator)
        except ValidationError as error:
            reason = InvalidInput(_place("", error.instance_path), short_line(error.message))
        except ValueError as error:  # nested too deeply
            reason = InvalidInput("", short_line(str(error)))
    raise reason


def _check_value(validator: Validator, value: object, field: str) -> None:
    from jsonschema_rs import ValidationError

    began = time.thread_time()
    try:
        if validator.is_valid(value):
            return
        # An explanation collects all errors of each alternative, which takes seconds for a large value.
        size = len(msgspec.json.encode(value))
        slow = time.thread_time() - began > EXPLAINED_SECONDS
        if size > EXPLAINED_BYTES or slow or _is_deeper(value, EXPLAINED_LEVELS):
            raise InvalidInput(
                field, f"does not match its schema; with {size} bytes it is too large or too deep to say where"
            )
        validator.validate(value)
    except ValidationError as error:
        missing = getattr(error.kind, "property", None)  # of `required`; the path is that of the object without it
        path = error.instance_path if missing is None else [*error.instance_path, missing]
        why = short_line(error.message) if missing is None else "is missing"
        raise InvalidInput(_place(field, path), why) from None
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, or nested too deeply
        raise InvalidInput(field, f"cannot be checked: {short_line(str(error))}") from None


def _is_deeper(value: object, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(part, dict | list) and (levels == 1 or _is_deeper(part, levels - 1)) for part in parts)


def _refuse_to_fetch(url: str) -> Never:
    raise ValueError("references to other documents are not fetched")


def _place(field: str, path: Iterable[object]) -> str:
    return ".".join((*([field] if field else []), *map(str, path)))


def short_line(text: str, limit: int = 200) -> str:
    """Return the start of a text, on one line and without secrets."""
    # Redact before shortening: half a secret matches no rule.
    return shortened(" ".join(redactor().start(text).split()), limit)
