"""Servers in containers run where there is Docker, and are gone afterwards; elsewhere one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from tests.architecture.tree import ROOT
from tests.servers import containers
from tests.servers.containers import CONTAINERS, IMAGES, OWNER, Containers, variable_of
from tests.servers.unavailable import Unavailable


async def test_the_makers_images_run(container_url: Callable[[str], str]) -> None:
    for kind in CONTAINERS:
        transport = RespTransport(parse_address(container_url(kind)))
        await transport.connect(10.0)
        assert await transport.call("PING") in (b"PONG", "PONG")
        await transport.close()


def test_leftovers_of_a_killed_test_run_are_removed(container_url: Callable[[str], str]) -> None:
    """A container of a process that has ended is gone when the next run starts its first."""
    import docker

    container_url(CONTAINERS[0])
    client = docker.from_env()
    try:
        ours = client.containers.list(filters={"label": OWNER})
        gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        owner = f"{containers._owner().partition('/')[0]}/{gone.stdout.decode().strip()}"
        left = client.containers.create(ours[0].image, labels={OWNER: owner})
        with Containers() as others:
            others.get(CONTAINERS[0])
            names = {each.name for each in client.containers.list(all=True, filters={"label": OWNER})}
            assert left.name not in names
            assert {each.name for each in ours} < names
        assert {each.name for each in ours} == {each.name for each in client.containers.list(filters={"label": OWNER})}
    finally:
        client.close()


def test_an_unavailable_image_is_reported_once(
    container_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    container_url(CONTAINERS[0])
    # Nobody listens on port 1.
    monkeypatch.setenv(variable_of(CONTAINERS[0]), "127.0.0.1:1/none:1")
    monkeypatch.setenv(variable_of(CONTAINERS[1]), "127.0.0.1:1/none:2")
    with Containers() as others:
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/none:1 cannot be fetched"):
                others.get(CONTAINERS[0])
        with pytest.raises(Unavailable, match="none:2 is not here, and the registry is away"):
            others.get(CONTAINERS[1])


def test_a_docker_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with Containers() as others, pytest.raises(Unavailable, match="Docker does not answer"):
        others.get(CONTAINERS[0])


def test_the_contract_skips_tests_that_cannot_run_here(tmp_path: Path) -> None:
    """One line says so already; a skip of each test would hide it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/contracts/test_topics.py", "-k", CONTAINERS[0]],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/docker.sock"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_a_machine_without_docker_is_reported_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(containers, "SOCKET", tmp_path / "docker.sock")
    monkeypatch.setitem(sys.modules, "docker", None)
    with Containers() as others, pytest.raises(Unavailable, match="there is no Docker"):
        others.get(CONTAINERS[0])


def test_the_deployed_redis_is_among_them() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["redis"]["image"] in IMAGES.values()
    assert [variable_of(kind) for kind in CONTAINERS] == [
        "WEFT_TEST_IMAGE_REDIS_7_2",
        "WEFT_TEST_IMAGE_REDIS_8_2",
        "WEFT_TEST_IMAGE_VALKEY_9_1",
    ]
