"""The servers of other tests do what their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import OwnServer
from tests.servers.matrix import MATRIX, repeat_on
from tests.servers.process import Server, StartError
from tests.servers.valkey import ValkeyServer


def connect(server: Server, timeout: float = 5.0) -> redis.Redis:
    return redis.Redis(port=server.port, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


def test_every_server_of_the_matrix_runs_functions_and_streams(any_server: Server, namespace: str) -> None:
    library = (
        f"#!lua name={namespace}\nredis.register_function('{namespace}_add', function(keys, args)\n"
        "  return redis.call('XADD', keys[1], '*', 'data', args[1])\nend)"
    )
    with connect(any_server) as client:
        client.function_load(library)
        client.fcall(f"{namespace}_add", 1, f"{namespace}:s", "hello")
        assert client.xlen(f"{namespace}:s") == 1


def test_a_server_has_the_version_that_its_name_says(any_server: Server, request: pytest.FixtureRequest) -> None:
    kind, _, version = request.node.callspec.params["any_server"].partition("-")
    with connect(any_server) as client:
        info = client.info("server")
    assert isinstance(info, dict)
    assert str(info.get("valkey_version" if kind == "valkey" else "redis_version")).startswith(f"{version}.")


@pytest.mark.parametrize("kind", repeat_on(*MATRIX))
def test_acknowledged_writes_survive_a_kill(own_server: OwnServer, kind: str) -> None:
    server = own_server(kind, append="always")
    with connect(server) as client:
        client.set("k", "v")
    port, pid = server.port, server.pid
    server.restart()
    assert server.port == port
    assert server.pid != pid
    with connect(server) as client:
        assert client.get("k") == b"v"


def test_without_an_append_only_file_a_kill_loses_everything(own_server: OwnServer) -> None:
    server = own_server(append=None)
    with connect(server) as client:
        client.set("k", "v")
    server.restart()
    with connect(server) as client:
        assert client.get("k") is None


def test_a_paused_server_accepts_and_answers_later(own_valkey: Server) -> None:
    own_valkey.pause()
    with connect(own_valkey, timeout=0.2) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    own_valkey.resume()
    with connect(own_valkey) as client:
        assert client.ping()


def test_options_reach_the_server(own_server: OwnServer) -> None:
    with connect(own_server(options=("--maxmemory", "64mb"))) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no-such-setting"):
        ValkeyServer(tmp_path / "data", options=("--no-such-setting", "1")).start()


def test_a_data_path_with_spaces_works(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "a folder with 'quotes'") as server, connect(server) as client:
        assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.servers.valkey import ValkeyServer\n"
        "server = ValkeyServer(Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while not _gone(pid):
        assert time.monotonic() < deadline, f"the server {pid} outlived its parent"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    """Whether the process has ended. A zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
