"""A backend that does what the name of a call says, in the driver itself: no app, no functions."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from runtime_core.engines.protocol import Error, Outcome, Pickled, Registered, Report, Value, Work
from tests.engine_backends.files import FOLDER, Files


class Scripted:
    """See `run`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._files = Files(Path(environ[FOLDER]))
        print("a library prints this", file=sys.stderr, flush=True)

    async def connect(self) -> Mapping[str, str]:
        return await self._files.connect()

    async def lost(self) -> str:
        return await self._files.lost()

    async def run(self, work: Work, report: Report) -> Outcome:
        self._files.note("began", work.name, work.key)
        match work.name:
            case "echo":
                assert isinstance(work.call, Registered)
                return Value(work.call.arguments)
            case "size":
                assert isinstance(work.call, Pickled)
                return Value(b"x" * len(work.call.payload))
            case "progress":
                for number in range(3):
                    report(b'{"done":%d}' % number)
                return Value(b"null")
            case "wrong":
                return Error("invalid", "InvalidInput", "arguments.top: is no number", retryable=False)
            case "defect":
                raise LookupError("nobody expected this")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)  # the loop with it
            case "stubborn":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        self._files.note("ignored", work.key)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self._files.note("stopped", work.key)
            raise
        raise AssertionError("an hour has passed")

    async def forget(self, key: str) -> None:
        self._files.note("forgot", key)

    async def close(self) -> None:
        self._files.note("closed")


class Missing:
    """Needs a package that nobody has installed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        import no_such_engine  # type: ignore[import-not-found]  # noqa: F401
