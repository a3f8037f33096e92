"""Declarations of MCP servers, and the pools and agents that use them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.deliveries import Delivery
from runtime_core.calls.mcp.servers import MCPServers
from runtime_core.declare.declaration import Place
from runtime_core.declare.manifest import Manifest, ToolEntry
from runtime_core.declare.mcp_server import MCPServer, need_sdk
from runtime_core.declare.tool import ToolUnavailable
from runtime_core.errors import ConfigurationError, NotReady
from runtime_core.llm.toolset import ToolsMissing, toolset_of
from runtime_core.runs.commit import parts
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Call
from runtime_core.telemetry.metrics import Metrics
from weft import Limit

PLACE = Place("app.py", 7)
OBJECT: dict[str, Any] = {"type": "object"}


def server(name: str = "files", **settings: Any) -> MCPServer:
    return MCPServer(name, PLACE, **({"command": ["serve"]} | settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"command": None}, "needs a command or a url"),
        ({"url": "http://127.0.0.1:1/mcp"}, "needs a command or a url"),
        ({"command": "serve --all"}, "give a list of strings"),
        ({"command": []}, "give a list of strings"),
        ({"command": None, "url": "ftp://host/mcp"}, "write http://… or https://…"),
        ({"command": None, "url": "http://[::1/mcp"}, "write http://… or https://…"),
        ({"headers": {"a": "b"}}, "headers but no url"),
        ({"command": None, "url": "http://host/mcp", "env": {"a": "b"}}, "env but no command"),
        ({"env": {"A": 1}}, "env must map names to strings"),
        ({"cwd": 3}, "give a path"),
        ({"tools": "read_*"}, "give a list of names or patterns"),
        ({"tools": []}, "give a list of names or patterns"),
        ({"prefix": ""}, "use a valid tool name"),
        ({"pool": "a b"}, "pool='a b'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"connect_seconds": -1}, "connect_seconds=-1"),
        ({"retry": 3}, "give a RetryPolicy"),
        ({"repeatable": {"a": "yes"}}, "give True, False, or one of them by tool"),
        ({"limit": 3}, "has limit=3: give a Limit(running=…), or a list of them"),
        ({"limit": Limit(per="key", rate=1, seconds=1)}, "only agents have keys: give 'input.<name>'"),
        ({"limit": Limit(debounce=1)}, "must be the only limit of an agent"),
        ({"limit": {"search": 3}}, "MCP server 'files', tool 'search', (app.py:7) has limit=3"),
        ({"limit": {"*": Limit(running=1)}}, "has a limit for '*': give the server's name of one tool, or a Limit"),
        ({"limit": {3: Limit(running=1)}}, "has a limit for 3"),
        ({"when_down": "hope"}, "give 'wait' or 'fail'"),
        ({"mode": "2024"}, "give 'auto' or 'legacy'"),
        ({"name": "files.all"}, "cannot be used"),
    ],
)
def test_an_impossible_server_is_refused_where_it_is_declared(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        server(**settings)
    assert told in str(refused.value)
    assert "app.py:7" in str(refused.value)


def test_limits_count_all_tools_of_a_server_or_each_one() -> None:
    limit = Limit(rate=30, seconds=60)
    assert server(prefix="f").limits_of("search") == ("f.search", ())
    assert server(prefix="f", limit=limit).limits_of("search") == ("f.*", (limit,))
    by_tool = server(prefix="f", limit={"search": [limit]})
    assert by_tool.limits_of("search") == ("f.search", (limit,))
    assert by_tool.limits_of("other") == ("f.other", ())


def test_two_servers_may_not_share_a_name_or_a_prefix() -> None:
    app = App("app")
    app.add_mcp("files", command=["serve"])
    with pytest.raises(ConfigurationError, match="has the same name as MCP server 'files'"):
        app.add_mcp("files", command=["other"])
    with pytest.raises(ConfigurationError, match="has the same prefix as MCP server 'files'"):
        app.add_mcp("more", command=["other"], prefix="files")


def test_an_included_app_brings_its_servers_once() -> None:
    inner, app = App("inner"), App("app")
    inner.add_mcp("files", command=["serve"])
    app.include(inner)
    app.include(inner)
    assert list(app.mcp_servers) == ["files"]


def test_a_tool_belongs_to_the_server_with_the_longest_matching_prefix() -> None:
    app = App("app")
    app.add_mcp("a", command=["serve"])
    app.add_mcp("b", command=["serve"], prefix="a.b")

    @app.tool(name="a.own")
    async def own() -> None: ...

    def owner(tool: str) -> str | None:
        found = app.functions.mcp_server_of(tool)
        return None if found is None else found.name

    assert owner("a.read") == "a"
    assert owner("a.b.read") == "b"
    assert owner("a.own") is None
    assert owner("ab.read") is None


def test_an_agent_may_name_a_tool_that_its_server_has_not_listed_yet() -> None:
    app = App("app")
    app.add_mcp("files", command=["serve"])

    @app.agent("reads", tools=["files.read"])
    async def reads(ctx: AgentContext) -> None: ...

    app.check()

    @app.agent("more", tools=["docs.read"])
    async def more(ctx: AgentContext) -> None: ...

    with pytest.raises(ConfigurationError, match=r"unknown tool 'docs\.read'"):
        app.check()


def test_secrets_are_read_late_and_shown_nowhere() -> None:
    asked = []

    def headers() -> dict[str, str]:
        asked.append(1)
        return {"Authorization": "Bearer s3cret"}

    made = server(command=None, url="http://host/mcp", headers=headers)
    assert asked == []
    assert made.headers() == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(made)
    with pytest.raises(ConfigurationError, match="headers must map names to strings"):
        server(command=None, url="http://host/mcp", headers=lambda: {"a": 1}).headers()


def test_a_missing_sdk_is_reported_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    need_sdk([])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    need_sdk([])
    with pytest.raises(ConfigurationError, match=r"pip install 'weft\[mcp\]'"):
        need_sdk([server()])


def test_declaring_a_server_loads_nothing_of_the_sdk() -> None:
    code = (
        "import sys; from runtime_core.app.app import App; App('a').add_mcp('files', command=['x']);"
        "import runtime_core.runs.turn;"
        "print([name for name in ('mcp', 'mcp_types', 'httpx2', 'anyio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tool_handler_has_the_servers_of_its_pools_only() -> None:
    app = App("app")
    app.add_mcp("files", command=["serve"], pool="disk")
    app.add_mcp("docs", url="http://127.0.0.1:1/mcp", when_down="fail")
    metrics = Metrics(CollectorRegistry(), "tool-handler")
    disk = MCPServers(app, metrics, ["disk"])
    assert disk.away("docs.read") is None
    waits = disk.away("files.read")
    assert waits is not None
    assert waits.wait_seconds is not None
    fails = MCPServers(app, metrics, [""]).away("docs.read")
    assert fails == ToolUnavailable(None, "MCP server 'docs' is unavailable: it has not been started yet")


def test_a_model_s_tools_wait_for_a_server_that_was_never_listed_and_for_nothing_else() -> None:
    app = App("app")
    app.add_mcp("files", command=["serve"])
    app.add_mcp("docs", command=["serve"], when_down="fail")

    def toolset(*named: str, published: Sequence[Manifest] = ()) -> object:
        return toolset_of("agent 'a'", named, (), (), "", app.functions, published)

    with pytest.raises(NotReady, match="agent 'a' is waiting for the first connection of MCP server 'files'"):
        toolset("files.*", "files.read")
    for named in (["files.*", "other"], ["docs.*"], ["other"]):
        with pytest.raises(ToolsMissing):
            toolset(*named)
    listed = Manifest("app/mcp/files", "1", tools={"files.read": ToolEntry()})
    assert toolset("files.*", published=[listed])
    with pytest.raises(ToolsMissing, match=r"files\.write"):
        toolset("files.*", "files.write", published=[listed])


def test_a_call_goes_to_the_pool_of_its_server() -> None:
    app = App("app")
    app.add_mcp("files", command=["serve"], pool="disk")
    call = Call("tool", "1", "files.read", b"{}", "digest00")
    delivery = Delivery(0, "agent", b"1-0")
    assert parts([call], delivery, app, 1)[1] == "tool:disk"
