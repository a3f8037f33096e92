"""What is checked of every declared function: where it stands, its name, its limits, its arguments' types."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, SimpleNamespace
from weakref import WeakKeyDictionary

from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.text import shortened

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
"""What an agent, tool or engine function may be called: names become parts of keys, paths and messages."""
POOL = re.compile(r"[A-Za-z0-9_.-]{0,64}")

NO_DEFAULT = inspect.Parameter.empty

_AGENT_NAMES: WeakKeyDictionary[object, tuple[str, ...]] = WeakKeyDictionary()
"""Functions and classes that this process has declared as agents, and the names that they were given."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was declared, and which local names its annotations may use."""

    file: str
    line: int
    names: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def __reduce__(self) -> tuple[type[Place], tuple[str, int, dict[str, object]]]:
        """For another process: of the local names those of types, which is what annotations are of."""
        return Place, (self.file, self.line, {name: one for name, one in self.names.items() if isinstance(one, type)})


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a declared function, its annotation not yet evaluated."""

    name: str
    annotation: object
    default: object
    """`NO_DEFAULT` where it must be given."""


def place_of(declared: object, depth: int) -> Place:
    """Where `declared` stands: its own first line, else the line of the caller `depth` frames up."""
    frame: FrameType = sys._getframe(depth)
    # A module's locals are its globals, which annotations see anyhow; a function's would be lost.
    names = dict(frame.f_locals) if frame.f_locals is not frame.f_globals else {}
    function = underlying(declared)
    if function is None:
        return Place(_short(frame.f_code.co_filename), frame.f_lineno, names)
    return Place(_short(function.__code__.co_filename), function.__code__.co_firstlineno, names)


def underlying(declared: object) -> FunctionType | None:
    """The plain function inside a method, a partial, a wrapper or a callable object; None if there is none."""
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
    """Let clients of this process name the agent by the function or class that was declared."""
    if isinstance(declared, FunctionType | type):
        names = _AGENT_NAMES.get(declared, ())
        if name not in names:
            _AGENT_NAMES[declared] = (*names, name)


def agent_name(agent: object, field: str) -> object:
    """The name of an agent that is given as a declared function or class; anything else is given back unchecked.

    Raises InvalidInput(field) where it is not declared, or under several names.
    """
    if not isinstance(agent, FunctionType | type):
        return agent
    names = _AGENT_NAMES.get(agent, ())
    if not names:
        raise InvalidInput(
            field,
            f"{shown(agent)} is not declared as an agent in this process: import the module that does, or give a name",
        )
    if len(names) > 1:
        raise InvalidInput(field, f"{shown(agent)} is declared as {' and '.join(map(repr, names))}: give one of them")
    return names[0]


def is_async(function: Callable[..., object]) -> bool:
    """Whether a call gives a coroutine; a plain wrapper around an async function counts as async."""
    inner = underlying(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inner)


def is_generator(function: Callable[..., object]) -> bool:
    """Whether a call gives a generator, sync or async."""
    inner = underlying(function)
    return inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)


def checked_name(kind: str, given: object, function: object, place: Place) -> str:
    """The name to declare `function` under: the given one, or the function's own."""
    name = getattr(function, "__name__", None) if given is None else given
    if name is None:
        raise ConfigurationError(f"{kind} at {place} has no name of its own: give one with name='…'")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} ({place}) cannot be used: start with a letter or _, go on with letters, "
            "digits, _ . or -, at most 128 in all; name='…' sets another name"
        )
    return name


def checked_pool(what: str, pool: object, place: Place) -> str:
    """A pool's name, or `` for the default pool."""
    if not isinstance(pool, str) or not POOL.fullmatch(pool):
        raise ConfigurationError(f"{what} ({place}) has pool={pool!r}: use letters, digits, _ . or -, at most 64")
    return pool


def checked_timeout(what: str, seconds: object, place: Place) -> float:
    """A limit in seconds, above 0 and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigurationError(f"{what} ({place}) has timeout_seconds={seconds!r}: give a number above 0")
    return float(seconds)


def checked_retry(what: str, retry: object, place: Place) -> RetryPolicy:
    """A retry policy; None stands for the default one."""
    if retry is None:
        return RetryPolicy()
    if not isinstance(retry, RetryPolicy):
        raise ConfigurationError(f"{what} ({place}) has retry={retry!r}: give a RetryPolicy(attempts=…)")
    return retry


def arguments_of(what: str, function: Callable[..., object], place: Place) -> list[Argument]:
    """The arguments of `function`, in order; refused are the kinds that cannot be given by name in JSON."""
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
    """The first argument without which this class cannot be made; None where it needs none."""
    for parameter in inspect.signature(made).parameters.values():
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter.default is inspect.Parameter.empty and not variadic:
            return parameter.name
    return None


def unannotated(what: str, argument: Argument, place: Place) -> ConfigurationError:
    """The refusal of an argument without a type."""
    hint = " (a method: declare it from an instance, or as a plain function)" if argument.name == "self" else ""
    return ConfigurationError(
        f"{what} ({place}): argument {argument.name!r} has no type: write {argument.name}: str, or what it is{hint}"
    )


def without_context(
    what: str, arguments: Sequence[Argument], context: type, place: Place
) -> tuple[str, list[Argument]]:
    """The name of the argument that takes the `context` (empty: none does), and the others. All must have types."""
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
        # As text: the class may be imported for type checkers only, and then cannot be looked up.
        name = rf"['\"]?((\w+\.)*Optional\[)?(\w+\.)*{context.__name__}(\s*\|\s*None)?\]?['\"]?"
        return re.fullmatch(name, annotation.strip()) is not None
    return annotation is context or context in typing.get_args(annotation)


def resolved(what: str, name: str, annotation: object, function: object, place: Place) -> object:
    """The type that an annotation stands for, with names looked up where the function was declared."""
    inner = underlying(function)
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        hints = typing.get_type_hints(
            holder,
            globalns=inner.__globals__ if inner is not None else {},
            localns=dict(place.names),
            include_extras=True,
        )
    except Exception as error:  # an annotation is code: it may fail in any way
        raise ConfigurationError(
            f"{what} ({place}): the type of {name!r} cannot be read, {one_line(error)}: import it or define it "
            "at the top of the module"
        ) from error
    hint: object = hints["it"]
    return hint


def one_line(error: BaseException, limit: int = 300) -> str:
    """Class and text of an error in one line of at most about `limit` characters."""
    text = " ".join(str(error).split())
    text = shortened(text, limit)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(file: str) -> str:
    """The path as seen from the current directory, where that is shorter to read."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # another drive on Windows, a current directory that is gone
        return file
    return file if relative.startswith("..") else relative


def shown(named: object) -> str:
    """How a message names what code has named: a text, or a declared object."""
    return repr(named) if isinstance(named, str) else str(getattr(named, "__qualname__", repr(named)))


def label(agent: object) -> str:
    """What to call an agent that was given as an object: its `name`, else its class or function name."""
    if isinstance(agent, str):
        return agent
    name = getattr(agent, "name", None)
    if callable(name) and not isinstance(agent, type):
        name = name()
    if isinstance(name, str) and name:
        return name
    own = getattr(agent, "__name__", None)
    return own if isinstance(own, str) else type(agent).__name__
