"""The far end of a driver: one process with one connection to its engine. Its log lines go to the gateway.

`process.py` starts it: `python -m runtime_core.engines.driver.host <engine> <socket> <lifeline>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TextIO

import msgspec

from runtime_core.base.lazy import collect_seldom
from runtime_core.engines.protocol import (
    READ_BUFFER_BYTES,
    Away,
    Backend,
    Cancel,
    ConnectionState,
    Ended,
    Error,
    Forget,
    Frames,
    FromDriver,
    Outcome,
    Progress,
    RunCall,
    ToDriver,
    Work,
)
from runtime_core.telemetry.logs import LONGEST
from runtime_core.telemetry.redaction import kept

RECORD_PREFIX = "\x1e"
"""The prefix of a line that is a log record: JSON, (level, logger, text)."""
CHATTY = ("ray", "pyspark", "py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers whose records are logged at DEBUG, like lines that a library prints."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""The pause between attempts to reach an engine, in seconds: it doubles from the first to the longest."""
CLOSING_SECONDS = 8.0
"""The limit for disconnecting from an engine, in seconds."""
LOST_CLOSING_SECONDS = 2.0
"""The limit for disconnecting from a lost engine, in seconds."""
BEAT_SECONDS = 2.0
"""The interval of heartbeats to the gateway, in seconds."""
BACKENDS = {
    "ray": ("runtime_core.engines.ray.backend:RayBackend", "weft[ray]"),
    "spark": ("runtime_core.engines.spark.backend:SparkBackend", "weft[spark]"),
}
"""Each engine's backend and the extra that installs its dependencies."""

logger = logging.getLogger("runtime_core.engines.driver.host")


class LineHandler(logging.Handler):
    """Writes log records as lines with RECORD_PREFIX."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        level = logging.DEBUG if record.name.partition(".")[0] in CHATTY else record.levelno
        data = msgspec.json.encode((level, record.name, kept(self.format(record), LONGEST)))
        try:
            self._stream.write(f"{RECORD_PREFIX}{data.decode()}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return  # the parent process has closed the stream


def send_logs(level: int) -> None:
    """Send this process's log to its parent process."""
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(LineHandler(sys.stderr))
    root.setLevel(level)


def parse_line(line: str) -> tuple[int, str, str]:
    """Return (level, logger, text) of a line that a driver printed."""
    if line.startswith(RECORD_PREFIX):
        try:
            level, name, text = msgspec.json.decode(line[1:], type=tuple[int, str, str])
        except msgspec.DecodeError:
            return logging.DEBUG, "", line[1:]
        return level, name, text
    return logging.DEBUG, "", line


def main(engine: str, socket_number: int, lifeline: int) -> NoReturn:
    """Run a driver until its gateway disconnects or the engine is lost, then end the process."""
    collect_seldom()
    # The engine's child processes must not keep these open: closing them signals the end of a process.
    os.set_inheritable(socket_number, False)
    os.set_inheritable(lifeline, False)
    send_logs(logging.INFO)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(engine, socket_number, lifeline))
    # Not sys.exit: that waits for threads, and those of a lost engine may never end.
    os._exit(0)


async def _main(engine: str, socket_number: int, lifeline: int) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # Ctrl-C reaches the whole process group; the gateway decides about the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    threading.Thread(target=_end_with_gateway, args=(lifeline, loop, stop), name="lifeline", daemon=True).start()
    reader, writer = await asyncio.open_unix_connection(
        sock=socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=socket_number), limit=READ_BUFFER_BYTES
    )
    frames: Frames[FromDriver, ToDriver] = Frames(reader, writer, msgspec.msgpack.Decoder(ToDriver))
    await EngineHost(engine, frames, stop).run()


def _end_with_gateway(lifeline: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """End this process with its gateway. Runs in its own thread, so that it works even if the loop is blocked."""
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop.set)
    threading.Event().wait(CLOSING_SECONDS + 2)
    os._exit(1)


def backend_of(engine: str) -> Backend:
    """Return a backend by its engine's name or `package.module:Class`. Raise Away if it is not installed."""
    reference, extra = BACKENDS.get(engine, (engine, ""))
    module, _, name = reference.partition(":")
    importlib.invalidate_caches()
    try:
        made = getattr(importlib.import_module(module), name)(dict(os.environ))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "runtime_core" or not extra:
            raise
        raise missing(engine, error) from error
    backend: Backend = made
    return backend


def missing(engine: str, error: ImportError) -> Away:
    """Return the error for an engine whose dependency cannot be imported."""
    extra = BACKENDS.get(engine, ("", ""))[1]
    remedy = f": pip install '{extra}'" if extra else ""
    return Away(f"{error.name or engine} is not installed ({error}){remedy}")


