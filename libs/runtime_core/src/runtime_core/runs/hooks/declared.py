"""Hooks and callbacks as an app declares them, what they receive and return, and the selection that a run keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.declare.declaration import NAME, Place, checked_name, checked_timeout, is_generator
from runtime_core.declare.manifest import AFTER_FAILED_TASK, GUARD_MARK, OF_A_TASK, HookEntry, HookPoint, point_named
from runtime_core.declare.schema import encode
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.scheduler import Branch
from runtime_core.runs.step import LocalStep
from runtime_core.wire.commands import MAX_SECONDS

if TYPE_CHECKING:
    from runtime_core.runs.run import Run

SEPARATOR = "__"
"""The separator between a tool and one of its actions in a callback's key."""
STEP = "0"
"""The step under which the journal stores a run's selection: the steps of the agent's code start at 1."""


@dataclass(frozen=True, slots=True)
class HookEvent:
    """One moment at which a hook runs. Each hook gets a copy: changing `payload` in place has no effect."""

    point: HookPoint
    task_id: str
    run_id: str
    agent: str
    """The agent whose run it is."""
    name: str
    """The name of the tool, model or agent concerned; for a question, its prompt."""
    payload: Any  # Any: JSON whose shape depends on the point, see docs/hooks.md
    input: Any = None  # Any: JSON: at a point after an action, the action's input
    error: Mapping[str, str] | None = None
    """`type` and `message` of the error, at a point after a failure."""
    key: str = ""
    """The key of the agent's instance."""
    session_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: the user's own JSON
    attempt: int = 1
    idempotency_key: str = ""
    """Stays the same when this execution is repeated after a crash, for effects that must not happen twice."""


@dataclass(frozen=True, slots=True)
class Allow:
    """Continue. The same as returning None."""


@dataclass(frozen=True, slots=True)
class Change:
    """Continue with this payload instead; later hooks see it."""

    payload: Any  # Any: JSON of the point's own shape


@dataclass(frozen=True, slots=True)
class Deny:
    """Do not continue: the agent gets `Denied` with this reason."""

    reason: str = "denied"


@dataclass(frozen=True, slots=True)
class Ask:
    """Let a human approve, deny or edit the payload; the run waits on the broker for it.

    After `timeout` (seconds or timedelta; None: no limit) the answer is `default`, True to approve and False to deny;
    without one it is a denial.
    """

    prompt: str
    timeout: float | timedelta | None = None
    default: bool | EllipsisType = ...


Verdict = Allow | Change | Deny | Ask


def recorded_verdict(verdict: object, what: str, *, notice: bool) -> dict[str, object]:
    """Return the verdict for the journal: `{"verdict": "change", "payload": …}`.

    Raises TypeError if it is not a verdict or, at a point where hooks can only observe (`notice`), not Allow;
    InvalidInput if the payload is not JSON.
    """
    if verdict is None or isinstance(verdict, Allow):
        return {"verdict": "allow"}
    if not isinstance(verdict, Change | Deny | Ask):
        raise TypeError(f"{what} returned {verdict!r}: return None, Allow(), Change(…), Deny(…) or Ask(…)")
    if notice:
        raise TypeError(f"{what} returned {type(verdict).__name__}: here a hook can only observe; return None")
    match verdict:
        case Change(payload):
            encode(payload, f"the payload that {what} returned")
            return {"verdict": "change", "payload": payload}
        case Deny(reason):
            return {"verdict": "deny", "reason": str(reason)}
        case Ask(prompt, timeout, default):
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (number and seconds <= MAX_SECONDS):
                raise TypeError(
                    f"{what} returned Ask(timeout={timeout!r}): give seconds or a timedelta, at most {MAX_SECONDS} s"
                )
            if not isinstance(default, bool | EllipsisType):
                raise TypeError(f"{what} returned Ask(default={default!r}): give True to approve or False to deny")
            answer = None if isinstance(default, EllipsisType) else default
            return {"verdict": "ask", "prompt": str(prompt), "timeout": seconds, "default": answer}


class CallbackResultType(StrEnum):
    """The effect of a callback on the tool's result."""

    BYPASS = "bypass"
    """The tool's result stays unchanged."""
    OVERRIDE = "override"
    """`result_data` replaces the tool's result."""


