"""The near end of a driver: starts the driver's process, and restarts it if it dies or loses its engine.

`run` runs a call and stops it if cancelled. `begin` starts a call that can be detached from. `RayEngine` and
`SparkEngine` have separate drivers: programs run any functions on a cluster with them, without a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, ClassVar, cast

import msgspec

from runtime_core.base.lifeline import tied
from runtime_core.base.text import LONGEST_MESSAGE
from runtime_core.engines.driver.host import BEAT_SECONDS, CLOSING_SECONDS, away, parse_line
from runtime_core.engines.protocol import (
    READ_BUFFER_BYTES,
    Cancel,
    ConnectionState,
    Ended,
    Error,
    Forget,
    Frames,
    FromDriver,
    Outcome,
    Pickled,
    Progress,
    RunCall,
    ToDriver,
    Work,
)
from runtime_core.engines.runtime_engine import EngineCall, Failure, RunConfig, RuntimeEngine
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.logs import LONGEST_LINE
from runtime_core.telemetry.redaction import kept

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""The pause before the next process starts, in seconds: it doubles from the first to the longest."""
CANCEL_SECONDS = 5.0
"""The longest wait for a cancelled call to stop on the engine, in seconds."""
REACHED_SECONDS = 180.0
"""The longest that `reached` waits for the engine, in seconds: a cluster may have to start first."""
SILENT_BEATS = 30
"""The number of consecutive missed heartbeats after which a running process counts as hung and is killed."""
LAST_LINES = 20
"""The number of a process's last output lines that are logged when it dies."""

logger = logging.getLogger(__name__)

OnProgress = Callable[[bytes], None]


