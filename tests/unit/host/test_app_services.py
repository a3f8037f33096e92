"""The services that run an app are wired by what the app declares."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_SDK = """
import asyncio, sys
sys.modules["mcp"] = None
from prometheus_client import CollectorRegistry
from runtime_core.app.app import App
from runtime_core.errors import ConfigurationError
from runtime_core.host.app_services import add_tools
from runtime_core.host.host import Host
from runtime_core.telemetry.metrics import Metrics

async def main():
    app = App("desk")
    app.add_mcp("files", command=["files-server"], pool="gpu")
    host = Host(asyncio.sleep, Metrics(CollectorRegistry(), "tool-handler"))
    add_tools(host, app, [], ("",))
    print("the default pool needs no SDK")
    try:
        add_tools(host, app, [], ("gpu",))
    except ConfigurationError as error:
        print(error)

asyncio.run(main())
"""


def test_only_a_tool_handler_that_runs_mcp_servers_needs_their_sdk() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_SDK], capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert first == "the default pool needs no SDK"
    assert second.endswith("needs the MCP SDK, which is not installed: pip install 'weft[mcp]'"), done.stderr
