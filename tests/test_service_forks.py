"""A forked service is set up like a new process, and its parent learns of its end."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from tests.fleet import Fleet, until
from tests.servers.process import Server
from tests.service_forks import IMPORTED, IMPORTED_FOR, SOURCES, can_fork, forks

SERVICE = ("services.agent_handler",)


def test_a_forked_service_uses_its_own_environment(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": SOURCES, "WEFT_REDIS_URL": "nonsense://", "WEFT_INSTANCE": "here"}
    first, second = (forks().start(SERVICE, environ, tmp_path / name) for name in ("first", "second"))
    assert (first.wait(), second.wait()) == (1, 1)
    assert first.poll() == 1
    for name in ("first", "second"):
        told = (tmp_path / name).read_text()
        assert "WEFT_REDIS_URL" in told
        assert len(told.splitlines()) == 1


def test_a_fork_finds_the_modules_of_its_own_folders(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text("import sys\nprint('found', sys.dont_write_bytecode, flush=True)\napp = 1\n")
    environ = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}", "WEFT_APP": "apart:app"}
    assert can_fork(SERVICE, environ)
    for more in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):
        log = tmp_path / f"log{len(more)}"
        assert forks().start(SERVICE, environ | more, log).wait() == 1
        assert f"found {bool(more)}\n" in log.read_text()


async def test_a_killed_service_is_restarted(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with Fleet(valkey.url, namespace, tmp_path, replicas={"tool-handler": 1}) as fleet:
        [member] = fleet.members.values()
        process = member.process
        assert process is not None
        assert os.getsid(process.pid) == process.pid

        async def is_another() -> bool:
            return member.process is not process and member.ready()

        fleet.kill("tool-handler-1")
        assert process.wait() == -signal.SIGKILL
        await until(is_another, 60, "another process is ready in its place")


def test_every_module_that_forks_import_first_exists() -> None:
    for name in (*IMPORTED, *chain.from_iterable(IMPORTED_FOR.values())):
        assert find_spec(name) is not None, name


def test_a_service_that_cannot_fork_starts_as_a_process() -> None:
    environ = {"PYTHONPATH": SOURCES}
    assert can_fork(SERVICE, environ)
    assert not can_fork(("tests.rerun_failed",), environ)
    assert not can_fork(SERVICE, {**environ, "PYTHONPROFILEIMPORTTIME": "1"})
    assert not can_fork(SERVICE, {"PYTHONPATH": "/elsewhere"})
