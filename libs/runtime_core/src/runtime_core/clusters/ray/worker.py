"""What runs in the worker processes of Ray. It does not use Ray."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from runtime_core.clusters.remote import declared, error_of, run_items, run_registered
from runtime_core.engines.protocol import Error, Mapped, Outcome, Pickled, Registered, Value, Work
from runtime_core.engines.results import Results

CHUNK_SECONDS = 1.0
"""A worker that was given several items hands back those that it has not begun after so long."""


class Job(msgspec.Struct, frozen=True):
    """What a worker is sent."""

    work: Work
    """Of a map: some of its items."""
    results: Results

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Begun(msgspec.Struct, frozen=True):
    """Where a call runs."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Items(msgspec.Struct, frozen=True):
    """How the first items of a chunk ended: all of them, or as many as were done in time."""

    outcomes: list[Outcome]
    seconds: float
    """What they took."""


Answer = Value | Error | Items


def run_job(job: bytes) -> Iterator[Begun | Answer]:
    """Say that the call has begun, and then how it ended."""
    # Before it begins: what a new process loads first is no part of the call, nor of its limit.
    unpacked = msgspec.msgpack.decode(job, type=Job)
    _load(unpacked)
    yield Begun(os.getpid(), socket.gethostname())
    yield answer(unpacked)


class LongLived:
    """An actor: a process that runs one call after the other and keeps what they have loaded."""

    def ready(self, first_job: bytes = b"") -> Begun:
        """Where it runs, when it has loaded what its first job needs."""
        if first_job:
            _load(msgspec.msgpack.decode(first_job, type=Job))
        return Begun(os.getpid(), socket.gethostname())

    def run(self, job: bytes) -> Answer:
        """How the call ended."""
        return answer(msgspec.msgpack.decode(job, type=Job))


def _load(job: Job) -> None:
    """Import the app, where that can be; where not, the call says so."""
    call = job.work.call
    function = call.function if isinstance(call, Mapped) else call
    if isinstance(function, Registered):
        with suppress(BaseException):  # whatever an app does when it is imported
            declared(function.app, function.folder, function.name)


def answer(job: Job) -> Answer:
    """Make the call, and say how it ended. Never raises."""
    work = job.work
    match work.call:
        case Pickled(payload=payload):
            return _run_pickled(payload)
        case Mapped(function=function, over=over, items=items):
            began = time.monotonic()
            outcomes: list[Outcome] = []
            for outcome in run_items(function, over, items, work.step, job.results):
                outcomes.append(outcome)
                if time.monotonic() - began > CHUNK_SECONDS:
                    break
            return Items(outcomes, time.monotonic() - began)
        case function:
            return run_registered(function, work.step, job.results)


def _run_pickled(payload: bytes) -> Outcome:
    from ray import cloudpickle  # a module of its own that Ray brings along; here, since only such calls need it

    try:
        function, args, kwargs = pickle.loads(payload)  # noqa: S301  # from the program that uses this engine
    except ImportError as error:
        return Error("invalid", type(error).__name__, f"a worker cannot import what the call needs: {error}")
    except BaseException as error:
        return _failed(cloudpickle, error)
    try:
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except BaseException as error:  # SystemExit too: it ends the call and not the worker
        return _failed(cloudpickle, error)
    try:
        return Value(cloudpickle.dumps(result, pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # whatever the result's own methods raise
        message = f"the result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return Error("invalid", "PicklingError", message)


def _failed(cloudpickle: Any, error: BaseException) -> Error:  # Any: a module
    ended = error_of(error)
    try:
        # Tried here, since an error whose arguments are not those of its class cannot be made again.
        itself: bytes = cloudpickle.dumps(error)
        pickle.loads(itself)  # noqa: S301  # our own
    except Exception:  # an error may hold anything
        itself = b""
    trace = ended.traceback or "".join(traceback.format_exception(error))
    return msgspec.structs.replace(ended, cause="function", traceback=trace, pickled=itself)