class RunningCall:
    """A running call."""

    __slots__ = ("_driver", "_process", "ended", "id", "on_progress")

    def __init__(
        self, driver: Driver, process: _DriverProcess | None, number: int, on_progress: OnProgress | None
    ) -> None:
        self._driver = driver
        self._process = process
        self.id = number
        self.on_progress = on_progress
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """The outcome; it never raises. Await it under `asyncio.shield` or with `asyncio.wait`."""

    async def stop(self) -> None:
        """Stop the call on the engine, and wait up to CANCEL_SECONDS for that."""
        if self._process is not None and not self.ended.done():
            self._process.frames.send(Cancel(self.id))
            await asyncio.wait((self.ended,), timeout=CANCEL_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Detach from the call: it continues on the engine, and a call with the same key finds it."""
        if self._process is not None:
            self._process.begun.pop(self.id, None)

    def settle(self, outcome: Outcome) -> None:
        """Set the outcome unless there is one."""
        if not self.ended.done():
            self.ended.set_result(outcome)


@dataclass(eq=False)
class _DriverProcess:
    """One process of the driver, from its start to its end."""

    child: subprocess.Popen[bytes]
    frames: Frames[ToDriver, FromDriver]
    lifeline: int
    begun: dict[int, RunningCall]
    died: asyncio.Event
    said: deque[str]
    listener: threading.Thread


class Driver:
    """Runs calls on one engine through a process that holds the connection to it.

    It belongs to the event loop on which it was started. A call that runs when the process dies or the engine is lost
    ends as `lost`. A call that begins while there is no connection ends as `away`, at once.
    """

    def __init__(
        self, engine: str, environ: Mapping[str, str], *, on_start: Callable[[], object] | None = None
    ) -> None:
        """`engine` is `ray`, `spark`, or a backend as `package.module:Class`; `environ` is its process's environment.

        `on_start` is called for each process that is started.
        """
        self.engine = engine
        self.starts = 0
        """The number of processes started so far."""
        self._on_start = on_start
        self._environ = dict(environ)
        self._name = engine.rpartition(":")[2]
        self._state = ConnectionState(False, "its driver process is starting", trying=True)
        self.connected_since = 0.0
        """The time when the current or last connection was made, in seconds since 1970."""
        self._changed = asyncio.Event()
        self._process: _DriverProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._numbers = 0
        self._was_connected = False
        self._heard = False
        self._stopping = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and keep one running. Does not wait for the engine."""
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep(), name=f"keep the {self._name} driver")

    async def stop(self) -> None:
        """End the process. Running work with a key continues if the engine outlives its driver."""
        keeping = self._keeping
        if keeping is None:
            return
        self._stopping = True
        if self._process is not None:
            self._process.frames.close()
        else:
            keeping.cancel()
        await asyncio.wait((keeping,))

    @property
    def state(self) -> ConnectionState:
        """Return whether the engine can be used now, and if not, why."""
        return self._state

    async def changed(self, seen: ConnectionState) -> ConnectionState:
        """Wait until the state differs from `seen`, and return it."""
        while self._state == seen:
            await self._changed.wait()
        return self._state

    async def reached(self) -> ConnectionState:
        """Wait for the first attempt to reach the engine, at most REACHED_SECONDS. Return the state then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REACHED_SECONDS):
                while self._state.trying:
                    await self._changed.wait()
        return self._state

    @property
    def pid(self) -> int | None:
        """Return the process id of the driver; None if it does not run."""
        return self._process.child.pid if self._process is not None else None

    @property
    def memory_bytes(self) -> int:
        """Return the process's resident memory in bytes; 0 if it is unknown."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return 0

    @property
    def running(self) -> int:
        """Return the number of running calls."""
        return len(self._process.begun) if self._process is not None else 0

    # -- work --------------------------------------------------------------------------------------------------------

    def begin(self, work: Work, on_progress: OnProgress | None = None) -> RunningCall:
        """Begin a call. `on_progress` takes JSON. Without a connection, the call ends at once as `away`.

        Raises ValueError if the call is too large to send.
        """
        process = self._process
        if process is None or not self._state.connected:
            begun = RunningCall(self, None, 0, None)
            begun.settle(away(self._name, self._state.reason))
            return begun
        self._numbers += 1
        begun = RunningCall(self, process, self._numbers, on_progress)
        process.begun[begun.id] = begun
        try:
            process.frames.send(RunCall(begun.id, work))
        except BaseException:
            begun.leave()
            raise
        return begun

    async def run(self, work: Work, on_progress: OnProgress | None = None) -> Outcome:
        """Run a call to its end. If cancelled, stop it on the engine. Raises ValueError like `begin`."""
        begun = self.begin(work, on_progress)
        try:
            return await asyncio.shield(begun.ended)
        except asyncio.CancelledError:
            await begun.stop()
            raise

    def forget(self, key: str) -> None:
        """Drop this work's result. Without a connection, the engine drops it when it expires."""
        if self._process is not None and self._state.connected:
            self._process.frames.send(Forget(key))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping:
            self._was_connected = False
            try:
                process = await self._start()
            except OSError as error:
                self._set_state(ConnectionState(False, f"its driver process cannot be started: {error}"))
            else:
                watching = asyncio.get_running_loop().create_task(self._watch(process), name="watch the driver")
                try:
                    await self._receive(process)
                finally:
                    watching.cancel()
                    await self._end(process)
            if self._stopping:
                return
            if self._was_connected:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _start(self) -> _DriverProcess:
        near, far = socket.socketpair()
        lifeline_read, lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", "runtime_core.engines.driver.host"]
        command += [self.engine, str(far.fileno()), str(lifeline_read)]
        if threading.current_thread() is threading.main_thread():
            # The lifeline does the same, but not if another process has inherited our end of it.
            command = tied(command, signal.SIGTERM)
        try:
            # In this thread: the process is tied to the thread that starts it.
            child = subprocess.Popen(  # noqa: ASYNC220, S603  # it takes a millisecond, and the command is our own
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(far.fileno(), lifeline_read),
                start_new_session=True,
            )
        except BaseException:
            near.close()
            os.close(lifeline)
            raise
        finally:
            far.close()
            os.close(lifeline_read)
        self.starts += 1
        if self._on_start is not None:
            self._on_start()
        reader, writer = await asyncio.open_unix_connection(sock=near, limit=READ_BUFFER_BYTES)
        frames: Frames[ToDriver, FromDriver] = Frames(reader, writer, msgspec.msgpack.Decoder(FromDriver))
        said: deque[str] = deque(maxlen=LAST_LINES)
        assert child.stdout is not None
        listener = threading.Thread(target=_listen, args=(child.stdout, said, self._name), daemon=True)
        listener.start()
        process = _DriverProcess(child, frames, lifeline, {}, asyncio.Event(), said, listener)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_await_death, args=(child, loop, process.died), daemon=True).start()
        self._process = process
        return process

    async def _watch(self, process: _DriverProcess) -> None:
        """Kill a process that sends no heartbeats. Counted in beats, so that a pause of this loop kills no process."""
        silent = 0
        while silent < SILENT_BEATS:
            await asyncio.sleep(BEAT_SECONDS)
            silent = 0 if self._heard else silent + 1
            self._heard = False
        logger.error("the %s driver (process %d) hangs; killing it", self._name, process.child.pid)
        process.child.kill()

    async def _receive(self, process: _DriverProcess) -> None:
        while (message := await process.frames.receive()) is not None:
            self._heard = True
            match message:
                case ConnectionState():
                    self._was_connected = self._was_connected or message.connected
                    self._set_state(message)
                case Progress(id=number, value=value):
                    begun = process.begun.get(number)
                    if begun is not None and begun.on_progress is not None:
                        try:
                            begun.on_progress(value)
                        except Exception:
                            logger.exception("the progress callback failed")
                case Ended(id=number, outcome=outcome):
                    begun = process.begun.pop(number, None)
                    if begun is not None:
                        begun.settle(outcome)

    async def _end(self, process: _DriverProcess) -> None:
        """End a process that has disconnected or is to stop, and settle its calls as `lost`."""
        self._process = None
        process.frames.close()
        os.close(process.lifeline)
        if not self._stopping and self._state.connected:
            self._set_state(ConnectionState(False, "its driver process has ended; starting another one"))
        for begun in list(process.begun.values()):
            begun.settle(
                Error("lost", "EngineLost", f"the {self._name} driver ended while it ran: {self._state.reason}")
            )
        process.begun.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await process.died.wait()
        # Also kill the processes that it started: nobody else knows them.
        with contextlib.suppress(OSError):
            os.killpg(process.child.pid, signal.SIGKILL)
        await process.died.wait()
        status = process.child.wait()
        process.listener.join(0.2)
        if not self._stopping:
            last = " | ".join(process.said)
            how = f"ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
            logger.warning("the %s driver (process %d) %s%s", self._name, process.child.pid, how, last and f": {last}")

    def _set_state(self, state: ConnectionState) -> None:
        if state != self._state:
            if state.connected and not self._state.connected:
                self.connected_since = time.time()
            self._state = state
            self._changed.set()
            self._changed = asyncio.Event()


