"""The far end of a worker: a process that is sent calls, one at a time, and sends back what they gave.

It is started with a fresh interpreter, so that nothing of the parent's threads, locks and connections is in it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import threading
import traceback
from multiprocessing.connection import Connection

READY = b"r"
"""The process can take calls."""
BEGUN = b"b"
"""The call has arrived: from here on it may have had effects."""
DONE = b"k"
"""Before the pickled result."""
FAILED = b"e"
"""Before the pickled (type, message, traceback, error pickled by itself or None)."""


def serve(calls: Connection, lifeline: Connection) -> None:
    """Take calls until the parent hangs up. When the parent dies in the middle of one, so does this process."""
    # Ctrl-C goes to the whole group; the parent decides what becomes of its calls.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    try:
        calls.send_bytes(READY)
        while True:
            payload = calls.recv_bytes()
            calls.send_bytes(BEGUN)
            calls.send_bytes(_answer(payload))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _answer(payload: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(payload)  # noqa: S301  # our parent has made it
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except BaseException as error:  # SystemExit too: it ends the call and not the worker
        return _failed(error)
    try:
        return DONE + pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the result's own methods raise
        message = f"the result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return FAILED + pickle.dumps(("PicklingError", message, "", None))


def _failed(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        itself: bytes | None = pickle.dumps(error)
    except Exception:  # an error may hold anything
        itself = None
    try:
        message = str(error)
    except Exception:  # its own __str__ may fail too
        message = "its message cannot be shown"
    return FAILED + pickle.dumps((type(error).__name__, message, text, itself))
