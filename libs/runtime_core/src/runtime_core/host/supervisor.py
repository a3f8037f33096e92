"""Runs services as child processes: starts them, shows their output, and restarts those that die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import anyio

from runtime_core.base.lifeline import tied
from runtime_core.bus.embedded import exit_reason

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 5.0
SETTLED_SECONDS = 10.0
"""A child that lives this long has started well: its backoff begins again."""
REFUSALS_MAX = 3
DRAIN_SECONDS = 1.0
LINE_MAX_BYTES = 64 * 1024

REFUSAL = re.compile(r'weft [\w-]+: .+|\{"time":"[^"]*","level":"error","service":"[^"]*","logger":"weft",.+')
"""The one line in which a service says why it cannot start, as text or as JSON."""
NAMES_ITSELF = re.compile(r'\d\d:\d\d:\d\d (?P<name>[\w-]+) |\{"time":')
"""A log line that needs no prefix."""
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


@dataclass(frozen=True)
class ChildSpec:
    """A process to start: the name before its lines, the command, and its whole environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass
class _Child:
    spec: ChildSpec
    colour: int
    process: asyncio.subprocess.Process | None = None
    backoff_seconds: float = FIRST_BACKOFF_SECONDS
    refusal: str = ""
    """The last refusal that the current process wrote."""
    refusals: int = 0
    """Consecutive processes that refused to start."""
    reloading: bool = False
    """Whether `restart` has ended the current process."""


