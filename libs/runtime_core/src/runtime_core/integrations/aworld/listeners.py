"""What listens to a running task: its `outputs`, the terminal that answers its questions, and a hint for others."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import select
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TextIO, cast

from runtime_core.bus.keys import GROUPS
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.integrations.aworld.task import Task
from runtime_core.wire import codec
from runtime_core.wire.events import HUMAN_REQUESTED, StreamEvent, stream_event

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.client.task import TaskHandle

log = logging.getLogger(__name__)

HINT_SECONDS = 2.0
"""How long a task may run before its caller checks for open questions."""
LOOK_SECONDS = 1.0
"""The time between two checks for questions."""
LOOK_ENTRIES = 1000
"""The most entries of one task's stream that one check reads."""
_LOOK_SECONDS = 0.1
_HANDLERS = f"{GROUPS['agent']}@".encode()
"""The beginning of agent-handlers' owner names."""
_YES = {"y", "yes", "true", "approve", "ok"}
_NO = {"n", "no", "false", "deny"}
_TERMINAL = threading.Lock()
"""Held while a question waits for a line: standard input has one reader at a time."""


class Outputs:
    """Collects the events of a task: `Task(outputs=Outputs())`, then `async for event in outputs.stream_events()`."""

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        """All events so far."""
        self.is_complete = False
        """Whether the final event is among them."""
        self._more = asyncio.Event()

    async def add_output(self, event: StreamEvent) -> None:
        """Add an event."""
        self.events.append(event)
        self.is_complete = self.is_complete or event.response is not None
        self._more.set()

    async def stream_events(self) -> AsyncIterator[StreamEvent]:
        """Yield all events, from the first one to the task's end."""
        place = 0
        while True:
            while place < len(self.events):
                place += 1
                yield self.events[place - 1]
            if self.is_complete:
                return
            self._more.clear()
            await self._more.wait()


class Listeners:
    """The listeners of one task."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._interactive = task.config.run_mode == "interactive"
        self._asking: dict[str, asyncio.Task[None]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything listens from the start."""
        return self._interactive or self._task.outputs is not None

    async def take(self, event: StreamEvent) -> None:
        """Pass an event on. Questions are asked while the task continues."""
        if self._task.outputs is not None:
            taken = self._task.outputs.add_output(event)
            if inspect.isawaitable(taken):
                await taken
        if event.type == HUMAN_REQUESTED and self._interactive:
            self._asking[event.request_id] = asyncio.create_task(ask(event), name=f"ask {event.request_id}")
        if event.response is not None:
            await self.stop()

    async def follow(self, events: AsyncGenerator[StreamEvent]) -> None:
        """Take all events."""
        async with aclosing(events) as stream:
            async for event in stream:
                await self.take(event)

    async def stop(self) -> None:
        """Withdraw the questions that nobody has answered."""
        asking, self._asking = list(self._asking.values()), {}
        for each in asking:
            each.cancel()
        if asking:
            await asyncio.wait(asking)


class Hints:
    """Warns about the questions of tasks that nobody listens to, and about tasks that nobody can run.

    Two commands a second check all tasks of a partition.
    """

    def __init__(self) -> None:
        self._cursors: dict[TaskHandle, str] = {}
        """The last entry of each task's stream that was read."""
        self._looking: asyncio.Task[None] | None = None
        self._unattended: set[EventBus] = set()
        """The partitions in which no agent-handler ran at the last check."""

    async def follow(self, task: TaskHandle) -> None:
        """Check a task that has run for a while, until this is cancelled."""
        await asyncio.sleep(HINT_SECONDS)
        self._cursors[task] = "0-0"
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look for questions")
        try:
            await asyncio.Event().wait()
        finally:
            del self._cursors[task]
            if not self._cursors:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        while True:
            by_bus: dict[EventBus, list[TaskHandle]] = {}
            for task in self._cursors:
                by_bus.setdefault(task.bus, []).append(task)
            for bus, tasks in by_bus.items():
                try:
                    await self._read(bus, tasks)
                    await self._look_for_handlers(bus, tasks)
                except WeftError as error:
                    log.debug("cannot look for questions: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    async def _read(self, bus: EventBus, tasks: Sequence[TaskHandle]) -> None:
        """Read the new events of these tasks, which are all in one partition."""
        by_stream = {bus.keys.out(task.task_id).encode(): task for task in tasks}
        cursors = [self._cursors[task] for task in tasks]
        reply = await bus.transport.call("XREAD", "COUNT", LOOK_ENTRIES, "STREAMS", *by_stream, *cursors)
        for stream, entries in cast(list[tuple[bytes, list[tuple[bytes, list[bytes]]]]], reply or []):
            task = by_stream[stream]
            for entry, fields in entries:
                if task in self._cursors:
                    self._cursors[task] = entry.decode()
                if HUMAN_REQUESTED.encode() in fields:
                    log.warning('%s, or set conf run_mode="interactive"', hint_of(stream_event(entry, fields)))

    async def _look_for_handlers(self, bus: EventBus, tasks: Sequence[TaskHandle]) -> None:
        alive = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.alive, 0, -1))
        if any(owner.startswith(_HANDLERS) for owner in alive):
            self._unattended.discard(bus)
        elif bus not in self._unattended and self._cursors.keys() & set(tasks):
            self._unattended.add(bus)
            log.warning(
                "task %s waits: no agent-handler runs in namespace %r; start one, as `weft up` does",
                tasks[0].task_id,
                bus.keys.namespace,
            )


