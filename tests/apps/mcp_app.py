"""The app for tests of MCP servers in services. The environment says where its server is."""

from __future__ import annotations

import os
import sys
from typing import Any

from runtime_core.app.app import App
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import ToolError
from runtime_core.runs.context import AgentContext
from tests.mcp_servers.ledger import VARIABLE

app = App("mcp-app")
app.add_mcp(
    "desk",
    command=[sys.executable, "-m", "tests.mcp_servers.desk"],
    env={VARIABLE: os.environ.get(VARIABLE, "")},
    retry=RetryPolicy(attempts=4, base_seconds=0.05, max_seconds=0.2),
)


@app.tool
async def own() -> str:
    return "served"


@app.agent("use")
async def use(ctx: AgentContext, wanted: dict[str, Any]) -> object:
    """Call one tool. Return its result, or how it failed."""
    try:
        return await ctx.tool(wanted["tool"], **wanted.get("arguments", {}))
    except ToolError as error:
        return {"error": error.type, "message": error.message}