class EngineHost:
    """Serves one gateway."""

    def __init__(self, engine: str, frames: Frames[FromDriver, ToDriver], stop: asyncio.Event) -> None:
        self._engine = engine
        self._frames = frames
        self._stop = stop
        self._backend: Backend | None = None
        self._state = ConnectionState(False, "connecting", trying=True)
        self._lost = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self._cancelling: set[int] = set()
        self._others: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the gateway disconnects, SIGTERM arrives or the engine is lost."""
        loop = asyncio.get_running_loop()
        living = loop.create_task(self._live(), name="keep the connection")
        parts = [
            loop.create_task(self._stop.wait(), name="wait for the end"),
            loop.create_task(self._receive(), name="receive"),
            living,
            loop.create_task(self._beat(), name="beat"),
        ]
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        # Stop watching: disconnecting on purpose is not a loss.
        living.cancel()
        for part in done:
            if not part.cancelled() and part.exception() is not None:
                logger.error("the driver ends with an unexpected error", exc_info=part.exception())
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LOST_CLOSING_SECONDS):
                await self._frames.sent()
        if self._backend is not None:
            try:
                async with asyncio.timeout(LOST_CLOSING_SECONDS if self._lost else CLOSING_SECONDS):
                    await self._backend.close()
            except Exception as error:
                logger.warning("disconnecting from %s failed: %s", self._engine, _shown(error))
        # Returning would cancel running work and so stop it on the cluster.
        os._exit(0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._frames.send(self._state)

    # -- the connection to the engine --------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Connect, wait until the engine is lost, then answer all running calls with an error."""
        backend = await self._connected()
        reason = await backend.lost()
        self._lost = True
        logger.warning("%s is lost: %s", self._engine, reason)
        self._set_state(ConnectionState(False, reason))
        for number in list(self._running):
            self._end(number, Error("lost", "EngineLost", f"{self._engine} was lost while it ran: {reason}"))

    async def _connected(self) -> Backend:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                if self._backend is None:
                    self._backend = backend_of(self._engine)
                info = await self._backend.connect()
            except Away as away:
                self._set_state(ConnectionState(False, str(away)))
            except ImportError as error:
                self._set_state(ConnectionState(False, str(missing(self._engine, error))))
            except Exception as error:
                logger.exception("connecting to %s failed with an unexpected error", self._engine)
                self._set_state(ConnectionState(False, _shown(error)))
            else:
                self._set_state(ConnectionState(True, info=dict(info)))
                return self._backend
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def _set_state(self, state: ConnectionState) -> None:
        if state != self._state:
            self._state = state
            self._frames.send(state)

    # -- work --------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while (message := await self._frames.receive()) is not None:
            match message:
                case RunCall(id=number, work=work):
                    self._running[number] = loop.create_task(self._run(number, work), name=f"run {work.name}")
                case Cancel(id=number):
                    task = self._running.get(number)
                    if task is not None:
                        self._cancelling.add(number)
                        task.cancel()
                case Forget(key=key):
                    self._beside(self._forget(key))

    async def _run(self, number: int, work: Work) -> None:
        backend = self._backend
        if backend is None or not self._state.connected:
            self._end(number, away(self._engine, self._state.reason))
            return

        def report(value: bytes) -> None:
            if number in self._running:
                self._frames.send(Progress(number, value))

        try:
            outcome = await backend.run(work, report)
        except asyncio.CancelledError:
            if number not in self._cancelling:
                logger.error("%s cancelled the call of %s without a request", self._engine, work.name)
            outcome = Error("cancelled", "Cancelled", "it was cancelled")
        except Exception as error:
            logger.exception("%s failed to run %s with an unexpected error", self._engine, work.name)
            outcome = Error("worker", type(error).__name__, f"the {self._engine} driver failed to run it: {error}")
        self._end(number, outcome)

    def _end(self, number: int, outcome: Outcome) -> None:
        """Answer a call, at most once."""
        if self._running.pop(number, None) is None:
            return
        self._cancelling.discard(number)
        try:
            self._frames.send(Ended(number, outcome))
        except ValueError as error:
            self._frames.send(Ended(number, Error("invalid", "ResultTooLarge", str(error), retryable=False)))

    async def _forget(self, key: str) -> None:
        if self._backend is None:
            return
        try:
            await self._backend.forget(key)
        except Exception as error:
            logger.warning("%s failed to forget %s: %s", self._engine, key, _shown(error))

    def _beside(self, body: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's types
        task = asyncio.get_running_loop().create_task(body)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def away(engine: str, reason: str) -> Error:
    """Return the error of a call that did not start because there is no connection."""
    return Error("away", "EngineUnavailable", f"{engine} is unavailable: {reason}")


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
