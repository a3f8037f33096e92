"""Checks of declared functions: their place in the code, names, limits, retry policies and argument types."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, SimpleNamespace
from typing import ClassVar, Literal, cast
from weakref import WeakKeyDictionary

from runtime_core.base.text import shortened, text_of_error
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.redaction import kept, redactor

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
"""Names of agents, tools and engine functions; they become parts of keys, paths and messages."""
POOL = re.compile(r"[A-Za-z0-9_.-]{0,64}")
MAX_DELAY_SECONDS = 366 * 86_400.0
"""The longest delay of a retry: a year."""

MAX_RUNNING = 1_000_000
MAX_RATE = 10_000
"""The number of start times that the broker keeps for each key of a limit."""
LEAST_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 0.1, 366 * 86_400.0
_PER = re.compile(r"(?:tenant|session|key|input(?:\.[^.\s|]{1,64}){1,8})?")

_READ_OF_ERROR = 16_000
"""The most characters of an error's text that are read to show its start."""

NO_DEFAULT = inspect.Parameter.empty

_AGENT_NAMES: WeakKeyDictionary[object, tuple[str, ...]] = WeakKeyDictionary()
"""The functions and classes that this process has declared as agents, with their names."""


class Agent:
    """The base class of agents with durable state.

    Each run creates an object without arguments and drops it afterwards. Keep durable values in `ctx.state`, which
    holds JSON for the agent's key. The class attribute `state`, a dict, is the initial state of a new key.
    """

    state: ClassVar[dict[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was declared, and the local names that its annotations may use."""

    file: str
    line: int
    names: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def __reduce__(self) -> tuple[type[Place], tuple[str, int, dict[str, object]]]:
        """Pickle only the local names of types, which annotations need."""
        return Place, (self.file, self.line, {name: one for name, one in self.names.items() if isinstance(one, type)})


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a declared function, with its unevaluated annotation."""

    name: str
    annotation: object
    default: object
    """`NO_DEFAULT` if it is required."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: after the failed attempt n, wait `base · factorⁿ⁻¹` seconds, at most `max_seconds`.

    `attempts` includes the first one: 1 means no retry. `jitter` is the random part of a delay (0.2: between 80 % and
    100 % of it), so that attempts that failed together are not retried together.
    """

    attempts: int = 5
    base_seconds: float = 0.5
    factor: float = 2.0
    max_seconds: float = 60.0
    jitter: float = 0.2
    defects: bool = False
    """Whether to retry after TypeError, NameError, AttributeError and ImportError, which mistakes in the code raise."""

    def __post_init__(self) -> None:
        if not isinstance(self.defects, bool):
            raise ConfigurationError(f"RetryPolicy.defects is {self.defects!r}: give True or False")
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy.attempts is {self.attempts!r}: give a whole number, at least 1")
        for name, low, high in (
            ("base_seconds", 0.0, MAX_DELAY_SECONDS),
            ("factor", 1.0, math.inf),
            ("max_seconds", 0.0, MAX_DELAY_SECONDS),
            ("jitter", 0.0, 1.0),
        ):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                wanted = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
                raise ConfigurationError(f"RetryPolicy.{name} is {value!r}: give a number {wanted}")

    def delay_seconds(self, attempt: int, random: Callable[[], float]) -> float:
        """Return the delay after a failed attempt (from 1), in seconds; `random` returns numbers in [0, 1)."""
        try:
            delay = min(self.max_seconds, self.base_seconds * self.factor ** (max(attempt, 1) - 1))
        except OverflowError:  # the power overflows long after the delay has reached its limit
            delay = self.max_seconds
        return delay * (1.0 - self.jitter * random())


@dataclass(frozen=True, slots=True)
class Limit:
    """How many runs of an agent, or calls of a tool, may be open or start for each key, over all replicas.

    Others wait on the broker, by the priority of their tasks and then in order, which counts as no attempt. A run is
    open from its first turn to its end, with all of its waits, and a call with its retries. `rate` counts starts of
    runs, and attempts of calls. In a namespace with several partitions, each has a share of a limit, except per `key`.
    """

    per: str = ""
    """The key: `tenant`, `session`, `key` (of an agent's instance), `input.<name>` (a field of the input, or an
    argument of the tool; `input.a.b` is a field of a field), or nothing: one limit for all."""
    running: int | None = None
    """How many may be open at the same time; None: any number."""
    rate: int | None = None
    """How many may start within any `seconds`; None: any number."""
    seconds: float | None = None
    debounce: float | None = None
    """Of an agent: a run starts after this many seconds without a newer one for its key. The older ones end."""
    replaces: Literal["", "waiting", "running"] = ""
    """Of an agent: which older runs for the key end, as cancelled with the error `Superseded`, when a newer one comes:
    those that wait, or also those that run. With `debounce`, those that wait."""

    def __post_init__(self) -> None:
        if not isinstance(self.per, str) or not _PER.fullmatch(self.per):
            raise ConfigurationError(
                f"Limit.per is {self.per!r}: give 'tenant', 'session', 'key', 'input.<name>', or leave it out for one "
                "limit for all"
            )
        if self.running is None and self.rate is None and self.debounce is None:
            raise ConfigurationError("Limit limits nothing: give running=…, rate=… with seconds=…, or debounce=…")
        self._check_replaces()
        for name, most in (("running", MAX_RUNNING), ("rate", MAX_RATE)):
            value: object = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"Limit.{name} is {value!r}: give a whole number from 1 to {most}")
        if (self.rate is None) != (self.seconds is None):
            given, missing = ("rate", "seconds") if self.seconds is None else ("seconds", "rate")
            raise ConfigurationError(f"Limit has {given} without {missing}: give both, as in rate=30, seconds=60")
        seconds: object = self.seconds
        if seconds is not None and (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not LEAST_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS
        ):
            raise ConfigurationError(
                f"Limit.seconds is {seconds!r}: give a number from {LEAST_WINDOW_SECONDS:g} to {MAX_WINDOW_SECONDS:g}"
            )

    def _check_replaces(self) -> None:
        debounce: object = self.debounce
        if debounce is not None:
            number = isinstance(debounce, int | float) and not isinstance(debounce, bool)
            if not number or not 0 < cast(float, debounce) <= MAX_WINDOW_SECONDS:
                raise ConfigurationError(f"Limit.debounce is {debounce!r}: give seconds above 0")
            if not self.replaces:
                object.__setattr__(self, "replaces", "waiting")
        if self.replaces not in ("", "waiting", "running"):
            raise ConfigurationError(
                f"Limit.replaces is {self.replaces!r}: give 'waiting' or 'running', or leave it out"
            )
        if self.replaces == "running" and self.running != 1:
            raise ConfigurationError(
                f"Limit.replaces is 'running', but running is {self.running!r}: give running=1, so that the newest run "
                "is the only one"
            )

    @property
    def label(self) -> str:
        """Return what it counts by, as its name on the broker says it."""
        return self.per if self.seconds is None else f"{self.per}/{self.seconds:g}s"

    def share(self, partition: int, partitions: int) -> tuple[int, int, int]:
        """Return a partition's share: how many may be open, how many may start (0: any number), and in how many ms.

        All runs of an instance are in one partition, so that has the whole limit.
        """
        if self.per == "key":
            partition, partitions = 0, 1

        def of(limit: int | None) -> int:
            return 0 if limit is None else max(1, limit // partitions + (partition < limit % partitions))

        return of(self.running), of(self.rate), round((self.seconds or 0) * 1000)


def check_shares(what: str, limits: Sequence[Limit], partitions: int, place: Place) -> None:
    """Raise ConfigurationError if a limit is below the number of partitions: some would have no share of it."""
    for limit in limits:
        for name, value in (("running", limit.running), ("rate", limit.rate)):
            if value is not None and value < partitions and limit.per != "key":
                raise ConfigurationError(
                    f"{what} ({place}) has a limit of {name}={value}, but the namespace has {partitions} partitions, "
                    f"and each needs a share: raise it to {partitions}, or limit an agent per='key', since all runs of "
                    "an instance are in one partition"
                )


def checked_limits(
    what: str, limit: object, place: Place, *, keyed: bool = False, interleave: bool = False
) -> tuple[Limit, ...]:
    """Return the limits of an agent (`keyed`) or a tool. Raises ConfigurationError."""
    limits = () if limit is None else tuple(limit) if isinstance(limit, list | tuple) else (limit,)
    labels: set[str] = set()
    for each in limits:
        if not isinstance(each, Limit):
            raise ConfigurationError(f"{what} ({place}) has limit={each!r}: give a Limit(running=…), or a list of them")
        if each.per == "key" and not keyed:
            raise ConfigurationError(
                f"{what} ({place}) has a limit per 'key', but only agents have keys: give 'input.<name>' for an "
                "argument of the tool"
            )
        if each.replaces and (not keyed or len(limits) > 1):
            raise ConfigurationError(
                f"{what} ({place}) has a limit with replaces or debounce, which must be the only limit of an agent: "
                "put running and rate into the same Limit"
            )
        if each.per == "key" and each.replaces == "running" and not interleave:
            raise ConfigurationError(
                f"{what} ({place}) has a limit per 'key' with replaces='running', but newer runs of an instance wait "
                "in its mailbox until the running one ends: declare the agent with interleave=True, so that they do not"
            )
        if each.label in labels:
            raise ConfigurationError(
                f"{what} ({place}) has two limits per {each.per or 'nothing'!r} with the same seconds: give one Limit "
                "with both running and rate"
            )
        labels.add(each.label)
    return limits


def place_of(declared: object, depth: int) -> Place:
    """Return the first line of a function, or for another object the line of the caller `depth` frames up."""
    frame: FrameType = sys._getframe(depth)
    # Only a function's locals: annotations find a module's names among their globals.
    names = dict(frame.f_locals) if frame.f_locals is not frame.f_globals else {}
    function = underlying(declared)
    if function is None:
        return Place(_short(frame.f_code.co_filename), frame.f_lineno, names)
    return Place(_short(function.__code__.co_filename), function.__code__.co_firstlineno, names)


def underlying(declared: object) -> FunctionType | None:
    """Return the plain function in a method, partial, wrapper or callable object; None if there is none."""
    while True:
        if isinstance(declared, functools.partial):
            declared = declared.func
        elif isinstance(declared, MethodType):
            declared = declared.__func__
        elif hasattr(declared, "__wrapped__"):
            declared = declared.__wrapped__
        elif isinstance(declared, FunctionType):
            return declared
        else:
            call = inspect.getattr_static(type(declared), "__call__", None)
            if not isinstance(call, FunctionType):
                return None
            declared = call


def note_agent(declared: object, name: str) -> None:
    """Let clients of this process name the agent by its declared function or class."""
    if isinstance(declared, FunctionType | type):
        names = _AGENT_NAMES.get(declared, ())
        if name not in names:
            _AGENT_NAMES[declared] = (*names, name)


def agent_name(agent: object, field: str) -> object:
    """Return the name of an agent given as a declared function or class; return anything else unchecked.

    Raises InvalidInput(field) if it is not declared, or under several names.
    """
    if not isinstance(agent, FunctionType | type):
        return agent
    names = _AGENT_NAMES.get(agent, ())
    if not names:
        raise InvalidInput(
            field,
            f"{shown(agent)} is not declared as an agent in this process: import its module, or give a name",
        )
    if len(names) > 1:
        raise InvalidInput(field, f"{shown(agent)} is declared as {' and '.join(map(repr, names))}: give one of them")
    return names[0]


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a call returns a coroutine; a plain wrapper of an async function counts as async."""
    inner = underlying(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inner)


def is_generator(function: Callable[..., object]) -> bool:
    """Return whether a call returns a sync or async generator."""
    inner = underlying(function)
    return inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)


def checked_name(kind: str, given: object, function: object, place: Place) -> str:
    """Return the given name, or the function's own. Raises ConfigurationError if it is invalid."""
    name = getattr(function, "__name__", None) if given is None else given
    if name is None:
        raise ConfigurationError(f"{kind} at {place} has no name: give one with name='…'")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} ({place}) is invalid: start with a letter or _, followed by letters, digits, "
            "_ . or -, at most 128 in total; name='…' sets another name"
        )
    return name


