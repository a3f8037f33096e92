"""The server behind `memory://`: one per process, shared by everything in it, and gone with it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime_core.bus import private_server
from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.namespace import connect
from runtime_core.bus.private_server import PrivateServer
from runtime_core.client.task import TaskHandle
from runtime_core.errors import BusLost, BusUnavailable, ConfigurationError
from runtime_core.host.local import LocalApp
from weft import AgentContext, App, Client
from weft.runtime import AgentId, MessageContext, RoutedAgent, Runtime, message_handler

SECONDS = 30.0

KEEPS_A_SERVER = """
import asyncio, os, sys
from runtime_core.bus import private_server
from runtime_core.bus.namespace import connect

async def ask(*words):
    transport = await connect("memory://")
    answer = await transport.call(*words)
    await transport.close()
    return answer

asyncio.run(ask("SET", "key", "parent"))
server = private_server._server
print(server.process.pid, server.path, flush=True)
"""

FORKS = """
if os.fork() == 0:
    assert asyncio.run(ask("GET", "key")) is None, "the child uses its parent's server"
    print(private_server._server.process.pid, private_server._server.path, flush=True)
    sys.exit()  # not os._exit: what runs at an exit must leave the parent's server alone
assert os.wait()[1] == 0
assert asyncio.run(ask("GET", "key")) == b"parent"
"""


async def ask(*words: Argument, url: str = "memory://") -> Reply:
    transport = await connect(url)
    answer = await transport.call(*words)
    await transport.close()
    return answer


def program(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def server_of(process: subprocess.Popen[str]) -> tuple[int, Path]:
    assert process.stdout is not None
    pid, _, path = process.stdout.readline().strip().partition(" ")
    return int(pid), Path(path)


def wait_until_gone(pid: int, path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while (alive := runs(pid)) or path.exists():
        if time.monotonic() > deadline:
            if alive:
                os.kill(pid, signal.SIGKILL)
            path.unlink(missing_ok=True)
            pytest.fail(f"the server {pid} still runs" if alive else f"its socket {path} is still there")
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def test_event_loops_one_after_another_use_one_server(namespace: str) -> None:
    asyncio.run(ask("SET", namespace, "1"))
    assert asyncio.run(ask("GET", namespace)) == b"1"


def test_an_event_loop_that_ends_leaves_no_connection_open() -> None:
    asyncio.run(connect("memory://"))  # nobody closes it
    gc.collect()  # warns of open sockets, and a warning fails the test


def test_an_event_loop_that_ends_waits_for_no_reply() -> None:
    async def clean_up() -> None:
        transport = await connect("memory://")
        begun.append(transport)
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(BusUnavailable, match="closed"):
                await transport.call("PING")
            begun.append("cleaned up")

    async def program() -> None:
        task = asyncio.create_task(clean_up())
        async with asyncio.timeout(SECONDS):
            while not begun:
                await asyncio.sleep(0)
        assert not task.done()

    begun: list[object] = []
    asyncio.run(program())  # cancels all tasks at its end, that of the connection too
    assert begun[1:] == ["cleaned up"]


def test_the_server_outlives_the_thread_that_asked_first(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_server, "_server", None)
    thread = threading.Thread(target=lambda: asyncio.run(ask("SET", namespace, "1")))
    thread.start()
    thread.join()
    server = private_server._server
    assert server is not None
    assert asyncio.run(ask("GET", namespace)) == b"1"
    server.end()


async def test_concurrent_first_uses_get_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_server, "_server", None)
    gives_up = asyncio.create_task(private_server.private_server())
    others = [asyncio.create_task(private_server.private_server()) for _ in range(3)]
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.wait(others)
    assert not any(each.cancelled() for each in others)
    assert len({each.result() for each in others}) == 1
    assert private_server._server is not None
    private_server._server.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_the_server_ends_with_a_killed_process() -> None:
    process = program(KEEPS_A_SERVER + "sys.stdin.read()")
    with process:
        pid, path = server_of(process)
        assert runs(pid)
        process.kill()
    wait_until_gone(pid, path)


def test_the_server_ends_with_its_process() -> None:
    with program(KEEPS_A_SERVER) as process:
        pid, path = server_of(process)
    assert process.returncode == 0
    assert not runs(pid)
    assert not path.exists()


def test_a_forked_child_has_its_own_server() -> None:
    with program(KEEPS_A_SERVER + FORKS) as process:
        parents, childs = server_of(process), server_of(process)
    assert process.returncode == 0
    assert parents[0] != childs[0]
    for pid, path in (parents, childs):
        wait_until_gone(pid, path)


async def test_other_users_of_the_machine_cannot_connect() -> None:
    await ask("PING")
    assert private_server._server is not None
    path = private_server._server.path
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


async def test_a_server_that_cannot_start_reports_why_and_is_retried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private_server, "_server", None)
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(private_server, "find_binary", lambda: broken)
        with pytest.raises(ConfigurationError, match=r"memory://: its server exited at start \(status 3\): no room"):
            await connect("memory://")
    assert await ask("PING") == b"PONG"
    assert private_server._server is not None
    private_server._server.end()


async def test_without_a_folder_for_its_socket_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_server, "_server", None)

    def no_folder() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        await connect("memory://")


def test_a_process_that_ends_at_once_leaves_no_server(tmp_path: Path) -> None:
    code = "from runtime_core.bus import private_server; private_server._started()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_exits_later_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = PrivateServer()
    server.ready.result(SECONDS)
    assert server.process is not None
    server.process.kill()
    server._thread.join(SECONDS)
    assert "the server behind memory:// exited (signal 9, SIGKILL)" in caplog.text
    server.end()


@dataclass
class Text:
    text: str


async def end_server() -> None:
    """Kill the server of this process, and wait until the process knows."""
    server = private_server._server
    assert server is not None
    assert server.process is not None
    server.process.kill()
    await asyncio.to_thread(server._thread.join, SECONDS)


async def wait_for_result(client: Client, task: TaskHandle, begun: asyncio.Event) -> None:
    begun.set()
    await task.result()


async def read_stream(client: Client, task: TaskHandle, begun: asyncio.Event) -> None:
    async for _ in task.stream():
        begun.set()


async def submit_others(client: Client, task: TaskHandle, begun: asyncio.Event) -> None:
    while True:
        begun.set()
        await client.submit("sleeper", "y")


@pytest.mark.parametrize("waits", [wait_for_result, read_stream, submit_others])
async def test_no_call_waits_for_a_dead_server(
    waits: Callable[[Client, TaskHandle, asyncio.Event], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_server, "_server", None)
    app = App("sleeping")

    @app.agent("sleeper")
    async def sleeper(ctx: AgentContext, text: str) -> None:
        await ctx.emit("sleeping")
        await ctx.sleep(3600)

    async with asyncio.timeout(SECONDS):
        local = LocalApp(app)
        client = await local.__aenter__()
        begun = asyncio.Event()
        waiting = asyncio.create_task(waits(client, await client.submit("sleeper", "x"), begun))
        await begun.wait()
        await end_server()
        with pytest.raises(BusLost, match=r"exited .*SIGKILL.* restart this process"):
            await waiting
        with suppress(BusLost):  # a handler may have learned of it, or not
            await local.__aexit__(None, None, None)
        with pytest.raises(ConfigurationError, match=r"exited .*SIGKILL"):
            await connect("memory://")


async def test_an_agent_object_does_not_wait_for_a_server_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_server, "_server", None)
    async with asyncio.timeout(SECONDS):
        runtime = Runtime(url="memory://", shutdown_seconds=0.1)
        asked = asyncio.Event()

        class Deaf(RoutedAgent):
            @message_handler
            async def on_text(self, message: Text, ctx: MessageContext) -> Text:
                asked.set()
                return await asyncio.Future[Text]()

        await runtime.register_factory("deaf", lambda: Deaf("hears and says nothing"))
        runtime.start()
        asking = asyncio.create_task(runtime.send_message(Text("hello"), AgentId("deaf", "one")))
        await asked.wait()
        await end_server()
        with pytest.raises(BusLost):
            await asking
        with suppress(BusLost):
            await runtime.close()


@pytest.mark.parametrize("durability", ["fsync", "quorum"])
async def test_more_than_fast_is_refused(durability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DURABILITY", durability)
    with pytest.raises(ConfigurationError, match=f"WEFT_DURABILITY={durability}: memory:// stores nothing on disk"):
        await Client.connect("memory://").open()


def echoing(name: str) -> App:
    app = App(name)

    @app.agent("echo")
    async def echo(ctx: AgentContext, text: str) -> str:
        return f"{name}: {text}"

    return app


async def test_apps_of_one_process_are_separate_and_leave_nothing() -> None:
    async with LocalApp(echoing("one")) as first, LocalApp(echoing("two")) as second:
        tasks = [await client.submit("echo", "hi") for client in (first, second)]
        assert [(await task.result(SECONDS)).value() for task in tasks] == ["one: hi", "two: hi"]
        assert await ask("DBSIZE", url=first.url)
        urls = {first.url, second.url}
    assert len(urls) == 2
    assert [await ask("DBSIZE", url=url) for url in urls] == [0, 0]
    again = {LocalApp(echoing("again")).client.url for _ in urls}
    assert again == urls, "databases are used again"


async def test_a_closed_runtime_leaves_nothing() -> None:
    runtime = Runtime("memory://")
    runtime.start()
    await runtime.stop_when_idle()
    url = runtime._host.url
    assert await ask("DBSIZE", url=url)
    await runtime.close()
    assert await ask("DBSIZE", url=url) == 0