@dataclass
class Supervisor:
    """Keeps children alive until `stop`.

    A child that dies is restarted after a backoff of 0.2 s to 5 s. A child that refuses to start three times in a
    row (status 1 and a one-line reason) ends all. Each child runs in its own session, so that Ctrl-C reaches only
    this process. On Linux, children are killed when this process is killed.
    """

    specs: Sequence[ChildSpec]
    output: TextIO
    shutdown_seconds: float = 20.0
    colour: bool | None = None
    """None: colour if the output is a terminal and NO_COLOR is not set."""

    _children: list[_Child] = field(default_factory=list, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: str = field(default="", init=False)
    _width: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.colour is None:
            self.colour = self.output.isatty() and not os.environ.get("NO_COLOR")
        self._width = max((len(spec.name) for spec in self.specs), default=0)
        self._children = [_Child(spec, COLOURS[place % len(COLOURS)]) for place, spec in enumerate(self.specs)]

    @property
    def failure(self) -> str:
        """Why the supervisor gave up: the last line of a child; empty if it did not."""
        return self._failure

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running children, by name."""
        running = [child for child in self._children if child.process and child.process.returncode is None]
        return {child.spec.name: child.process.pid for child in running if child.process}

    async def run(self) -> int:
        """Start all children and wait until all have ended. Return 0 after `stop`, 1 if a child refused to start.

        Cancellation kills the children and waits until they have ended. Call it in the main thread.
        """
        killer: asyncio.TimerHandle | None = None
        try:
            async with anyio.create_task_group() as group:
                for child in self._children:
                    group.start_soon(self._keep, child, name=f"keep {child.spec.name}")
                await self._stopping.wait()
                killer = asyncio.get_running_loop().call_later(self.shutdown_seconds, self._kill, True)
        finally:
            if killer is not None:
                killer.cancel()
            self._kill(False)
            await self._reap()
        return 1 if self._failure else 0

    def stop(self) -> None:
        """Ask all children to end; a second call kills them. Returns at once; `run` returns when they have ended."""
        if self._stopping.is_set():
            self._kill(True)
            return
        self._stopping.set()
        for child in self._children:
            self._signal(child, signal.SIGTERM)

    def restart(self, names: Collection[str]) -> None:
        """End the children of these names gracefully; each starts again at once."""
        for child in self._children:
            if child.spec.name in names and child.process is not None and child.process.returncode is None:
                child.reloading = True
                self._signal(child, signal.SIGTERM)

    def note(self, text: str) -> None:
        """Show a line of the supervisor itself."""
        self._write(f"{_clock()} {'weft'.ljust(self._width)}  · {text}")

    async def _keep(self, child: _Child) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            child.refusal = ""
            try:
                status = await self._run_once(child)
            except OSError as error:
                self._give_up(f"weft up: {child.spec.name} cannot be started: {error}")
                return
            if self._stopping.is_set():
                return
            if child.reloading:
                child.reloading = False
                continue
            lived = time.monotonic() - began
            self._count_refusal(child, status, lived)
            if self._stopping.is_set():
                return
            if lived >= SETTLED_SECONDS:
                child.backoff_seconds = FIRST_BACKOFF_SECONDS
            self._say(
                child,
                logging.WARNING,
                f"exited ({exit_reason(status)}) after {lived:.1f} s; restarting in {child.backoff_seconds:g} s",
            )
            await self._pause(child.backoff_seconds)
            child.backoff_seconds = min(2 * child.backoff_seconds, LONGEST_BACKOFF_SECONDS)

    async def _run_once(self, child: _Child) -> int:
        """Run one process from start to end. Return its exit status, negative for a signal."""
        # Not asyncio's pipe: its `wait` would also wait for grandchildren that inherited the pipe.
        read_end, write_end = os.pipe()
        try:
            child.process = process = await asyncio.create_subprocess_exec(
                # Not SIGTERM: a child that hangs in its stop would survive unsupervised. Other handlers reclaim
                # the deliveries of a killed one.
                *tied(child.spec.argv, signal.SIGKILL),
                env=child.spec.env,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        if self._stopping.is_set():  # `stop` was called while the child started
            self._signal(child, signal.SIGTERM)
        async with anyio.create_task_group() as group:
            group.start_soon(self._pump, child, read_end, name=f"show {child.spec.name}")
            status = await process.wait()
            _kill_group(process.pid)  # processes that it has started and left behind
            group.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS
        return status

    async def _pump(self, child: _Child, read_end: int) -> None:
        """Show the child's lines as they arrive, a very long line in pieces."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        rest = b""
        try:
            while part := await reader.read(LINE_MAX_BYTES):
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) >= LINE_MAX_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._show(child, line)
        finally:
            if rest:
                self._show(child, rest)
            transport.close()

    def _show(self, child: _Child, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        if REFUSAL.fullmatch(line):
            child.refusal = line
        itself = NAMES_ITSELF.match(line)
        if itself is None:
            self._write(f"{_clock()} {self._painted(child)}  | {line}")
        elif itself["name"] == child.spec.name:
            self._write(line[: itself.start("name")] + self._painted(child) + line[itself.end("name") :])
        else:
            self._write(line)

    def _say(self, child: _Child, level: int, text: str) -> None:
        glyph = "!" if level < logging.ERROR else "✗"
        self._write(f"{_clock()} {self._painted(child)}  {glyph} {text}")

    def _painted(self, child: _Child) -> str:
        name = child.spec.name.ljust(self._width)
        return f"\x1b[{child.colour}m{name}\x1b[0m" if self.colour else name

    def _write(self, line: str) -> None:
        try:
            print(line, file=self.output, flush=True)
        except OSError:  # the reader of the output has gone, as in `weft up | head`
            if not self._stopping.is_set():
                self.stop()

    def _count_refusal(self, child: _Child, status: int, lived_seconds: float) -> None:
        if status == 1 and child.refusal and lived_seconds < SETTLED_SECONDS:
            child.refusals += 1
        else:
            child.refusals = 0
        if child.refusals >= REFUSALS_MAX:
            self._give_up(child.refusal)

    def _give_up(self, line: str) -> None:
        if not self._failure:
            self._failure = line
        if not self._stopping.is_set():
            self.stop()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._stopping.wait()

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _kill(self, asked: bool) -> None:
        """Kill the running children, with the processes that they have started."""
        for child in self._children:
            process = child.process
            if process is None or process.returncode is not None:
                continue
            if asked:
                self._say(child, logging.ERROR, "did not stop in time: killing it")
            _kill_group(process.pid)

    async def _reap(self) -> None:
        """Wait for killed children: asyncio would report each one that its event loop has not seen end."""
        with anyio.move_on_after(DRAIN_SECONDS, shield=True):
            for child in self._children:
                if child.process is not None:
                    await child.process.wait()


def _kill_group(leader: int) -> None:
    """Kill a child and the processes that it has started: it leads its own session, hence its own group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