def check_options(what: str, given: Collection[str], known: Collection[str], place: Place) -> None:
    """Raise ConfigurationError, with the known options, for one that a declaration does not have."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigurationError(f"{what} ({place}) has no option {name!r}: {hint}choose from {', '.join(known)}")


def checked_pool(what: str, pool: object, place: Place) -> str:
    """Return a pool's name; empty for the default pool. Raises ConfigurationError if it is invalid."""
    if not isinstance(pool, str) or not POOL.fullmatch(pool):
        raise ConfigurationError(f"{what} ({place}) has pool={pool!r}: use letters, digits, _ . or -, at most 64")
    return pool


def checked_timeout(what: str, seconds: object, place: Place) -> float:
    """Return a limit in seconds. Raises ConfigurationError unless it is above 0 and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigurationError(f"{what} ({place}) has timeout_seconds={seconds!r}: give a number above 0")
    return float(seconds)


def checked_retry(what: str, retry: object, place: Place) -> RetryPolicy:
    """Return a retry policy, for None the default one. Raises ConfigurationError for anything else."""
    if retry is None:
        return RetryPolicy()
    if not isinstance(retry, RetryPolicy):
        raise ConfigurationError(f"{what} ({place}) has retry={retry!r}: give a RetryPolicy(attempts=…)")
    return retry


def arguments_of(what: str, function: Callable[..., object], place: Place) -> list[Argument]:
    """Return a function's arguments in order. Raises ConfigurationError if one cannot be passed by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{what} ({place}) has no readable signature: wrap it in a function") from error
    arguments = []
    for parameter in signature.parameters.values():
        name = parameter.name
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            raise ConfigurationError(f"{what} ({place}) takes {stars}{name}: name each argument and its type")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigurationError(f"{what} ({place}) takes {name!r} by position only: remove the '/'")
        arguments.append(Argument(name, parameter.annotation, parameter.default))
    return arguments


