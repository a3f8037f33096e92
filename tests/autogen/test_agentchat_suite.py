"""AgentChat's own tests of teams pass on Weft's runtime, as they were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autogen.suite import run_modules, totals
from tests.servers.matrix import is_full, only_in_matrix
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(3000)  # each test here is many of theirs

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


def test_the_team_modules_pass(autogen_cache: Path, tmp_path: Path) -> None:
    # A thousand turns: twice, with a runtime that the team makes too, only in the matrix.
    only = "" if is_full() else "not (test_round_robin_group_chat_cancellation and embedded)"
    found = run_modules("autogen-agentchat", MODULES, "memory", autogen_cache, tmp_path, only=only)
    assert totals(found) == MODULES | ({} if is_full() else {"test_group_chat": MODULES["test_group_chat"] - 1})


IN_PROCESSES = {"test_group_chat": 44, "test_magentic_one_group_chat": 3, "test_society_of_mind_agent": 8}
"""Module → tests in it whose runtime is given to the team, as one that other processes share must be.

They run in other processes each time. With them in the matrix: the same with a runtime that the team makes, nested
teams and graphs.
"""


def test_teams_with_agents_in_other_processes_pass(valkey: Server, autogen_cache: Path, tmp_path: Path) -> None:
    chosen, only = IN_PROCESSES, "not embedded"
    if is_full():
        more = (*IN_PROCESSES, "test_group_chat_nested", "test_group_chat_graph")
        chosen, only = {module: MODULES[module] for module in more}, ""
    found = run_modules("autogen-agentchat", chosen, "workers", autogen_cache, tmp_path, valkey.url, only)
    assert totals(found) == chosen
    assert found["test_group_chat"]["passed"] == (65 if is_full() else 33)


@only_in_matrix("what `memory` starts is a server too; this is a shared one")
def test_the_team_modules_pass_on_a_server(valkey: Server, autogen_cache: Path, tmp_path: Path) -> None:
    chosen = ["test_group_chat", "test_group_chat_nested", "test_group_chat_pause_resume"]
    found = run_modules("autogen-agentchat", chosen, "server", autogen_cache, tmp_path, valkey.url)
    assert totals(found) == {module: MODULES[module] for module in chosen}


@only_in_matrix("with AutoGen's own runtime")
def test_the_harness_passes_with_autogens_own_runtime(autogen_cache: Path, tmp_path: Path) -> None:
    chosen = ["test_group_chat", "test_group_chat_nested"]
    found = run_modules("autogen-agentchat", chosen, "autogen", autogen_cache, tmp_path)
    assert totals(found) == {module: MODULES[module] for module in chosen}
