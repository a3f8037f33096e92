"""A declared engine function for the local, Ray and Spark engines, and the context of a call."""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from runtime_core.declare.declaration import Place, RetryPolicy, is_async, needed_argument, resolved, without_context
from runtime_core.declare.function import DeclaredFunction, FunctionSettings
from runtime_core.declare.manifest import EngineFunctionEntry
from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Registered, Resources, StepInfo, Work
from runtime_core.engines.results import Reference, has_references, mentions_reference, replaced
from runtime_core.errors import ConfigurationError, InvalidInput, InvalidResult


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The step that an engine function runs for: declare an argument of this type to get it, on any engine."""

    task_id: str = ""
    run_id: str = ""
    """The id of this call's run: the same in every attempt."""
    attempt: int = 1
    """From 1."""
    idempotency_key: str = ""
    """The same in every attempt of this call: use it for effects that must not happen twice."""
    deadline: float | None = None
    """When the task must end, in epoch seconds; None: no limit."""
    traceparent: str = ""
    """The span of this attempt, for calls that the function makes; empty if nothing is traced."""

    @classmethod
    def of(cls, step: StepInfo) -> EngineContext:
        """Return the context of a call's step."""
        return cls(
            step.task,
            step.run,
            step.attempt,
            step.key or f"{step.task}/{step.run}",
            step.deadline or None,
            step.traceparent,
        )


class MadeOnce:
    """Calls an object of a class, and looks like its method `__call__`."""

    def __init__(self, made: type) -> None:
        self.made = made
        self._lock = threading.Lock()
        self._object: object = None
        call = made.__call__
        functools.update_wrapper(self, call)
        self.__name__ = made.__name__
        self.__qualname__ = made.__qualname__
        self.__doc__ = inspect.getdoc(made) or inspect.getdoc(call)
        signature = inspect.signature(call)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, /, *arguments: object, **named: object) -> object:
        with self._lock:
            if self._object is None:
                self._object = self.made()
        return self._object(*arguments, **named)  # type: ignore[operator]  # the declaration has checked `__call__`

    def __reduce__(self) -> tuple[object, tuple[type]]:
        # Another process uses its own object, which may hold values that cannot be sent, such as a loaded model.
        return made_once, (self.made,)


@functools.cache
def made_once(made: type) -> MadeOnce:
    """Return the callable of a class, one in each process."""
    return MadeOnce(made)


SESSION = "spark"
"""The first argument of a Spark job: the session. Callers do not pass it."""
VERSION = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_STEP = StepInfo()
ONE_CPU = Resources()


class EngineFunctionSettings(FunctionSettings, total=False):
    """The options of an engine function. `App.engine_function` describes them."""

    version: str
    resources: Resources | None
    actors: int


class EngineFunction(DeclaredFunction):
    """A plain function with its name, limits and typed arguments. `App.engine_function` describes its options.

    It keeps no state: a call may run in a thread here or on another worker. A class with `__call__` works, too: each
    process creates one object at the first call. An argument of type EngineContext gets the context of the step. A
    function whose first argument is named `spark` is a Spark job. A batch job returns a command to run.
    """

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        timeout_seconds: float = 3600.0,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        pool: str = "",
        version: str = "",
        resources: Resources | None = None,
        actors: int = 0,
        batch: bool = False,
    ) -> None:
        """Raises ConfigurationError for errors that show without evaluating the annotations."""
        kind = "batch job" if batch else "engine function"
        super().__init__(
            kind,
            _callable(kind, function, place),
            place,
            timeout_seconds=timeout_seconds,
            name=name,
            retry=retry,
            pool=pool,
        )
        self.source = function
        self.base_name = self.name
        """The name without the version."""
        self.version = _checked_version(self.what, version, place)
        if version:
            self.name = f"{self.base_name}@{version}"
            self.what = f"{kind} {self.name!r}"
        self.batch = batch
        """Whether it returns the command of a batch job."""
        if is_async(self.function):
            raise ConfigurationError(
                f"{self.what} ({place}) is async: declare a plain function, since it runs on workers without a loop"
            )
        self.driver_side = bool(self._arguments) and self._arguments[0].name == SESSION
        """Whether it runs in Spark's driver process, with the session as its first argument."""
        if self.driver_side:
            self._arguments = self._arguments[1:]
        self._context_name, self._arguments = without_context(self.what, self._arguments, EngineContext, place)
        self.resources = _checked_resources(self.what, resources, place)
        self.actors = _checked_actors(self.what, actors, place)
        if self.driver_side and (batch or actors or resources is not None):
            raise ConfigurationError(
                f"{self.what} ({place}) has a first argument {SESSION!r}, so it is a Spark job: it runs beside the "
                "driver, takes neither resources nor actors, and cannot be a batch job"
            )
        if batch and actors:
            raise ConfigurationError(f"{self.what} ({place}) has actors={actors!r}: a batch job runs without them")

    @property
    def kind(self) -> str:
        """`function`, `spark_job` or `batch_job`."""
        return "spark_job" if self.driver_side else "batch_job" if self.batch else "function"

    @functools.cached_property
    def keeps_references(self) -> frozenset[str]:
        """The arguments that take a Reference itself."""
        return frozenset(
            argument.name
            for argument in self._arguments
            if mentions_reference(resolved(self.what, argument.name, argument.annotation, self.function, self.place))
        )

    def entry(self) -> EngineFunctionEntry:
        """Return its entry in the manifest. Raises ConfigurationError as `check` does."""
        return EngineFunctionEntry(
            arguments=self.arguments.schema(),
            result=self.result_schema,
            pool=self.pool,
            description=self.description,
            version=self.version,
            kind=self.kind,
            resources=msgspec.to_builtins(self.resources),
            actors=self.actors,
        )

    def refusal(self, engine: str) -> str:
        """Return in one line why this engine cannot run it; empty if it can."""
        if self.driver_side and engine != "spark":
            return f"{self.what} is a Spark job (its first argument is {SESSION!r}): run it by ctx.engine('spark')"
        if self.batch and engine != "ray":
            return f"{self.what} is a batch job of Ray: run it by ctx.engine('ray')"
        return ""

    def item_argument(self, over: str, common: Collection[str]) -> str:
        """Return the argument that takes the item of a map; `over` empty: the first one that is not in `common`.

        Raises InvalidInput(`function`, `arguments…`).
        """
        if self.kind != "function":
            raise InvalidInput("function", f"{self.what} takes no items: it is a whole job, so use call()")
        names = [argument.name for argument in self._arguments]
        if over:
            if over not in names or over in common:
                raise InvalidInput(f"arguments.{over}", f"takes no items; {self.what} has {', '.join(names) or 'none'}")
            return over
        for name in names:
            if name not in common:
                return name
        raise InvalidInput("arguments", f"leave none for the items; {self.what} has {', '.join(names) or 'none'}")

    def work(self, call: Registered, key: str, step: StepInfo) -> Work:
        """Return one call of it, for a driver."""
        return Work(
            call=call,
            name=self.name,
            key=key,
            timeout_seconds=self.timeout_seconds,
            resources=self.resources,
            actors=self.actors,
            batch=self.batch,
            driver_side=self.driver_side,
            step=step,
        )

    def bound(
        self, arguments: bytes, step: StepInfo = NO_STEP, /, *, store: str | None = None, session: object = None
    ) -> Callable[[], object]:
        """Return the function with the arguments in a JSON object. Raises InvalidInput (`arguments.…`).

        Values of references are read from the blob store at `store` (None: this process's), unless the argument takes
        a Reference. `session` is for a Spark job.
        """
        if has_references(arguments):
            arguments = self._with_values(arguments, store)
        given = self.arguments.decode(arguments)
        if self._context_name:
            given[self._context_name] = EngineContext.of(step)
        if self.driver_side:
            given[SESSION] = session
        call = functools.partial(self.function, **given)
        return functools.partial(_command, call) if self.batch else call

    def _with_values(self, arguments: bytes, store: str | None) -> bytes:
        try:
            given = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return arguments  # the decoder reports what is wrong
        if not isinstance(given, dict):
            return arguments
        kept = self.keeps_references
        for name, value in given.items():
            if name not in kept:
                try:
                    given[name] = replaced(value, lambda reference: _value_of(reference, store))
                except InvalidInput as error:
                    raise InvalidInput(f"arguments.{name}", error.message) from error
        return msgspec.json.encode(given)


