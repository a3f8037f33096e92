"""Bodies that block, each in a thread of its own: Spark's client knows no other way, and keeps tags by thread."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

STOP_SECONDS = 2.0
"""How long what is stopped may take to end."""
REPEAT_SECONDS = 0.1
"""Between two interrupts: one that comes before the server knows of the operation finds nothing."""
CODE_SECONDS = 0.5
"""When a body is stopped in its own code, where no end of its operations has ended it."""
Result = TypeVar("Result")


class Stopped(BaseException):
    """Raised inside a job's own code, which nothing else stops. Not an Exception, so that few handlers keep it."""


class InThread(Generic[Result]):
    """Runs a body at once. A daemon: one that never ends does not keep the process."""

    def __init__(self, body: Callable[[], Result], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Result] = self._loop.create_future()
        """What the body returns or raises."""
        self._body = body
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, without ending it when this is cancelled; whether it has ended."""
        await asyncio.wait((self.done,), timeout=seconds)
        return self.done.done()

    def stop_code(self) -> None:
        """Raise Stopped in it as soon as it comes back to Python code."""
        thread = self._thread.ident
        if thread is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))

    def _run(self) -> None:
        try:
            settle = functools.partial(self._succeed, self._body())
        except BaseException as error:  # SystemExit too: it ends the body and not the process
            settle = functools.partial(self._fail, error)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(settle)

    def _succeed(self, result: Result) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def _fail(self, failure: BaseException) -> None:
        if not self.done.done():
            # A future takes no StopIteration.
            self.done.set_exception(RuntimeError(repr(failure)) if isinstance(failure, StopIteration) else failure)
            self.done.exception()  # whoever does not want it any more need not be warned


async def in_thread(body: Callable[[], Result], name: str = "weft spark") -> Result:
    """What a body gives; cancelled, it lets go of the thread."""
    thread = InThread(body, name)
    await thread.wait()
    return thread.done.result()


async def stop(thread: InThread[Result], interrupt: Callable[[], object], *, code: bool = False) -> bool:
    """Stop a body by ending its operations, again and again until it ends; whether it did in time.

    With `code` its own code is stopped, too, after a while.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asking: InThread[object] | None = None
    while not thread.done.done() and loop.time() < begun + STOP_SECONDS:
        if asking is None or asking.done.done():
            asking = InThread(interrupt, "spark interrupt")
        if await thread.wait(REPEAT_SECONDS):
            break
        if code and loop.time() >= begun + CODE_SECONDS:
            code = False
            thread.stop_code()
    return thread.done.done()
