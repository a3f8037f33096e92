"""AgentChat's own tests of teams pass on Weft's runtime, as they were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autogen.suite import run_module
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(3000)  # each test here is a whole module of theirs

MODULES = {
    "test_group_chat": 87,
    "test_group_chat_graph": 76,
    "test_group_chat_nested": 21,
    "test_group_chat_pause_resume": 2,
    "test_magentic_one_group_chat": 6,
    "test_sequential_routed_agent": 1,
    "test_society_of_mind_agent": 15,
    "test_streaming_message_id_correlation": 1,
    "test_task_runner_tool": 7,
}
"""Module → tests in it. `test_assistant_agent` is not run: it imports clients of two further services."""


@pytest.mark.parametrize("module", MODULES)
def test_the_team_modules_pass(module: str, autogen_cache: Path, tmp_path: Path) -> None:
    counts = run_module("autogen-agentchat", module, "memory", autogen_cache, tmp_path)
    assert sum(counts.values()) == MODULES[module]


@pytest.mark.parametrize("module", ["test_group_chat", "test_group_chat_nested", "test_group_chat_pause_resume"])
def test_the_team_modules_pass_on_a_server(module: str, valkey: Server, autogen_cache: Path, tmp_path: Path) -> None:
    counts = run_module("autogen-agentchat", module, "server", autogen_cache, tmp_path, valkey.url)
    assert sum(counts.values()) == MODULES[module]


@pytest.mark.parametrize("module", ["test_group_chat", "test_group_chat_nested"])
def test_the_harness_passes_with_autogens_own_runtime(module: str, autogen_cache: Path, tmp_path: Path) -> None:
    counts = run_module("autogen-agentchat", module, "autogen", autogen_cache, tmp_path)
    assert sum(counts.values()) == MODULES[module]