@dataclass(frozen=True, slots=True)
class CallbackResult:
    """A callback's answer. With `success=False` the tool's result stays unchanged, whatever the type."""

    success: bool = True
    result_data: Any = None  # Any: JSON that replaces the tool's result
    result_type: CallbackResultType = CallbackResultType.BYPASS


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result, as a callback receives it."""

    tool_name: str
    action_name: str
    """The argument `action` of the call if it is text, else empty."""
    arguments: Mapping[str, Any]  # Any: the tool's own JSON
    content: Any  # Any: the tool's own result
    task_id: str
    run_id: str


class Callback:
    """A function `(result: ToolResult)`, sync or async, under the name of a tool or `tool__action`."""

    def __init__(self, key: str, function: Callable[..., object], place: Place, *, timeout_seconds: float) -> None:
        """Raise ConfigurationError for an invalid declaration."""
        if not isinstance(key, str) or not NAME.fullmatch(key):
            raise ConfigurationError(
                f"callback key {key!r} ({place}) cannot be used: write @app.callback('tool') or 'tool__action'"
            )
        self.key = key
        self.what = f"callback {key!r}"
        self.place = place
        if not callable(function) or is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}): {function!r} is not a function that returns a result")
        self.function = function
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)


def keys_of(tool: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the keys under which a call's callback may be declared, most specific first."""
    action = action_of(arguments)
    return [f"{tool}{SEPARATOR}{action}", tool] if action else [tool]


def action_of(arguments: Mapping[str, object]) -> str:
    action = arguments.get("action")
    return action if isinstance(action, str) else ""


def recorded_callback(result: object, what: str) -> dict[str, object]:
    """Return the callback's answer for the journal. Raise TypeError for another type, InvalidInput if not JSON."""
    if result is None:
        result = CallbackResult()
    if not isinstance(result, CallbackResult):
        raise TypeError(f"{what} returned {result!r}: return None or CallbackResult(…)")
    kind = CallbackResultType(result.result_type)
    encode(result.result_data, f"the result_data of {what}")
    return {"success": bool(result.success), "type": str(kind), "result_data": result.result_data}


HookFunction = Callable[[HookEvent], object]


class Hook:
    """A function `(event)`, sync or async, or a class whose `exec(event)` is called on a new instance each time.

    `order`: lower ones run first, equal ones in the order of declaration. `guard`: if the hook fails, the guarded
    action is denied; the failure of any other hook is reported and changes nothing. `always`: the hook runs in each
    run of the app's agents, even if the task does not name it. `timeout_seconds` limits one execution.
    """

    def __init__(
        self,
        point: object,
        function: Callable[..., object],
        place: Place,
        *,
        name: str | None = None,
        order: int = 0,
        guard: bool = False,
        always: bool = False,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Raise ConfigurationError for an invalid declaration."""
        try:
            self.point = point_named(point, repr(point))
        except InvalidInput as error:
            raise ConfigurationError(f"a hook ({place}): {error.field} {error.message}") from None
        self.name = checked_name("hook", name, function, place)
        self.what = f"hook {self.name!r} at {self.point}"
        self.place = place
        self.source = function
        if isinstance(order, bool) or not isinstance(order, int):
            raise ConfigurationError(f"{self.what} ({place}) has order={order!r}: give a whole number")
        self.order = order
        self.guard = bool(guard)
        self.always = bool(always)
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        self.description = inspect.getdoc(function) or ""
        self._class = function if inspect.isclass(function) else None
        if self._class is not None and not callable(getattr(function, "exec", None)):
            raise ConfigurationError(f"{self.what} ({place}): the class has no method exec(self, event)")
        called = cast("Callable[..., object]", getattr(function, "exec", function)) if self._class else function
        if not callable(called):
            raise ConfigurationError(f"{self.what} ({place}): {function!r} is neither a function nor a class with exec")
        if is_generator(called):
            raise ConfigurationError(f"{self.what} ({place}) is a generator: return a verdict")
        _check_takes_one(self.what, place, called, ignored=1 if self._class else 0)

    def bound(self) -> HookFunction:
        """Return the function for one execution."""
        if self._class is None:
            return self.source
        # Found on the class by the constructor; a new instance each time, so that runs share nothing.
        return cast(HookFunction, getattr(self._class(), "exec"))  # noqa: B009  # mypy knows no `exec` of `object`

    def entry(self) -> HookEntry:
        """Return the hook's entry in the manifest."""
        return HookEntry(order=self.order, guard=self.guard, always=self.always, description=self.description)


class HookTable:
    """The declarations of one app: hooks by point and name, callbacks by key."""

    def __init__(self) -> None:
        self._hooks: dict[tuple[HookPoint, str], Hook] = {}
        self._callbacks: dict[str, Callback] = {}
        self.everywhere = False
        """Whether there is a callback, or a hook that always runs."""

    @property
    def of_ends(self) -> bool:
        """Return whether there is a hook for tasks that end without completing."""
        return any(hook.point in AFTER_FAILED_TASK for hook in self)

    def add(self, hook: Hook) -> None:
        """Add a hook. Raise ConfigurationError for a second one with the same name at the same point."""
        there = self._hooks.get((hook.point, hook.name))
        if there is hook:
            return
        if there is not None:
            raise ConfigurationError(
                f"{hook.what} is declared twice, at {there.place} and at {hook.place}: give one of them another name"
            )
        self._hooks[hook.point, hook.name] = hook
        self.everywhere = self.everywhere or hook.always

    def add_callback(self, callback: Callback) -> None:
        """Add a callback. Raise ConfigurationError for a second one with the same key."""
        there = self._callbacks.get(callback.key)
        if there is callback:
            return
        if there is not None:
            raise ConfigurationError(
                f"{callback.what} is declared twice, at {there.place} and at {callback.place}: remove one"
            )
        self._callbacks[callback.key] = callback
        self.everywhere = True

    def include(self, other: HookTable) -> None:
        """Add another app's declarations."""
        for hook in other:
            self.add(hook)
        for callback in other._callbacks.values():
            self.add_callback(callback)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks.values())

    def find(self, point: HookPoint, name: str) -> Hook | None:
        return self._hooks.get((point, name))

    def callback(self, key: str) -> Callback | None:
        return self._callbacks.get(key)

    @property
    def callback_keys(self) -> list[str]:
        return list(self._callbacks)

    def entries(self) -> dict[str, dict[str, HookEntry]]:
        """Return the hooks' entries in the manifest, by point and name."""
        entries: dict[str, dict[str, HookEntry]] = {}
        for hook in self:
            entries.setdefault(str(hook.point), {})[hook.name] = hook.entry()
        return entries