def hint_of(event: StreamEvent) -> str:
    """Return what to do about a question."""
    task = event.data["task_id"]
    return (
        f"task {task} waits for a human: {event.data['prompt']!r}: call Runners.answer({task!r}, "
        f"{event.request_id!r}, value), or answer the event of streaming_run"
    )


async def ask(event: StreamEvent) -> None:
    """Ask a question on standard input, until the broker takes the answer."""
    verdict = event.data.get("expects") == "verdict"
    prompt = _prompt(event, verdict)
    while True:
        line = await _line(prompt)
        if line is None:
            log.warning("standard input has ended: %s", hint_of(event))
            return
        try:
            await event.answer(_value(line.strip(), event, verdict))
        except InvalidInput as error:
            if error.field.partition(".")[0] != "value":
                return  # answered elsewhere, or over
            prompt = f"{error}\n> "
        else:
            return


def _prompt(event: StreamEvent, verdict: bool) -> str:
    data = event.data
    shown = f"\n[task {data['task_id']}] {data['prompt']}"
    if data.get("data") is not None:
        shown += f"\n  {codec.quoted(data['data'], 2000)}"
    about = ["yes or no"] if verdict else []
    if "default" in data:
        about.append(f"default: {codec.quoted(data['default'])}")
    if data.get("deadline"):
        about.append(f"until {data['deadline']}")
    hints = f"({', '.join(about)}) " if about else ""
    return f"{shown}\n{hints}> "


def _value(line: str, event: StreamEvent, verdict: bool) -> object:
    if not line and "default" in event.data:
        return event.data["default"]
    if verdict and line.lower() in _YES | _NO:
        return line.lower() in _YES
    return codec.typed(line, words=True)


async def _line(prompt: str) -> str | None:
    """Show a prompt and return the next line of standard input; None at its end. The loop continues meanwhile."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    found: asyncio.Future[str | None] = loop.create_future()

    def tell(line: str | None) -> None:
        if not found.done():
            found.set_result(line)

    def read() -> None:
        line = _read(prompt, over)
        if not over.is_set():
            loop.call_soon_threadsafe(tell, line)

    # A daemon: a program may end while nobody types.
    threading.Thread(target=read, name="read an answer", daemon=True).start()
    try:
        return await found
    finally:
        over.set()


def _read(prompt: str, over: threading.Event) -> str | None:
    while not _TERMINAL.acquire(timeout=_LOOK_SECONDS):
        if over.is_set():
            return None
    try:
        if over.is_set():
            return None
        sys.stdout.write(prompt)
        sys.stdout.flush()
        return _read_line(sys.stdin, over)
    finally:
        _TERMINAL.release()


def _read_line(stdin: TextIO, over: threading.Event) -> str | None:
    """Return a line without its end; None at the end of the input, or once nobody wants it."""
    try:
        number = stdin.fileno()
        select.select([number], [], [], 0)
    except (OSError, ValueError, AttributeError):  # not a file that can be waited for
        line = stdin.readline()
        return line.rstrip("\n") if line else None
    data = b""
    # Byte by byte: what follows the line belongs to the next reader.
    while not over.is_set():
        # Check again: a line typed after the question was withdrawn belongs to the next one.
        if not select.select([number], [], [], _LOOK_SECONDS)[0] or over.is_set():
            continue
        byte = os.read(number, 1)
        if not byte:
            return data.decode(errors="replace") if data else None
        if byte == b"\n":
            return data.decode(errors="replace")
        data += byte
    return None
