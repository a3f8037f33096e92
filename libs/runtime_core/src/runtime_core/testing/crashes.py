"""Kills an app's services at each of their commits. A thread of this process replaces their process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.library import library
from runtime_core.bus.namespace import connect
from runtime_core.bus.private_server import drop_database, new_database
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.declare.tool import AbandonedThreads, Tool, ToolContext
from runtime_core.errors import WeftError
from runtime_core.host.host import Host
from runtime_core.host.local import NAMESPACE, add_services
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.events import TaskResponse
from runtime_core.wire.step import ENDED, Status

COMMITS = {
    "commit_turn": "the commit of a turn",
    "commit_call": "the result of a call",
    "record": "the result of a step",
    "settle_call": "the answer of a model",
}
"""The functions of the bus that make progress permanent."""
LEASE_SECONDS = 0.5
"""How long the others wait for a killed process."""
CANCEL_ROUNDS = 1000
POLL_SECONDS = 0.05
TASK = "t-kill"

When = Literal["before", "after"]
Answer = Callable[[str], object]
"""Returns the answer to a question, given its prompt."""


class HiddenFrames:
    """Hides a module's frames from pytest's report of a failure that its message explains.

    pytest reads it as `__tracebackhide__` of the module.
    """

    def __call__(self, failure: Any) -> bool:  # Any: pytest's ExceptionInfo
        return isinstance(failure.value, AssertionError | TimeoutError | WeftError)


class StandIn(Tool):
    """A tool with the name, arguments and limits of another one. Subclasses define `call`."""

    def __init__(self, real: Tool) -> None:
        self.__dict__.update(real.__dict__)
        self.real = real


__tracebackhide__ = HiddenFrames()


@dataclass(frozen=True)
class Kill:
    """Where a process was killed."""

    number: int
    """The number of its commit, from 1."""
    when: When
    """`before`: the work was done but not recorded. `after`: it was recorded, but the process did not learn it."""
    commit: str
    """What it was about to commit."""

    def __str__(self) -> str:
        return f"killed {self.when} commit {self.number} ({self.commit})"


@dataclass
class ExecutionEffects:
    """The effects of one execution of a task."""

    status: str = ""
    output: Any = None  # Any: JSON
    error: dict[str, str] | None = None
    emitted: list[Any] = field(default_factory=list)  # Any: JSON
    """The output that a client sees, each piece once."""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """The calls that reached tools: name, arguments as JSON, idempotency key. A repeated one is in it several times."""
    commits: list[str] = field(default_factory=list)
    kill: Kill | None = None

    @property
    def repeated(self) -> list[tuple[str, str]]:
        """The calls that reached their tool again after the kill: name and arguments."""
        return sorted({call[:2] for call in self.calls if self.calls.count(call) > 1})


@dataclass(frozen=True)
class KillReport:
    """What `kill_and_recover` has seen."""

    whole: ExecutionEffects
    """The execution without a kill."""
    killed: list[ExecutionEffects]
    """One execution for each kill."""

    @property
    def repeated(self) -> dict[str, list[tuple[str, str]]]:
        """For each kill after which a tool was called again: those calls, by name and arguments.

        Such a call has the idempotency key of the first one: check that the tool uses it.
        """
        return {str(each.kill): each.repeated for each in self.killed if each.repeated}


class _Spy(StandIn):
    """A tool that notes its calls."""

    def __init__(self, real: Tool, calls: list[tuple[str, str, str]]) -> None:
        super().__init__(real)
        self._calls = calls

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        self._calls.append((self.name, arguments.decode(), context.idempotency_key))
        return await self.real.call(arguments, context, threads, abandoned)


@contextmanager
def _spied(app: App) -> Iterator[list[tuple[str, str, str]]]:
    calls: list[tuple[str, str, str]] = []
    spies = [_Spy(tool, calls) for tool in app.tools.values()]
    for spy in spies:
        app.functions.tools.replace(spy.real, spy)
    try:
        yield calls
    finally:
        for spy in spies:
            app.functions.tools.replace(spy, spy.real)


class _Wire:
    """The connections of a process, which all go silent at a kill."""

    def __init__(self, kill_at: tuple[int, When] | None, killed: Callable[[Kill], None]) -> None:
        names = library().functions
        self._commits = {names[name]: text for name, text in COMMITS.items()}
        self._kill_at = kill_at
        self._killed = killed
        self.commits: list[str] = []
        self.silent = False

    async def connect(self, url: str) -> Transport:
        return _Mortal(await connect(url), self)

    def call(self, send: Callable[..., Awaitable[Reply]], args: tuple[Argument, ...]) -> Awaitable[Reply]:
        if self.silent:
            return asyncio.get_running_loop().create_future()
        commit = self._commits.get(args[1]) if args[0] == b"FCALL" and isinstance(args[1], bytes) else None
        if commit is None:
            return send(*args)
        self.commits.append(commit)
        if self._kill_at is None or len(self.commits) != self._kill_at[0]:
            return send(*args)
        self.silent = True
        return asyncio.ensure_future(self._kill(send, args, Kill(len(self.commits), self._kill_at[1], commit)))

    async def _kill(self, send: Callable[..., Awaitable[Reply]], args: tuple[Argument, ...], kill: Kill) -> Reply:
        if kill.when == "after":
            await send(*args)
        self._killed(kill)
        never: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        return await never


class _Mortal:
    """A transport of a process that may be killed."""

    def __init__(self, real: Transport, wire: _Wire) -> None:
        self._real = real
        self._wire = wire

    def call(self, *args: Argument) -> Awaitable[Reply]:
        return self._wire.call(self._real.call, args)

    async def blocking(self, *args: Argument) -> Reply:
        reply = await self._real.blocking(*args)
        return await asyncio.get_running_loop().create_future() if self._wire.silent else reply

    @property
    def reconnects(self) -> int:
        return self._real.reconnects

    async def close(self) -> None:
        await self._real.close()


class Services:
    """The services of an app in a thread, which is stopped, or killed at one of its commits."""

    def __init__(self, app: App, url: str, kill_at: tuple[int, When] | None = None) -> None:
        self._app = app
        self._url = url
        self.wire = _Wire(kill_at, self._end)
        self.kill: Kill | None = None
        self.ready: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._transports: list[Transport] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="services under test", daemon=True)

    async def start(self) -> None:
        """Raises the error of a service that cannot start."""
        self._thread.start()
        await asyncio.wrap_future(self.ready)

    async def stop(self) -> None:
        """Stop the services, unless they were killed, and wait for their end."""
        if self._loop is not None and not self.ended.done():
            with suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.wrap_future(self.ended)
        self._thread.join()

    def _end(self, kill: Kill) -> None:
        self.kill = kill
        self._stop.set()

    def _run(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # a killed process reports nothing
        try:
            loop.run_until_complete(self._main())
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            self.ended.set_result(None)

    async def _main(self) -> None:
        host = Host(self._connect, Metrics(CollectorRegistry(), "killed"), lease_seconds=LEASE_SECONDS)
        try:
            await add_services(host, self._app)
            await host.start()
            self.ready.set_result(None)
            await self._stop.wait()
        finally:
            if self.kill is None:
                await host.stop()
            else:
                await self._die()

    async def _connect(self) -> Transport:
        transport = await self.wire.connect(self._url)
        self._transports.append(transport)
        return transport

    async def _die(self) -> None:
        """End all that runs in this loop: nothing that it still does reaches the broker."""
        for _ in range(CANCEL_ROUNDS):
            running = asyncio.all_tasks() - {asyncio.current_task()}
            if not running:
                break
            for task in running:
                task.cancel()
            await asyncio.sleep(0)
        for transport in self._transports:
            await transport.close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round


async def run_and_kill(
    app: App,
    agent: str,
    input: object,
    *,
    key: str,
    kill_at: tuple[int, When] | None,
    timeout: float,
    answer: Answer | None,
) -> ExecutionEffects:
    """Run a task on services that are killed at a commit, and then on new ones. Return its effects.

    Raises TimeoutError if it has not ended after `timeout` seconds.
    """
    url = new_database()
    first, second = Services(app, url, kill_at), Services(app, url)
    with _spied(app) as calls:
        async with Client.connect(url, namespace=NAMESPACE, partitions=1) as client:
            try:
                await first.start()
                task = await client.submit(agent, input, key=key, task_id=TASK)
                if kill_at is not None:
                    async with asyncio.timeout(timeout):
                        while not first.ended.done():
                            await _continue(client, task, answer)
                            await asyncio.sleep(POLL_SECONDS)
                    await second.start()
                response = await _end_of(client, task, timeout, answer)
                emitted = [] if response.error else [piece async for piece in _emitted(task)]
            finally:
                for services in (first, second):
                    if services.ready.done():
                        await services.stop()
                transport = await connect(url)
                await drop_database(url, transport)
                await transport.close()
    return ExecutionEffects(
        status=response.status,
        output=response.output,
        error=response.error,
        emitted=emitted,
        calls=calls,
        commits=first.wire.commits,
        kill=first.kill,
    )


async def _emitted(task: TaskHandle) -> AsyncIterator[object]:
    async for event in task.stream():
        if event.type == "weft.output.delta":
            yield event.text


async def _end_of(client: Client, task: TaskHandle, timeout: float, answer: Answer | None) -> TaskResponse:
    """Return the response of a task, even of one that is parked as a dead letter."""
    ended = asyncio.ensure_future(task.result(timeout))
    try:
        while not (await asyncio.wait((ended,), timeout=POLL_SECONDS))[0]:
            for letter in await DeadLetters(client.buses).newest(1):
                if (await task.show())["status"] not in ENDED:
                    error = {"type": letter.reason, "message": str(letter.error.get("message", ""))}
                    return TaskResponse(task.task_id, Status.FAILED, error=error)
            await _continue(client, task, answer)
        return await ended
    finally:
        ended.cancel()
        await asyncio.wait((ended,))


async def _continue(client: Client, task: TaskHandle, answer: Answer | None) -> None:
    """Answer the questions of a task that waits, or move the time to its next timer.

    Raises AssertionError if the task waits for something that the test does not give.
    """
    bus = client.buses[0]
    # Work of a killed process is open until others have reclaimed it.
    idle = await bus.idle()
    if idle[0]:
        return
    shown = await task.show()
    if shown["status"] in ENDED or await bus.idle() != idle:
        return
    if questions := shown.get("questions"):
        if answer is None:
            raise AssertionError(
                f"agent {shown['agent']!r} asks {questions[0]['prompt']!r} and waits for a person: give "
                "kill_and_recover the answer, as in answer=lambda prompt: True"
            )
        for question in questions:
            await task.signal(question["request_id"], answer(question["prompt"]))
    elif timers := await bus.timers():
        await bus.shift_clock(max(0, timers[0][1] - await bus.clock_ms()))
        await bus.promote()
    elif await bus.idle() == idle:  # otherwise its last timer has just fired
        if await DeadLetters(client.buses).newest(1):
            return  # a parked task is reported with its dead letter
        raise AssertionError(
            f"agent {shown['agent']!r} waits for a message that nobody sends: test it with `submit` and `task.send`"
        )


def compare(whole: ExecutionEffects, killed: ExecutionEffects) -> list[str]:
    """Return in words how the effects of a killed execution differ."""
    found = []
    for name in ("status", "output", "error", "emitted"):
        before, after = getattr(whole, name), getattr(killed, name)
        if before != after:
            found.append(f"{name} is {after!r} instead of {before!r}")
    more, fewer = set(killed.calls) - set(whole.calls), set(whole.calls) - set(killed.calls)
    found += [f"tool {name!r} was called with {given}, but not without the kill" for name, given, _ in sorted(more)]
    found += [f"tool {name!r} was not called with {given}" for name, given, _ in sorted(fewer)]
    return found
