"""Stands in for AutoGen's runtime over gRPC, in its own tests: a host's address is a namespace on a broker.

Those tests wait for fixed times. Here each such wait ends when nothing is left to do, and lasts as long as that takes.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import types
from typing import Any

import pytest

from runtime_core.integrations.autogen import WeftAgentRuntime

MODULE = "autogen_ext.runtimes.grpc"
IDLE_SECONDS = 60.0
LOOK_SECONDS = 0.02

_namespaces: dict[str, str] = {}
"""Address of a host → the namespace of the host that was made last under it."""
_running: set[Worker] = set()


class Host:
    """The host of a namespace: with a broker there is nothing to run."""

    def __init__(self, address: str, extra_grpc_config: Any = None) -> None:
        _namespaces[address] = f"h{secrets.token_hex(6)}"
        _running.clear()  # what a test before left running, when it failed

    def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""


class Worker(WeftAgentRuntime):
    """A runtime that is started and stopped as a worker over gRPC is."""

    def __init__(
        self, host_address: str, extra_grpc_config: Any = None, payload_serialization_format: str = ""
    ) -> None:
        super().__init__(namespace=_namespaces[host_address], services=False)

    async def start(self) -> None:  # type: ignore[override]  # as over gRPC
        super().start()
        _running.add(self)

    async def stop(self) -> None:
        _running.discard(self)
        await super().stop()
        await self.close()


async def sleep(seconds: float) -> None:
    """Wait until the broker has nothing to do for any running worker."""
    async with asyncio.timeout(IDLE_SECONDS):
        while not all([await worker._is_idle() for worker in _running]):
            await asyncio.sleep(LOOK_SECONDS)


def stand_in() -> None:
    """Put these classes where the tests import AutoGen's from."""
    module: Any = types.ModuleType(MODULE)
    module.GrpcWorkerAgentRuntimeHost, module.GrpcWorkerAgentRuntime = Host, Worker
    sys.modules[MODULE] = module


def adapt(item: pytest.Item) -> None:
    """Give the test's module this `sleep`, and run the tests that it skips as flaky."""
    module = getattr(item, "module", None)
    if module is not None:
        module.asyncio = types.SimpleNamespace(sleep=sleep, CancelledError=asyncio.CancelledError)
    item.own_markers[:] = [marker for marker in item.own_markers if marker.name != "skip"]
