"""Runtimes on each kind of broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest

from tests.servers.matrix import VALKEY_9
from tests.servers.process import Server
from tests.servers.users import documented_users
from weft.runtime import Runtime

MEMORY = "memory"


class MakeRuntime(Protocol):
    """Create a runtime that is closed at the end of the test."""

    def __call__(self, **options: Any) -> Runtime: ...  # Any: the runtime's own


@pytest.fixture(params=[MEMORY, VALKEY_9])
async def broker_url(
    request: pytest.FixtureRequest, shared_server: Callable[[str], Server], namespace: str
) -> AsyncIterator[str]:
    """A broker; on a server with the user `runtime` of `weft acl`, which must never be refused."""
    kind: str = request.param
    if kind == MEMORY:
        yield "memory://"
        return
    async with documented_users(shared_server(kind), namespace, "runtime") as urls:
        yield urls["runtime"]


@pytest.fixture
async def make_runtime(broker_url: str, namespace: str) -> AsyncIterator[MakeRuntime]:
    """Runtimes of this test's namespace; on `memory://` each has its own database."""
    made: list[Runtime] = []

    def make(**options: Any) -> Runtime:
        runtime = Runtime(broker_url, namespace, services=False, lease_seconds=1.0, **options)
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        await runtime.close()


@pytest.fixture
def runtime(make_runtime: MakeRuntime) -> Runtime:
    return make_runtime()
