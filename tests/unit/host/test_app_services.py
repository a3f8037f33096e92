"""The services that run an app are wired by what the app declares."""

from __future__ import annotations

import subprocess
import sys

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.engines.results import Results
from runtime_core.host.app_services import add_agents, add_tools
from runtime_core.host.host import Host
from runtime_core.runs.context import AgentContext
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics

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


async def test_work_may_take_as_long_as_its_longest_time_limit() -> None:
    """A process whose only work is slow is healthy: it counts as stalled only beyond this time."""
    app = App("desk")

    @app.tool(timeout_seconds=120)
    def fetch() -> None:
        """Fetch."""

    @app.tool(timeout_seconds=900, pool="gpu")
    def train() -> None:
        """Train."""

    @app.agent("writer", timeout_seconds=300)
    async def writer(ctx: AgentContext) -> None:
        """Write."""

    app.add_mcp("files", command=["files-server"], pool="files", timeout_seconds=200)
    bus = EventBus(RespTransport(parse_address("redis://127.0.0.1:1")), Keys("weft", 0))

    async def connect() -> Transport:
        raise AssertionError("nothing connects")

    seconds = []
    for pools in (("",), ("gpu",), ("files",), ("", "gpu", "files")):
        host = Host(connect, Metrics(CollectorRegistry(), "tool-handler"))
        add_tools(host, app, [bus], pools)
        seconds.append(host.consumers[0]._watch._work_seconds)
    assert seconds == [120, 900, 200, 900]
    host = Host(connect, Metrics(CollectorRegistry(), "agent-handler"))
    add_agents(host, app, [bus], ("",), results=Results.of_settings(Settings.from_environment({})))
    assert host.consumers[0]._watch._work_seconds == 300