def needed_argument(made: type) -> str | None:
    """Return the first required argument of a class; None if it has none."""
    for parameter in inspect.signature(made).parameters.values():
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter.default is inspect.Parameter.empty and not variadic:
            return parameter.name
    return None


def unannotated(what: str, argument: Argument, place: Place) -> ConfigurationError:
    """Return the error for an argument without a type."""
    hint = " (a method: declare it from an instance, or as a plain function)" if argument.name == "self" else ""
    return ConfigurationError(
        f"{what} ({place}): argument {argument.name!r} has no type: write {argument.name}: str, or another type{hint}"
    )


def without_context(
    what: str, arguments: Sequence[Argument], context: type, place: Place
) -> tuple[str, list[Argument]]:
    """Return the name of the argument that takes the `context` (empty if none does), and the other arguments.

    Raises ConfigurationError if one has no type, or if two take the context.
    """
    context_name = ""
    others = []
    for argument in arguments:
        if argument.annotation is NO_DEFAULT:
            raise unannotated(what, argument, place)
        if not _takes(context, argument.annotation):
            others.append(argument)
        elif context_name:
            raise ConfigurationError(
                f"{what} ({place}) takes a {context.__name__} twice, {context_name!r} and {argument.name!r}: remove one"
            )
        else:
            context_name = argument.name
    return context_name, others


