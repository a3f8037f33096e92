"""The embedded server: real Valkey processes, kills and all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from runtime_core.bus.embedded import EmbeddedServer, find_endpoint
from runtime_core.errors import ConfigurationError

OWNER = """
import asyncio, sys
from pathlib import Path
from runtime_core.bus.embedded import EmbeddedServer

async def main():
    server = EmbeddedServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(data_dir)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def ask(port: int, command: str) -> str:
    """The first line of the answer to an inline command."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(command.encode() + b"\r\n")
        return connection.makefile("rb").readline().decode().strip()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_at, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        # A killed process that nobody waited for is gone for all that matters here.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    if sys.platform.startswith("linux"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def owner_process(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that owns a server on this folder, and the process id of that server."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(data_dir)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield process, int(line)
        finally:
            process.kill()


async def test_state_and_port_are_the_same_after_a_stop(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        first_port = server.port
        assert ask(server.port, "SET answer 42") == "+OK"
    async with running(tmp_path) as server:
        assert server.port == first_port
        assert ask(server.port, "GET answer") == "$2"


async def test_the_embedded_server_is_configured_for_durability(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(b"CONFIG GET appendonly appendfsync save maxmemory-policy bind\r\nQUIT\r\n")
            words = connection.makefile("rb").read().decode().split("\r\n")
    told = dict(zip(words[2::4], words[4::4], strict=False))
    assert told == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
    }


async def test_a_folder_with_spaces_and_quotes_works(tmp_path: Path) -> None:
    folder = tmp_path / 'my dåta\'s "folder"'
    async with running(folder) as server:
        assert find_endpoint(folder) == server.url


async def test_another_process_finds_the_endpoint_only_while_it_is_alive(tmp_path: Path) -> None:
    assert find_endpoint(tmp_path) is None
    async with running(tmp_path) as server:
        assert find_endpoint(tmp_path) == server.url
        stale = (tmp_path / "endpoint").read_text()
    assert find_endpoint(tmp_path) is None
    (tmp_path / "endpoint").write_text(stale)  # as a killed owner leaves it
    assert find_endpoint(tmp_path) is None


async def test_a_stale_endpoint_does_not_lead_to_the_server_of_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with running(tmp_path / "mine") as server:
        (other / "endpoint").write_text(server.url)
        assert find_endpoint(other) is None


async def test_a_taken_port_is_replaced_by_another(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        first_port = server.port
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", first_port))
        squatter.listen()
        async with running(tmp_path) as server:
            assert server.port != first_port
            assert ask(server.port, "PING") == "+PONG"


async def test_the_second_owner_gets_an_error_with_the_holder_of_the_folder(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        second = EmbeddedServer(tmp_path)
        with pytest.raises(ConfigurationError, match=rf"in use by process {os.getpid()}; .*WEFT_DATA_DIR") as caught:
            await second.start()
        assert "\n" not in str(caught.value)
        await second.stop()
        assert find_endpoint(tmp_path) == server.url, "the second one took something away from the first"


async def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="WEFT_DATA_DIR"):
        await EmbeddedServer(tmp_path / "file").start()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ties a child to its parent")
async def test_a_killed_owner_leaves_no_server_behind(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, server_pid):
        assert is_alive(server_pid)
        owner.send_signal(signal.SIGKILL)
        await until(lambda: not is_alive(server_pid))


async def test_state_survives_a_kill_of_owner_and_server(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, server_pid):
        url = find_endpoint(tmp_path)
        assert url is not None
        port = int(url.rpartition(":")[2])
        assert ask(port, "SET answer 42") == "+OK"
        os.kill(server_pid, signal.SIGKILL)
        owner.send_signal(signal.SIGKILL)
    await until(lambda: not is_alive(server_pid))  # its port is free only then
    async with running(tmp_path) as server:
        assert server.port == port
        assert ask(server.port, "GET answer") == "$2"


async def test_a_server_that_outlived_its_owner_is_stopped_before_a_new_one_starts(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, orphan_pid):
        url = find_endpoint(tmp_path)
        assert url is not None
        port = int(url.rpartition(":")[2])
        # Stopped, it cannot act on the signal that its owner's death sends: an orphan, as on other systems.
        os.kill(orphan_pid, signal.SIGSTOP)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        server = EmbeddedServer(tmp_path)
        starting = asyncio.create_task(server.start())
        try:
            await asyncio.wait([starting], timeout=0.3)
            assert not starting.done(), "two servers on one append-only file"
        finally:
            os.kill(orphan_pid, signal.SIGCONT)
        await starting
        assert server.port == port
        assert not is_alive(orphan_pid)
        assert ask(server.port, "PING") == "+PONG"
        await server.stop()


async def test_a_server_that_dies_is_started_again_on_its_port(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        keeper = asyncio.create_task(server.keep())
        first_pid, port = server.pid, server.port
        assert first_pid is not None
        assert ask(port, "SET answer 42") == "+OK"
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: server.pid != first_pid and find_endpoint(tmp_path) is not None)
        assert server.port == port
        await until(lambda: ask(port, "GET answer") == "$2")
        keeper.cancel()
        await asyncio.wait([keeper])