def _value_of(reference: Reference, store: str | None) -> object:
    if reference.format == "json":
        return msgspec.Raw(reference.read(store))
    return msgspec.Raw(encode(reference.load(store).to_pylist(), "rows", limit=2**40))


def _command(call: Callable[[], object]) -> object:
    command = call()
    words = command if isinstance(command, list) else [command]
    if not words or not all(isinstance(word, str) and word for word in words):
        raise InvalidResult("result", f"{command!r} is not a command: return a string, or a list of strings")
    return command


def _callable(kind: str, function: Callable[..., object], place: Place) -> Callable[..., object]:
    """Return the function to call; for a class, the callable of its one object."""
    if not inspect.isclass(function):
        return function
    if not inspect.isfunction(inspect.getattr_static(function, "__call__", None)):
        raise ConfigurationError(
            f"{function!r} ({place}) cannot be an {kind}: give a function, or a class with a method __call__"
        )
    needed = needed_argument(function)
    if needed is not None:
        raise ConfigurationError(
            f"{kind} {function.__name__!r} ({place}) is a class that needs {needed!r}: give its "
            "arguments defaults, since each worker creates its own object"
        )
    made: type = function
    return made_once(made)


def _checked_version(what: str, version: object, place: Place) -> str:
    if not isinstance(version, str) or (version and not VERSION.fullmatch(version)):
        raise ConfigurationError(f"{what} ({place}) has version={version!r}: give a string, such as '2' or '2025.1'")
    return version


def _checked_actors(what: str, actors: object, place: Place) -> int:
    if isinstance(actors, bool) or not isinstance(actors, int) or not 0 <= actors <= 10_000:
        raise ConfigurationError(f"{what} ({place}) has actors={actors!r}: give a whole number from 0 to 10000")
    return actors


def _checked_resources(what: str, resources: object, place: Place) -> Resources:
    if resources is None:
        return ONE_CPU
    if not isinstance(resources, Resources):
        raise ConfigurationError(f"{what} ({place}) has resources={resources!r}: give Resources(cpus=2, gpus=1)")
    amounts = {"cpus": resources.cpus, "gpus": resources.gpus, "memory_bytes": resources.memory_bytes}
    for name, amount in {**amounts, **resources.custom}.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ConfigurationError(f"{what} ({place}) has {name}={amount!r}: give a number of at least 0")
    if not isinstance(resources.memory_bytes, int):
        raise ConfigurationError(
            f"{what} ({place}) has memory_bytes={resources.memory_bytes!r}: give a whole number of bytes"
        )
    return resources


class EngineFunctions(Protocol):
    """Finds engine functions by name."""

    def engine_function(self, named: object, /) -> EngineFunction | None:
        """Return the function, given with or without its version. Raises ConfigurationError for an ambiguous name."""
        ...


@runtime_checkable
class DeclaresEngineFunctions(Protocol):
    """An app, as a cluster needs it."""

    @property
    def functions(self) -> EngineFunctions: ...