def _takes(context: type, annotation: object) -> bool:
    if isinstance(annotation, str):
        # Compared as text: a class that is imported only for type checkers cannot be looked up.
        name = rf"['\"]?((\w+\.)*Optional\[)?(\w+\.)*{context.__name__}(\s*\|\s*None)?\]?['\"]?"
        return re.fullmatch(name, annotation.strip()) is not None
    return annotation is context or context in typing.get_args(annotation)


def resolved(what: str, name: str, annotation: object, function: object, place: Place) -> object:
    """Evaluate an annotation with the names at the function's declaration. Raises ConfigurationError."""
    inner = underlying(function)
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        hints = typing.get_type_hints(
            holder,
            globalns=inner.__globals__ if inner is not None else {},
            localns=dict(place.names),
            include_extras=True,
        )
    except Exception as error:  # an annotation is code and may raise anything
        raise ConfigurationError(
            f"{what} ({place}): the type of {name!r} cannot be evaluated, {one_line(error)}: import it or define it "
            "at the top of the module"
        ) from error
    hint: object = hints["it"]
    return hint


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's class and text on one line of about `limit` characters at most."""
    text = " ".join(kept(text_of_error(error), _READ_OF_ERROR).split())
    # Redact before shortening: half of a secret does not look like one.
    text = shortened(redactor().text(text) if len(text) > limit else text, limit)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(file: str) -> str:
    """Return the path relative to the current directory if the file is inside it."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # another drive on Windows, or a deleted current directory
        return file
    return file if relative.startswith("..") else relative


def shown(named: object) -> str:
    """Return how an error message shows a name or a declared object."""
    return repr(named) if isinstance(named, str) else str(getattr(named, "__qualname__", repr(named)))


def label(agent: object) -> str:
    """Return the label of an agent object: its `name`, else its class or function name."""
    if isinstance(agent, str):
        return agent
    name = getattr(agent, "name", None)
    if callable(name) and not isinstance(agent, type):
        name = name()
    if isinstance(name, str) and name:
        return name
    own = getattr(agent, "__name__", None)
    return own if isinstance(own, str) else type(agent).__name__
