"""MCP servers that send endlessly: a bounded part is read, in little memory, and the call ends with one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime_core.app.app import App
from runtime_core.errors import ToolError
from runtime_core.host.local import LocalApp
from runtime_core.runs.context import AgentContext

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[4]
ENDLESS = "it sent over 16777216 bytes without a line break"


def called(tool: str) -> dict[str, Any]:
    """Call the tool in a process that may use little memory. Return its report."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.calls.mcp.hostile_client", tool],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    # Not one line for each line that the server writes.
    assert len(ended.stderr) < 10_000
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("tool", "why"),
    [("endless_line", ENDLESS), ("wrong_lines", "it wrote 1000 lines in a row that are not messages")],
)
def test_a_server_that_never_ends_its_answer_ends_the_call_with_one_error(tool: str, why: str) -> None:
    found = called(tool)
    assert found["error"] == f"the connection was closed: {why}"
    assert found["why"] == why


def test_a_server_that_notifies_without_end_does_not_stop_the_others() -> None:
    found = called("endless_notes")
    assert found["error"] == "timeout", "the limit of the call works while the messages arrive"
    assert found["why"] == ""


def test_a_long_line_that_is_not_a_message_does_not_end_the_session() -> None:
    found = called("long_line")
    assert (found["error"], found["why"]) == ("timeout", "")


async def test_the_error_names_the_reason_and_other_calls_run_on() -> None:
    app = App("hostile-app")
    app.add_mcp(
        "hostile",
        command=[sys.executable, "-m", "tests.mcp_servers.hostile"],
        cwd=str(ROOT),
        env={"PYTHONPATH": str(ROOT)},
        mode="legacy",
    )

    @app.tool
    async def own() -> str:
        return "served"

    @app.agent("use")
    async def use(ctx: AgentContext, tool: str) -> object:
        try:
            return await ctx.tool(tool)
        except ToolError as error:
            return [error.type, error.message]

    async with LocalApp(app) as client:
        endless = await client.submit("use", "hostile.endless_line")
        assert (await (await client.submit("use", "own")).result(timeout=60)).output == "served"
        type, message = (await endless.result(timeout=60)).output
        assert type == "UnknownOutcome"
        assert ENDLESS in message
        assert "\n" not in message
        # The server was started again.
        assert (await (await client.submit("use", "hostile.answer")).result(timeout=60)).output == "answered"
