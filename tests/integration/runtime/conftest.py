"""Runtimes on each kind of broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest

from runtime_core import Runtime
from tests.servers.matrix import VALKEY_9
from tests.servers.process import Server

MEMORY = "memory"


class MakeRuntime(Protocol):
    """Makes a runtime that is closed at the end of the test."""

    def __call__(self, **options: Any) -> Runtime: ...  # Any: the runtime's own


@pytest.fixture(params=[MEMORY, VALKEY_9])
def broker_url(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> str:
    kind: str = request.param
    return "memory://" if kind == MEMORY else shared_server(kind).url


@pytest.fixture
async def make_runtime(broker_url: str, namespace: str) -> AsyncIterator[MakeRuntime]:
    """Runtimes of this test's namespace; each has a broker of its own where that is in memory."""
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
