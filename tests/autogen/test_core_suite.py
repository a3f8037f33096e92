"""autogen-core's own tests pass on Weft's runtime, as they were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autogen.suite import run_module
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(3000)  # each test here is a whole module of theirs

RUNTIME_MODULES = {
    "test_runtime": 15,
    "test_subscription": 5,
    "test_state": 2,
    "test_intervention": 5,
    "test_routed_agent": 5,
    "test_closure_agent": 1,
    "test_tool_agent": 2,
    "test_cancellation": 3,
}
"""Module → tests in it: fewer would be a hole."""

LIBRARY_MODULES = {"test_base_agent": 1, "test_serialization": 13, "test_types": 3, "test_component_config": 18}
"""Modules that use no runtime: they show that the environment and the helper components are right."""


@pytest.mark.parametrize("mode", ["autogen", "memory"])
@pytest.mark.parametrize("module", RUNTIME_MODULES)
def test_the_runtime_modules_pass(module: str, mode: str, autogen_cache: Path, tmp_path: Path) -> None:
    counts = run_module("autogen-core", module, mode, autogen_cache, tmp_path)
    assert sum(counts.values()) == RUNTIME_MODULES[module]


@pytest.mark.parametrize("mode", ["server", "workers"])
@pytest.mark.parametrize("module", RUNTIME_MODULES)
def test_the_runtime_modules_pass_on_a_server(
    module: str, mode: str, valkey: Server, autogen_cache: Path, tmp_path: Path
) -> None:
    counts = run_module("autogen-core", module, mode, autogen_cache, tmp_path, valkey.url)
    assert sum(counts.values()) == RUNTIME_MODULES[module]


def test_the_module_of_runtimes_over_grpc_passes_on_a_server(
    valkey: Server, autogen_cache: Path, tmp_path: Path
) -> None:
    counts = run_module("autogen-ext", "test_worker_runtime", "hosts", autogen_cache, tmp_path, valkey.url)
    assert counts == {"passed": 12, "skipped": 0, "excepted": 5}


@pytest.mark.parametrize("module", LIBRARY_MODULES)
def test_the_library_modules_pass(module: str, autogen_cache: Path, tmp_path: Path) -> None:
    counts = run_module("autogen-core", module, "autogen", autogen_cache, tmp_path)
    assert counts["passed"] == LIBRARY_MODULES[module]
