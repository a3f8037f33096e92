"""Redis and Valkey from their makers' images, in containers, if this machine has Docker.

Nothing of Docker is imported before the first container is asked for.
"""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from tests.servers.process import HOST
from tests.servers.unavailable import Unavailable

IMAGES: Mapping[str, str] = {
    "docker-redis-7.2": "redis:7.2",
    # The one that deploy/ runs.
    "docker-redis-8.2": "redis:8.2",
    "docker-valkey-9.1": "valkey/valkey:9.1",
}
"""Image by the server's name in `WEFT_TEST_SERVERS`. `variable_of` says what names another."""
CONTAINERS = tuple(IMAGES)

PORT = 6379
OPTIONS = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--protected-mode", "no"]
SECONDS = 60
"""For one answer of Docker, a fetch of an image included."""
SOCKET = Path("/var/run/docker.sock")
OWNER = "weft.tests.owner"
"""The label of our containers: `host/pid` of the test run that they belong to."""


def docker_is_here() -> bool:
    """Whether Docker is set up. It asks no daemon, so it costs nothing where there is none."""
    return bool(os.environ.get("DOCKER_HOST")) or SOCKET.exists()


def variable_of(kind: str) -> str:
    """Return the variable that names another image: `WEFT_TEST_IMAGE_REDIS_7_2` for `docker-redis-7.2`."""
    return "WEFT_TEST_IMAGE_" + kind.removeprefix("docker-").upper().replace("-", "_").replace(".", "_")


class Containers:
    """The containers of a test run, each started at first use on a free port of 127.0.0.1, removed together.

    testcontainers' own reaper is an image more to fetch, and has to be privileged; so a run removes its containers at
    its end, and those that a killed run has left at its start.
    """

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._reasons: dict[str, Unavailable] = {}
        self._stack = ExitStack()
        self._docker: Any = None  # docker has no types
        self._no_registry: str = ""

    def get(self, kind: str) -> str:
        """Return the URL of the shared server of this kind. Raises Unavailable, at once the second time."""
        if kind in self._reasons:
            raise self._reasons[kind]
        if kind not in self._urls:
            try:
                self._urls[kind] = self._start(kind)
            except Unavailable as reason:
                self._reasons[kind] = reason
                raise
        return self._urls[kind]

    def fetch(self, kind: str) -> str:
        """Make the image of this kind available on this machine. Raises Unavailable."""
        if not docker_is_here():
            raise Unavailable(f"there is no Docker: neither {SOCKET} nor DOCKER_HOST")
        self._connect()
        image = os.environ.get(variable_of(kind)) or IMAGES[kind]
        self._pull(image)
        return image

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, kind: str) -> str:
        image = self.fetch(kind)
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        testcontainers_config.ryuk_disabled = True
        container = DockerContainer(image).with_command(OPTIONS).with_kwargs(labels={OWNER: _owner()})
        # testcontainers would have the port open to other machines.
        cast("dict[str, object]", container.ports)[f"{PORT}/tcp"] = (HOST,)
        container.waiting_for(LogMessageWaitStrategy("Ready to accept connections").with_startup_timeout(SECONDS))
        self._stack.enter_context(container)
        return f"redis://{HOST}:{container.get_exposed_port(PORT)}"

    def _connect(self) -> None:
        """Return a client of Docker, and remove what killed runs have left. Raises Unavailable."""
        if self._docker is not None:
            return
        import docker
        from docker.errors import DockerException

        reason = ""
        try:
            client = docker.from_env(timeout=SECONDS)
            self._stack.callback(client.close)
            left = client.containers.list(all=True, filters={"label": OWNER})
        except DockerException as error:
            reason = str(error)
        if reason:
            _forget_sockets()
            raise Unavailable(f"Docker does not answer: {reason}")
        self._docker = client
        for container in left:
            if _is_left_over(container.labels.get(OWNER, "")):
                with suppress(DockerException):
                    container.remove(force=True, v=True)

    def _pull(self, image: str) -> None:
        """Pull the image if needed. Raises Unavailable; an unreachable registry is asked only once."""
        from docker.errors import DockerException, ImageNotFound

        try:
            self._docker.images.get(image)
        except ImageNotFound:
            pass
        else:
            return
        if self._no_registry:
            raise Unavailable(f"the image {image} is not here, and the registry is away: {self._no_registry}")
        try:
            self._docker.images.pull(image)
        except ImageNotFound:
            raise Unavailable(f"there is no image {image}") from None
        except (DockerException, OSError) as error:
            self._no_registry = str(error)
            raise Unavailable(f"the image {image} cannot be fetched: {error}") from None


def _forget_sockets() -> None:
    """Docker's client leaves sockets open if it reaches nobody. Their warning would fail a later test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _owner() -> str:
    return f"{socket.gethostname()}/{os.getpid()}"


def _is_left_over(owner: str) -> bool:
    """Whether it belongs to a test run of this machine that has ended."""
    host, _, pid = owner.partition("/")
    return host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