def _check_takes_one(what: str, place: Place, function: Callable[..., object], *, ignored: int) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())[ignored:]
    except (TypeError, ValueError):
        return  # a builtin: its first call shows whether it fits
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    required = [
        parameter
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if not (positional or takes_any) or required[1:]:
        raise ConfigurationError(f"{what} ({place}) must take one argument, the event")


class Chosen(msgspec.Struct, frozen=True):
    """One hook of a run."""

    name: str
    guard: bool


class Selection(msgspec.Struct, frozen=True):
    """All hooks of a run, in the order in which they run, and the keys of callbacks.

    It is fixed and recorded when the run begins, so a later deployment does not change a running one.
    """

    hooks: dict[str, list[Chosen]] = {}
    callbacks: list[str] = []

    def at(self, point: HookPoint) -> list[Chosen]:
        return self.hooks.get(point, _NONE)


_NONE: list[Chosen] = []


def select(table: HookTable, named: Mapping[str, Iterable[str]]) -> Selection:
    """Return the app's hooks that always run and those that the task named, lower `order` first."""
    ordered: dict[str, list[tuple[int, Chosen]]] = {}
    for hook in table:
        if hook.always:
            ordered.setdefault(str(hook.point), []).append((hook.order, Chosen(hook.name, hook.guard)))
    for point, names in named.items():
        at_point = ordered.setdefault(point, [])
        for marked in names:
            name = marked.removeprefix(GUARD_MARK)
            if any(chosen.name == name for _, chosen in at_point):
                continue
            known = table.find(HookPoint(point), name)
            guard = marked.startswith(GUARD_MARK) or (known is not None and known.guard)
            at_point.append((known.order if known is not None else 0, Chosen(name, guard)))
    hooks = {point: [chosen for _, chosen in sorted(each, key=_order)] for point, each in ordered.items() if each}
    return Selection(hooks, table.callback_keys)


def _order(each: tuple[int, Chosen]) -> int:
    return each[0]


async def settle(run: Run, table: HookTable, named: Mapping[str, Iterable[str]]) -> Selection:
    """Return the selection that this run started with; a run that starts now makes and records it.

    A run that has taken steps without a selection started before there were hooks. It continues without them, since
    its journal has no places for their steps.
    """
    journal = run.journal
    if STEP not in journal.values and (journal.values or journal.pending):
        return Selection()
    branch = Branch("", run.flow.branch_here("hooks").now_ms)
    branch.count = int(STEP) - 1

    async def chosen() -> object:
        found = select(table, named)
        if run.meta.get("asked"):
            # The asking task runs the hooks of a task itself.
            hooks = {point: at_point for point, at_point in found.hooks.items() if point not in OF_A_TASK}
            found = Selection(hooks, found.callbacks)
        return msgspec.to_builtins(found)

    found = await LocalStep(run, branch, "hooks", "selection", chosen, b"")
    return msgspec.convert(found, Selection)


def named_before(payload: bytes) -> dict[str, list[str]]:
    """Return the hooks of a recorded selection as a submit names them."""
    hooks = msgspec.json.decode(payload, type=Selection).hooks
    return {point: [chosen.name for chosen in at_point] for point, at_point in hooks.items()}
