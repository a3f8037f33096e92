"""Runs registered functions in a worker process of a cluster, which imports the app by its reference.

Everything here blocks. `run_registered` makes a whole call. `declared`, `error_of` and `outcome_of` are its parts, for
engines that do the rest themselves.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.base.text import LONGEST_MESSAGE, LONGEST_TRACEBACK
from runtime_core.engines.protocol import Error, Outcome, Pickled, Registered, StepInfo, Value
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError, InvalidInput, InvalidResult, Reject, Retry
from runtime_core.telemetry.redaction import kept
from runtime_core.telemetry.spans import within

if TYPE_CHECKING:
    from runtime_core.engines.function import DeclaresEngineFunctions, EngineFunction, EngineFunctions


class NotRunnable(Exception):
    """Raised if a call cannot run; `error` is the call's outcome."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


def run_registered(call: Registered, step: StepInfo, results: Results, session: object = None) -> Outcome:
    """Run one call and return its outcome. Never raises: SystemExit and KeyboardInterrupt end only the call.

    `session` is the session for a Spark job.
    """
    try:
        function = declared(call.app, call.folder, call.name)
    except NotRunnable as refused:
        return refused.error
    return run_function(function, call.arguments, step, results, session)


def run_pickled(call: Pickled, cloudpickle: Any) -> Outcome:  # Any: the engine's own copy of the module
    """Run a pickled (function, args, kwargs) and return its pickled outcome. Never raises, as `run_registered`."""
    try:
        function, args, kwargs = pickle.loads(call.payload)  # noqa: S301  # from the program that uses this engine
    except ImportError as error:
        return Error("invalid", type(error).__name__, f"a worker cannot import a module of the call: {error}")
    except BaseException as error:
        return _pickled_error(cloudpickle, error)
    try:
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except BaseException as error:  # SystemExit too: it ends the call, not the worker
        return _pickled_error(cloudpickle, error)
    try:
        return Value(cloudpickle.dumps(result, pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # the result's own methods may raise anything
        message = f"the result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return Error("invalid", "PicklingError", message, retryable=False)


def _pickled_error(cloudpickle: Any, error: BaseException) -> Error:  # Any: a module
    ended = error_of(error)
    try:
        # Tried here: an error whose `args` do not fit its constructor cannot be unpickled.
        itself: bytes = cloudpickle.dumps(error)
        pickle.loads(itself)  # noqa: S301  # our own
    except Exception:  # an error may contain anything
        itself = b""
    trace = ended.traceback or "".join(traceback.format_exception(error))
    return msgspec.structs.replace(ended, cause="function", traceback=trace, pickled=itself)


def run_items(call: Registered, over: str, items: bytes, step: StepInfo, results: Results) -> Iterator[Outcome]:
    """Call the function with each of `items` (a JSON array) as its argument `over`; yield the outcomes in order."""
    try:
        function = declared(call.app, call.folder, call.name)
    except NotRunnable as refused:
        for _ in msgspec.json.decode(items, type=list[msgspec.Raw]):
            yield refused.error
        return
    common = msgspec.json.decode(call.arguments, type=dict[str, msgspec.Raw]) if call.arguments else {}
    for item in msgspec.json.decode(items, type=list[msgspec.Raw]):
        yield run_function(function, msgspec.json.encode({**common, over: item}), step, results)


def run_function(
    function: EngineFunction, arguments: bytes, step: StepInfo, results: Results, session: object = None
) -> Outcome:
    """Call a declared function and return its outcome."""
    try:
        body = function.bound(arguments, step, store=results.blob_url, session=session)
    except Exception as error:
        return _invalid(error)
    try:
        with within(step.traceparent):
            value = body()
    except BaseException as error:  # SystemExit too: it ends the call, not the worker
        return error_of(error)
    return outcome_of(value, step, results)


def declared(app: str, folder: str, name: str) -> EngineFunction:
    """Return the function with this name, with or without its version. Raise NotRunnable if there is none."""
    try:
        found = _functions(app, folder).engine_function(name)
    except ConfigurationError as error:
        raise NotRunnable(_invalid(error)) from error
    if found is None:
        raise NotRunnable(Error("invalid", "UnknownName", f"the app {app} has no engine function {name!r}"))
    return found


def outcome_of(value: object, step: StepInfo, results: Results) -> Outcome:
    """Return a function's result as JSON, or as a Reference to it if it is large."""
    try:
        return Value(results.encoded(value, step.task))
    except (InvalidInput, ConfigurationError) as error:
        return _invalid(error)
    except Exception as error:  # raised by the value's own methods or the blob store
        return error_of(error)


def error_of(error: BaseException) -> Error:
    """Return the outcome of a call whose function raised `error`."""
    if isinstance(error, Retry):
        return Error("function", "Retry", _text(error.reason), retry_after_seconds=error.after_seconds)
    if isinstance(error, Reject):
        return Error("function", error.type, _text(error.reason), retryable=False)
    trace = kept("".join(traceback.format_exception(error)), LONGEST_TRACEBACK, end=True)
    if isinstance(error, ImportError | InvalidResult):
        return Error("invalid", type(error).__name__, _message(error), trace, retryable=False)
    return Error(
        "function", type(error).__name__, _message(error), trace, retryable=not isinstance(error, InvalidInput)
    )


def _invalid(error: Exception) -> Error:
    return Error("invalid", type(error).__name__, _message(error), retryable=False)


def _message(error: BaseException) -> str:
    try:
        return _text(str(error))
    except Exception:  # its own __str__ may fail too
        return "its message cannot be read"


def _text(message: str) -> str:
    return kept(str(message), LONGEST_MESSAGE)


@functools.cache
def _functions(reference: str, folder: str) -> EngineFunctions:
    """Return the functions of the app, imported once per process. Raises ConfigurationError."""
    # Imported with the first call, with everything that apps may declare.
    from runtime_core.declare.loading import load_object
    from runtime_core.engines.function import DeclaresEngineFunctions

    app = load_object("app", reference, folder, DeclaresEngineFunctions)
    return cast("DeclaresEngineFunctions", app).functions