def _await_death(child: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, died: asyncio.Event) -> None:
    """Set `died` at the child's end without reaping it, so that its group id stays valid until the group is killed."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    else:
        child.wait()
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(died.set)


def _listen(printed: IO[bytes], said: deque[str], name: str) -> None:
    """Log a process's output until all processes that share it have ended; a long line in parts."""
    with printed:
        while line := printed.readline(LONGEST_LINE):
            level, source, text = parse_line(line.decode(errors="replace").rstrip())
            if not text:
                continue
            said.append(kept(text, LONGEST_MESSAGE))
            logging.getLogger(source or f"{__name__}.{name}").log(level, "%s", text)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class DriverEngine(RuntimeEngine):
    """Runs calls through its own driver process. A subclass names its engine."""

    engine: ClassVar[str]
    """The engine's name, which is also the name of the extra."""
    package: ClassVar[str]
    """The package that must be installed."""
    cloudpickle: ClassVar[str]
    """The module that pickles functions for the engine's workers."""
    address: ClassVar[str]
    """The environment variable with the engine's address."""

    def __init__(self, config: RunConfig | None = None) -> None:
        super().__init__(config)
        self._driver: Driver | None = None

    async def _start(self) -> None:
        if find_spec(self.package) is None:
            raise ConfigurationError(
                f"{type(self).__name__}: {self.package} is not installed: pip install 'weft[{self.engine}]'"
            )
        self._driver = driver = Driver(self.engine, self._environment())
        await driver.start()
        reached = False
        try:
            state = await driver.reached()
            reached = state.connected
            if not reached:
                raise ConfigurationError(f"{type(self).__name__}: {state.reason}")
        finally:
            if not reached:
                self._driver = None
                await driver.stop()
        if self.config.worker_num is None:
            self._slots = asyncio.Semaphore(max(1, int(float(state.info["cpus"]))))

    async def _stop(self) -> None:
        if self._driver is not None:
            await self._driver.stop()

    def _prepare(self, call: EngineCall) -> Work:
        cloudpickle = importlib.import_module(self.cloudpickle)
        try:
            payload = cloudpickle.dumps((call.function, call.args, dict(call.kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the arguments' own methods may raise anything
            raise InvalidInput("calls", f"cannot be pickled for a cluster, {error}: give plain arguments") from error
        return Work(Pickled(payload), call.shown)

    async def _run(self, prepared: Work, timeout_seconds: float | None) -> object:
        assert self._driver is not None
        outcome = await self._driver.run(Work(prepared.call, prepared.name, timeout_seconds=timeout_seconds or 0.0))
        if isinstance(outcome, Error):
            raise await asyncio.to_thread(_failure, outcome)
        return await asyncio.to_thread(_loaded, outcome.data)

    def _environment(self) -> dict[str, str]:
        """Return the driver's environment, in which its workers find this program's modules."""
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self.config.address:
            environ[self.address] = self.config.address
        return environ


def _loaded(data: bytes) -> object:
    try:
        return cast(object, pickle.loads(data))  # noqa: S301  # created by our own worker
    except Exception as error:  # the result's own methods may raise anything
        raise Failure("PicklingError", f"the result cannot be unpickled here: {error}", error) from None


def _failure(error: Error) -> Failure:
    original = None
    if error.pickled:
        try:
            original = pickle.loads(error.pickled)  # noqa: S301  # as above
        except Exception:  # its class may not be found here
            original = None
    if not isinstance(original, BaseException):
        original = None
    elif error.traceback:
        original.add_note(f"In the worker process:\n{error.traceback}")
    return Failure("TimeoutError" if error.cause == "limit" else error.type, error.message, original)


class RayEngine(DriverEngine):
    """Runs calls as tasks of the cluster at `RunConfig.address`, or WEFT_RAY_ADDRESS, or on its own local Ray.

    Functions and arguments are sent with cloudpickle. Workers import code from modules, so the modules must be
    installed there. Each call uses one CPU. Without `worker_num`, as many calls run in parallel as there are CPUs.
    """

    engine = "ray"
    package = "ray"
    cloudpickle = "ray.cloudpickle"
    address = "WEFT_RAY_ADDRESS"


class SparkEngine(DriverEngine):
    """Runs calls as queries of the server at `RunConfig.address`, or WEFT_SPARK_REMOTE, or on its own local one.

    Functions and arguments are sent with cloudpickle. Workers import code from modules, so the modules must be
    installed there. Without `worker_num`, as many calls run in parallel as the server runs tasks. Large data passes
    through the server's memory, except with its own local server.
    """

    engine = "spark"
    package = "pyspark"
    cloudpickle = "pyspark.cloudpickle"
    address = "WEFT_SPARK_REMOTE"
