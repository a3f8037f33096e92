"""autogen-core's own tests pass on Weft's runtime, as they were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autogen.suite import run_modules, totals
from tests.servers.matrix import first_of, only_in_matrix
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(3000)  # each test here is many of theirs

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


@only_in_matrix("without a server, and with AutoGen's own runtime")
@pytest.mark.parametrize("mode", ["autogen", "memory"])
def test_the_runtime_modules_pass(mode: str, autogen_cache: Path, tmp_path: Path) -> None:
    found = run_modules("autogen-core", RUNTIME_MODULES, mode, autogen_cache, tmp_path)
    assert totals(found) == RUNTIME_MODULES


# In the matrix, the agents are in the program's process, too: so are those of AgentChat's modules.
@pytest.mark.parametrize("mode", first_of("workers", "server"))
def test_the_runtime_modules_pass_on_a_server(mode: str, valkey: Server, autogen_cache: Path, tmp_path: Path) -> None:
    found = run_modules("autogen-core", RUNTIME_MODULES, mode, autogen_cache, tmp_path, valkey.url)
    assert totals(found) == RUNTIME_MODULES


def test_the_module_of_runtimes_over_grpc_passes_on_a_server(
    valkey: Server, autogen_cache: Path, tmp_path: Path
) -> None:
    found = run_modules("autogen-ext", ["test_worker_runtime"], "hosts", autogen_cache, tmp_path, valkey.url)
    assert found == {"test_worker_runtime": {"passed": 12, "skipped": 0, "excepted": 5}}


def test_the_library_modules_pass(autogen_cache: Path, tmp_path: Path) -> None:
    found = run_modules("autogen-core", LIBRARY_MODULES, "autogen", autogen_cache, tmp_path)
    assert {module: counts["passed"] for module, counts in found.items()} == LIBRARY_MODULES
