"""An event loop inside the process's own loop: code with its own tasks runs on it until all of it waits.

Many runs share the process's loop, which cannot tell whether the tasks of one run have more to do. This loop can: when
no callback is ready and no thread is at work, the code waits for its host.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import TYPE_CHECKING, Any, NoReturn

from runtime_core.errors import WeftError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CALLBACKS_PER_SLICE = 500
"""How many callbacks run before other runs of the process get their turn."""


class GuestLoop(asyncio.AbstractEventLoop):
    """Callbacks, tasks, futures and threads, with a clock that the host moves. It has no sockets and no processes.

    `notify` is called when a thread or another loop has made something ready.
    """

    def __init__(self, outer: asyncio.AbstractEventLoop, now_ms: int, notify: Callable[[], None]) -> None:
        self._outer = outer
        self._notify = notify
        self._noticed: asyncio.Future[None] | None = None
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._seconds = now_ms / 1000
        self._closed = False
        self._running = False
        self.threads = 0
        """The number of functions that run in threads."""
        self.tasks: set[asyncio.Task[Any]] = set()  # Any: tasks of all result types
        """The tasks that have not ended."""

    # ---- the host's side -----------------------------------------------------------------------------------

    @property
    def runnable(self) -> bool:
        """Whether callbacks are ready."""
        return bool(self._ready)

    async def run_ready(self) -> None:
        """Run callbacks until none is ready."""
        while self._ready:
            done: asyncio.Future[None] = self._outer.create_future()
            # In a callback, since no task may run inside a task of another loop.
            self._outer.call_soon(self._run_slice, done)
            await done

    async def next_notice(self, seconds: float) -> None:
        """Wait until a thread or another loop makes something ready, for at most this long."""
        self._noticed = self._outer.create_future()
        await asyncio.wait([self._noticed], timeout=seconds)

    def _notice(self) -> None:
        if self._noticed is not None and not self._noticed.done():
            self._noticed.set_result(None)
        self._notify()

    def _run_slice(self, done: asyncio.Future[None]) -> None:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            for _ in range(CALLBACKS_PER_SLICE):
                if not self._ready:
                    break
                handle = self._ready.popleft()
                if not handle.cancelled():
                    # The task that raised it keeps it. Raised here, it would end the process.
                    with contextlib.suppress(SystemExit):
                        handle._run()
        finally:
            self._running = False
            asyncio._set_running_loop(self._outer)
            sys.set_asyncgen_hooks(*hooks)
            if not done.done():
                done.set_result(None)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:  # Any: generators of all types
        if not self._closed:
            self.call_soon_threadsafe(self._aclose, generator)

    def _aclose(self, generator: AsyncGenerator[Any, Any]) -> None:  # Any: as above
        self.create_task(generator.aclose())

    def next_timer(self) -> asyncio.TimerHandle | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][2] if self._timers else None

    def move_to(self, seconds: float) -> None:
        """Move the clock forward and make due timers ready."""
        self._seconds = max(self._seconds, seconds)
        while (timer := self.next_timer()) is not None and timer.when() <= self._seconds:
            heapq.heappop(self._timers)
            self._ready.append(timer)

    # ---- asyncio's side ------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._seconds

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]  # Any: as asyncio's
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]  # typeshed's form takes a TypeVarTuple
        self,
        callback: Callable[..., object],
        *args: Any,  # Any: as asyncio's
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._outer.call_soon_threadsafe(self._from_outside, handle)
        return handle

    def _from_outside(self, handle: asyncio.Handle) -> None:
        if not self._closed:
            self._ready.append(handle)
            self._notice()

    def call_later(  # type: ignore[override]  # as call_soon_threadsafe
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,  # Any: as asyncio's
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._seconds + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as call_soon_threadsafe
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,  # Any: as asyncio's
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when <= self._seconds:
            self._ready.append(timer)
        else:
            self._timers_made += 1
            heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers leave the heap when they come to its top."""

    def create_future(self) -> asyncio.Future[Any]:  # Any: futures of all types
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # later Pythons add arguments
        self,
        coro: Coroutine[Any, Any, Any],  # Any: as asyncio's
        *,
        name: str | None = None,
        context: Context | None = None,
        **more: Any,  # Any: what later Pythons add
    ) -> asyncio.Task[Any]:  # Any: as asyncio's
        self._check_open()
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # Any: as asyncio's
        self._check_open()
        work = self._outer.run_in_executor(executor, func, *args)
        result: asyncio.Future[Any] = self.create_future()  # Any: as asyncio's
        self.threads += 1
        work.add_done_callback(lambda done: self._thread_ended(done, result))
        result.add_done_callback(lambda done: work.cancel() if done.cancelled() else None)
        return result

    def _thread_ended(self, work: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:  # Any: as asyncio's
        self.threads -= 1
        if self._closed:
            if not work.cancelled():
                work.exception()
            return
        if not result.done():
            if work.cancelled():
                result.cancel()
            elif (error := work.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(work.result())
        self._notice()

    def call_exception_handler(self, context: dict[str, Any]) -> None:  # Any: as asyncio's
        self._outer.call_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:  # Any: as asyncio's
        self._outer.default_exception_handler(context)

    def get_exception_handler(self) -> None:
        return None

    def get_task_factory(self) -> None:
        return None

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the loop and drop what is left."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the code's event loop is closed: its run is over")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: GuestLoop, *args: object, **kwargs: object) -> NoReturn:
        raise WeftError(
            f"{name} between the steps of a durable run: move code that connects, reads or writes into a tool or "
            "another step, so that a replay finds its result"
        )

    return refuse


for _name in (
    "getaddrinfo",
    "getnameinfo",
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "create_datagram_endpoint",
    "connect_accepted_socket",
    "start_tls",
    "sendfile",
    "connect_read_pipe",
    "connect_write_pipe",
    "subprocess_shell",
    "subprocess_exec",
    "add_reader",
    "add_writer",
    "add_signal_handler",
    "sock_recv",
    "sock_sendall",
    "sock_connect",
    "sock_accept",
    "run_forever",
    "run_until_complete",
):
    setattr(GuestLoop, _name, _refused(_name))
