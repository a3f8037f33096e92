"""The Spark backend of a driver process: one Connect server, at WEFT_SPARK_REMOTE or started here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from runtime_core.engines.protocol import Away, Error, Mapped, Outcome, Report, Work
from runtime_core.engines.results import Results
from runtime_core.engines.spark.calls import SessionCalls, in_thread, lost, run_map
from runtime_core.engines.spark.connect import ConnectServer, Sessions, address_of, answers, is_lost
from runtime_core.engines.spark.jobs import Jobs
from runtime_core.telemetry.redaction import kept

CONNECT_SECONDS = 60.0
"""The limit for the first answer of a server that listens, in seconds; generous for busy machines."""
CHECK_SECONDS = 1.0
"""The interval between checks that the server listens, in seconds."""
MAX_FAILED_CHECKS = 3
"""The number of consecutive failed checks after which the server counts as gone."""
LOSS_SECONDS = 10.0
"""The time that `lost` may take to notice a loss that a call has noticed, in seconds."""
SILENT_SECONDS = 60.0
"""The limit for a small answer of a server that listens, in seconds."""
IN_FLIGHT = 8
"""The number of concurrent calls of a map if the server does not report how many tasks it runs in parallel."""


class SparkBackend:
    """Plain functions run on the executors, jobs in the driver process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raise ImportError if PySpark is not installed, ConfigurationError for an invalid variable."""
        self._environ = dict(environ)
        self._remote = (environ.get("WEFT_SPARK_REMOTE") or "").strip()
        self._results = Results.from_environment(environ)
        self._server: ConnectServer | None = None
        self._sessions: Sessions | None = None
        self._calls: SessionCalls | None = None
        self._jobs: Jobs | None = None
        self._cpus = IN_FLIGHT

    @property
    def abandoned(self) -> int:
        """Return the number of running threads whose jobs did not end when they were stopped."""
        return 0 if self._jobs is None else self._jobs.abandoned

    async def connect(self) -> Mapping[str, str]:
        """Reach the server, or start one. Raises Away and ImportError."""
        remote = self._remote or await self._started()
        host, port = address_of(remote)
        if not await answers(host, port):
            raise Away(
                f"no Spark Connect server listens at {host}:{port} (WEFT_SPARK_REMOTE={remote!r}): start it, or unset "
                "the variable for a local one"
            )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                sessions = await in_thread(lambda: Sessions(remote))
                details = await in_thread(sessions.details)
        except TimeoutError:
            raise Away(f"the server at {host}:{port} does not answer as a Spark Connect server") from None
        except ImportError:
            raise
        except Exception as error:
            raise Away(f"the Spark Connect server at {host}:{port} cannot be used: {_one_line(error)}") from error
        self._sessions = sessions
        files = self._server.files if self._server is not None else None
        self._calls = SessionCalls(sessions, self._results, files)
        self._jobs = Jobs(sessions, self._results)
        self._cpus = int(details["cpus"] or IN_FLIGHT)
        return {**details, "cpus": str(self._cpus), "address": f"{host}:{port}"}

    async def lost(self) -> str:
        """Wait until the server does not listen, does not answer, or has forgotten the session."""
        watchers = [asyncio.ensure_future(self._watch_port()), asyncio.ensure_future(self._watch_session())]
        if self._server is not None:
            watchers.append(asyncio.ensure_future(self._server.ended()))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def run(self, work: Work, report: Report) -> Outcome:
        """Run one call. It never attaches to an earlier one: operations belong to the client that started them."""
        assert self._calls is not None
        assert self._jobs is not None
        if work.batch:
            return Error("invalid", "InvalidInput", f"{work.name} is a batch job, which only Ray runs", retryable=False)
        if work.driver_side:
            outcome = await self._jobs.run(work, report)
        elif isinstance(work.call, Mapped):
            outcome = await run_map(self._calls, work, report, self._cpus)
        else:
            answer = await self._calls.run(work.call, work.step, work.name, work.key, work.timeout_seconds)
            [outcome] = answer.ends
        if isinstance(outcome, Error):
            outcome = await self._checked_loss(outcome)
        return outcome

    async def forget(self, key: str) -> None:
        """Do nothing: this backend stores nothing for a key."""

    async def close(self) -> None:
        """Disconnect from the server; stop it if it was started here."""
        sessions, self._sessions = self._sessions, None
        server, self._server = self._server, None
        if server is not None:
            # Its sessions end with it.
            await server.stop()
        elif sessions is not None:
            await in_thread(sessions.close)

    async def _started(self) -> str:
        if self._server is None:
            server = ConnectServer(self._environ)
            await server.start()
            self._server = server
        return self._server.url

    async def _checked_loss(self, error: Error) -> Error:
        """Return the error, or that the server is lost if a call failed while the server does not listen."""
        if error.cause == "lost":
            await self._wait_for_loss()
            return error
        host, port = self._address
        if error.cause in ("function", "worker") and not await answers(host, port):
            await self._wait_for_loss()
            return lost(
                ConnectionError(f"no server listens at {host}:{port} any more; the call ended with {error.type}")
            )
        return error

    async def _wait_for_loss(self) -> None:
        """Return at once if the server still answers, so that only one session was lost; else leave time for `lost`.

        So a retry of the call reaches another driver, not this one.
        """
        assert self._sessions is not None
        with suppress(Exception):
            async with asyncio.timeout(LOSS_SECONDS):
                await in_thread(self._sessions.ask)
                return
        await asyncio.sleep(LOSS_SECONDS)

    @property
    def _address(self) -> tuple[str, int]:
        return address_of(self._remote or (self._server.url if self._server is not None else "sc://127.0.0.1"))

    async def _watch_port(self) -> str:
        host, port = self._address
        failed = 0
        while failed < MAX_FAILED_CHECKS:
            await asyncio.sleep(CHECK_SECONDS)
            failed = 0 if await answers(host, port) else failed + 1
        return f"no server listens at {host}:{port} any more"

    async def _watch_session(self) -> str:
        assert self._sessions is not None
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await in_thread(self._sessions.ask)
            except TimeoutError:
                return f"the Spark Connect server has not answered for {SILENT_SECONDS:g} s"
            except Exception as error:
                if is_lost(error):
                    return _one_line(error)


def _one_line(error: BaseException) -> str:
    text = str(error).partition("\n\nJVM stacktrace:")[0]
    return kept(" ".join(text.split()), 300) or type(error).__name__
