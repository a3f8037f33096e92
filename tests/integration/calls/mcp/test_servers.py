"""Agents call tools of MCP servers, with both transports and both protocols; each server is a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from runtime_core.app.app import App
from runtime_core.client.client import Client
from runtime_core.client.task_view import read_task
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.declare.mcp_server import MCPSettings, Mode
from runtime_core.errors import ToolError
from runtime_core.host.local import LocalApp
from runtime_core.runs.context import AgentContext
from tests.fleet import until
from tests.mcp_servers.ledger import Ledger
from tests.mcp_servers.running import ListeningServer
from tests.mcp_servers.stdio import command
from tests.servers.matrix import first_of
from tests.servers.proxy import Proxy
from weft import Limit, SubmitOptions, TaskHandle

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[4]
EXECUTED = [sys.executable, "-m", "tests.mcp_servers.desk"]
"""For tests of the process itself. Others start a fork of the same."""
ODD = [sys.executable, "-m", "tests.mcp_servers.odd"]
QUICK = RetryPolicy(attempts=4, base_seconds=0.05, factor=2.0, max_seconds=0.2)
SECONDS = 60.0
Way = Literal["stdio", "http"]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture(scope="module")
def stdio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command of the server `desk`."""
    with command(tmp_path_factory.mktemp("desk")) as found:
        yield found


@pytest.fixture
def desk(stdio: list[str], ledger: Ledger) -> MCPSettings:
    """The settings to connect to the server `desk` over stdio."""
    return {"command": stdio, "cwd": str(ROOT), "env": ledger.env}


@pytest.fixture(params=first_of("stdio-auto", "http-legacy", "stdio-legacy", "http-auto", least=2))
def way(request: pytest.FixtureRequest, tmp_path: Path, ledger: Ledger, desk: MCPSettings) -> Iterator[MCPSettings]:
    """The settings to connect to the server `desk`."""
    transport, mode = request.param.split("-")
    yield from _reached(transport, mode, tmp_path, ledger, desk)


@pytest.fixture(params=["stdio", "http"])
def either(request: pytest.FixtureRequest, tmp_path: Path, ledger: Ledger, desk: MCPSettings) -> Iterator[MCPSettings]:
    """Like `way`, with both transports and the negotiated protocol."""
    yield from _reached(request.param, "auto", tmp_path, ledger, desk)


def _reached(transport: str, mode: Mode, tmp_path: Path, ledger: Ledger, desk: MCPSettings) -> Iterator[MCPSettings]:
    if transport == "stdio":
        yield {**desk, "mode": mode}
        return
    with ListeningServer(tmp_path, ledger.env) as server:
        yield {"url": server.url, "mode": mode}


def app_with(**settings: Any) -> App:  # Any: what `add_mcp` takes
    """An app whose agent `use` calls one tool and returns its result or its error."""
    app = App("desk-app")
    app.add_mcp("desk", **{"retry": QUICK, **settings})

    @app.agent("use")
    async def use(ctx: AgentContext, wanted: dict[str, Any]) -> object:
        try:
            return await ctx.tool(wanted["tool"], **wanted.get("arguments", {}))
        except ToolError as error:
            return {"error": error.type, "message": error.message}

    return app


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Client, LocalApp]]:
    local = LocalApp(app_with(**settings))
    async with local as client:
        yield client, local


async def used(client: Client, tool: str, **arguments: object) -> Any:
    task = await client.submit("use", {"tool": tool, "arguments": arguments})
    return (await task.result(timeout=SECONDS)).output


async def seen(check: Callable[[], object], what: str) -> None:
    async def now() -> object:
        return check()

    await until(now, SECONDS, what)


async def test_an_agent_gets_the_result_of_a_tool_of_the_server(way: MCPSettings, ledger: Ledger) -> None:
    async with running(**way) as (client, _):
        assert await used(client, "desk.echo", text="Grüße 🌍 \u2028", times=2) == {"text": "Grüße 🌍 \u2028" * 2}
        assert await used(client, "desk.say", text="nur Text") == "nur Text"
        assert await used(client, "desk.nothing") is None
        several = await asyncio.gather(*(used(client, "desk.echo", text=str(number)) for number in range(20)))
        assert [one["text"] for one in several] == [str(number) for number in range(20)]
    assert len(ledger.lines("started")) == 1


async def test_the_server_gets_the_key_the_task_and_the_attempt(either: MCPSettings, ledger: Ledger) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running(**either) as (client, _):
        task = await client.submit(
            "use", {"tool": "desk.echo", "arguments": {"text": "a"}}, options=SubmitOptions(traceparent=trace)
        )
        await task.result(timeout=SECONDS)
    [line] = ledger.lines("echo")
    assert line["task"] == task.task_id
    assert line["attempt"] == 1
    assert line["key"].startswith(f"{task.task_id}/")
    assert line["traceparent"] == trace


async def test_progress_is_seen_on_the_stream_of_the_task(way: MCPSettings) -> None:
    async with running(**way) as (client, _):
        task = await client.submit("use", {"tool": "desk.counts", "arguments": {"to": 3}}, stream=True)
        told = [event.data["value"] async for event in task.stream() if event.type == "weft.output.delta"]
    assert told == [{"progress": n, "total": 3, "message": f"step {n} ✓"} for n in (1, 2, 3)]


async def test_cancelling_the_task_cancels_the_request_at_the_server(way: MCPSettings, ledger: Ledger) -> None:
    async with running(**way) as (client, _):
        task = await client.submit("use", {"tool": "desk.slow", "arguments": {"name": "n", "seconds": 600}})
        await seen(lambda: ledger.lines("begun"), "the call has begun")
        await task.cancel("enough")
        await seen(lambda: ledger.lines("cancelled"), "the server has learned of it")
        # The session goes on.
        assert await used(client, "desk.say", text="still here") == "still here"
    assert len(ledger.lines("started")) == 1


async def test_a_call_over_its_limit_is_cancelled_and_retried(either: MCPSettings, ledger: Ledger) -> None:
    settings: dict[str, Any] = {**either, "timeout_seconds": 1.0, "retry": RetryPolicy(attempts=2, base_seconds=0.05)}
    async with running(**settings) as (client, _):
        failed = await used(client, "desk.slow", name="n", seconds=600)
        assert failed["error"] == "TimeoutError"
        assert "passed its limit of 1 s" in failed["message"]
        await seen(lambda: len(ledger.lines("cancelled")) == 2, "both attempts were cancelled there")
    begun = ledger.lines("begun")
    assert [line["attempt"] for line in begun] == [1, 2]
    assert len({line["key"] for line in begun}) == 1


async def test_a_server_that_does_not_answer_at_all_is_restarted(ledger: Ledger) -> None:
    settings: dict[str, Any] = {"command": EXECUTED, "cwd": str(ROOT), "env": ledger.env, "timeout_seconds": 1.0}
    async with running(**settings, retry=RetryPolicy(attempts=20, base_seconds=0.05, max_seconds=0.1)) as (client, _):
        [started] = ledger.lines("started")
        os.kill(started["pid"], signal.SIGSTOP)
        assert await used(client, "desk.say", text="after") == "after"
    assert len(ledger.lines("started")) == 2


async def test_an_error_of_the_tool_is_its_answer_and_is_not_retried(either: MCPSettings, ledger: Ledger) -> None:
    async with running(**either) as (client, _):
        failed = await used(client, "desk.fails", text="no such ticket: ü")
        assert failed == {"error": "ToolError", "message": "Error executing tool fails: no such ticket: ü"}
    assert len(ledger.lines("fails")) == 1


async def test_arguments_are_checked_before_they_travel(desk: MCPSettings, ledger: Ledger) -> None:
    async with running(**desk) as (client, _):
        wrong = await used(client, "desk.echo", text="a", times="many")
        missing = await used(client, "desk.echo")
    assert wrong["error"] == missing["error"] == "InvalidInput"
    assert wrong["message"].startswith('arguments.times: "many" is not of type "integer"')
    assert missing["message"] == "arguments.text: is missing"
    assert ledger.lines("echo") == []


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_killed_server_is_restarted_and_the_call_repeated_with_its_key(
    mode: Mode, desk: MCPSettings, ledger: Ledger, tmp_path: Path
) -> None:
    async with running(**desk, mode=mode) as (client, local):
        answer = await used(client, "desk.dies_first", marker=str(tmp_path / "died"))
        first, second = ledger.lines("dies_first")
        assert answer == {"pid": second["pid"]}
        assert first["pid"] != second["pid"]
        assert first["key"] == second["key"]
        assert (first["attempt"], second["attempt"]) == (1, 2)
        text = local.metrics.exposition().decode()
        assert 'weft_mcp_server_up{server="desk"} 1.0' in text
        assert 'weft_mcp_restarts_total{server="desk"} 1.0' in text
        assert 'weft_mcp_calls_total{outcome="lost",server="desk"} 1.0' in text


async def test_an_idle_server_that_is_killed_is_restarted(ledger: Ledger) -> None:
    async with running(command=EXECUTED, cwd=str(ROOT), env=ledger.env) as (client, _):
        [started] = ledger.lines("started")
        os.kill(started["pid"], signal.SIGKILL)
        await seen(lambda: len(ledger.lines("started")) == 2, "it was started again without a call")
        assert await used(client, "desk.say", text="back") == "back"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_calls_wait_for_a_server_that_listens_again(mode: Mode, ledger: Ledger, tmp_path: Path) -> None:
    with ListeningServer(tmp_path, ledger.env) as server:
        async with running(url=server.url, mode=mode, retry=RetryPolicy(attempts=1)) as (client, local):
            assert await used(client, "desk.say", text="before") == "before"
            server.kill()
            waiting = [asyncio.create_task(used(client, "desk.pay", name=str(n))) for n in range(3)]
            await seen(
                lambda: 'weft_mcp_server_up{server="desk"} 0.0' in local.metrics.exposition().decode(),
                "it was seen that the server is away",
            )
            assert ledger.lines("begun") == []
            # No mark of a start is left behind: another tool-handler could not tell it from a call that has begun.
            bus = client.buses[0]

            async def unmarked() -> bool:
                return await bus.transport.call("HLEN", bus.keys.started) == 0

            await until(unmarked, SECONDS, "nothing counts as begun")
            server.start()
            # Not one attempt is used up by waiting, and nothing is done twice.
            assert await asyncio.gather(*waiting) == [{"paid": str(n)} for n in range(3)]
    assert [line["attempt"] for line in ledger.lines("begun")] == [1, 1, 1]


async def test_one_connection_that_fails_disturbs_no_call_on_another(ledger: Ledger, tmp_path: Path) -> None:
    with ListeningServer(tmp_path, ledger.env) as server:
        async with (
            Proxy(server.url) as proxy,
            running(url=f"{proxy.url}/mcp", retry=RetryPolicy(attempts=1)) as (client, local),
        ):
            # More than there are idle connections, so that some of these go on and some are refused.
            first = [asyncio.create_task(used(client, "desk.pay", name=f"a{n}", seconds=5.0)) for n in range(3)]
            await seen(lambda: len(ledger.lines("begun")) == 3, "the first calls have begun")
            proxy.refuse()
            second = [asyncio.create_task(used(client, "desk.pay", name=f"b{n}", seconds=0.5)) for n in range(5)]
            await seen(
                lambda: 'weft_mcp_calls_total{outcome="not_sent",server="desk"}' in local.metrics.exposition().decode(),
                "a call was refused",
            )
            assert await asyncio.gather(*first) == [{"paid": f"a{n}"} for n in range(3)]
            await proxy.up()
            assert await asyncio.gather(*second) == [{"paid": f"b{n}"} for n in range(5)]
    assert len(ledger.lines("begun")) == 8
    assert ledger.lines("cancelled") == []


async def test_a_call_with_a_lost_reply_is_repeated_with_its_key_or_ends_as_unknown(
    ledger: Ledger, tmp_path: Path
) -> None:
    with ListeningServer(tmp_path, ledger.env) as server:
        async with Proxy(server.url) as proxy, running(url=f"{proxy.url}/mcp") as (client, _):
            lost = proxy.lose_reply(b'"name":"pay"')
            failed = await used(client, "desk.pay", name="p", seconds=0.2)
            assert lost.is_set()
            assert failed["error"] == "UnknownOutcome"
            assert len(ledger.lines("begun", name="p")) == 1

            lost = proxy.lose_reply(b'"name":"slow"')
            assert await used(client, "desk.slow", name="s", seconds=0.2) == {"name": "s"}
            assert lost.is_set()
            begun = ledger.lines("begun", name="s")
            assert len(begun) == 2
            assert len({line["key"] for line in begun}) == 1


async def test_a_call_that_may_not_be_repeated_ends_as_unknown_when_its_server_dies(
    desk: MCPSettings, ledger: Ledger
) -> None:
    async with running(**desk) as (client, _):
        failed = await used(client, "desk.dies")
        assert failed["error"] == "UnknownOutcome"
        assert "find out whether it took effect" in failed["message"]
        # And the next call is served by the next process.
        assert await used(client, "desk.pay", name="after") == {"paid": "after"}
    assert len(ledger.lines("dies")) == 1


async def test_a_call_that_may_not_be_repeated_ends_as_unknown_over_its_limit(
    desk: MCPSettings, ledger: Ledger
) -> None:
    async with running(**desk, timeout_seconds=1.0) as (client, _):
        failed = await used(client, "desk.pay", name="n", seconds=600)
    assert failed["error"] == "UnknownOutcome"
    assert "passed its limit" in failed["message"]
    assert len(ledger.lines("begun")) == 1


async def test_tools_that_come_and_go_are_followed(way: MCPSettings) -> None:
    async with running(**way) as (client, _):
        unknown = await used(client, "desk.grown")
        assert unknown["error"] == "UnknownName"
        await used(client, "desk.grow")

        async def grown() -> object:
            return await used(client, "desk.grown") == {"grown": True}

        await until(grown, SECONDS, "the new tool is called")
        await used(client, "desk.shrink")

        async def gone() -> object:
            answer: dict[str, object] = await used(client, "desk.grown")
            return answer.get("error") == "UnknownName"

        await until(gone, SECONDS, "the name is gone")


async def test_a_large_result_is_returned_and_one_over_the_limit_is_refused_by_name(either: MCPSettings) -> None:
    async with running(**either) as (client, _):
        given = await used(client, "desk.large", size=900_000)
        assert len(given["text"]) == 900_000
        refused = await used(client, "desk.large", size=1_200_000)
        assert refused["error"] == "InvalidInput"
        assert refused["message"].startswith("result: is 1,2")


async def test_a_tool_that_cannot_be_used_is_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with running(command=ODD, cwd=str(ROOT), tools=["bad*", "picture", "texts", "promises"]) as (client, _):
        picture = await used(client, "desk.picture")
        assert picture == [
            {"type": "text", "text": "look"},
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
        ]
        assert await used(client, "desk.texts", items=[1, 2]) == "eins\nzwei"
        wrong = await used(client, "desk.texts", items=[1, 0])
        assert wrong["message"] == "arguments.items.1: 0 is less than the minimum of 1"
        broken = await used(client, "desk.promises")
        assert broken["error"] == "InvalidResult"
        for name in ("secret", "bad_type", "bad_reference"):
            assert (await used(client, f"desk.{name}"))["error"] == "UnknownName"
    left_out = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert [line.split(": ")[1] for line in left_out] == [
        f"the tool {name!r} is left out" for name in ("bad_type", "bad_reference", "bad name")
    ]
    assert 'properties.a.type: "strin" is not valid' in left_out[0]
    assert "'/$defs/none' does not exist" in left_out[1]


async def test_a_server_that_cannot_start_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = app_with(command=["no-such-program-anywhere"], when_down="fail")

    @app.tool
    async def own() -> str:
        return "served"

    async with LocalApp(app) as client:
        assert await used(client, "own") == "served"
        failed = await used(client, "desk.echo", text="a")
    assert failed["error"] == "Unavailable"
    assert "program 'no-such-program-anywhere' is not on the PATH" in failed["message"]
    lines = [record.getMessage() for record in caplog.records if "is unavailable, next try" in record.getMessage()]
    assert lines
    assert "\n" not in lines[0]


async def test_no_process_is_left_when_the_app_ends(ledger: Ledger) -> None:
    async with running(command=EXECUTED, cwd=str(ROOT), env=ledger.env) as (client, _):
        await used(client, "desk.say", text="a")
    [started] = ledger.lines("started")
    assert not Path(f"/proc/{started['pid']}").exists()
    # It was asked to end, not killed.
    assert len(ledger.lines("stopped")) == 1


async def test_the_stderr_of_a_server_is_logged_line_by_line(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="runtime_core.calls.mcp.transport")
    async with running(command=EXECUTED, cwd=str(ROOT), env=ledger.env):
        pass
    assert "MCP server 'desk': desk: ready to serve ✓" in [record.getMessage() for record in caplog.records]


async def test_a_limit_counts_the_calls_of_all_tools_of_a_server(desk: MCPSettings, ledger: Ledger) -> None:
    async with running(**desk, limit=Limit(running=2), repeatable=True) as (client, _):
        names = [f"{tool}-{number}" for number in range(4) for tool in ("slow", "pay")]
        calls = [used(client, f"desk.{name.partition('-')[0]}", name=name, seconds=0.05) for name in names]
        await asyncio.gather(*calls)
    open_calls, most = 0, 0
    for line in ledger.lines():
        open_calls += {"begun": 1, "ended": -1}.get(line["event"], 0)
        most = max(most, open_calls)
    assert (len(ledger.lines("ended")), most) == (len(names), 2)


async def test_a_limit_may_count_one_tool_by_an_argument(desk: MCPSettings, ledger: Ledger) -> None:
    limit = {"slow": Limit(per="input.name", rate=1, seconds=60)}
    async with running(**desk, limit=limit) as (client, _):
        await used(client, "desk.slow", name="a", seconds=0)
        await used(client, "desk.slow", name="b", seconds=0)
        await used(client, "desk.pay", name="a")
        task = await client.submit("use", {"tool": "desk.slow", "arguments": {"name": "a", "seconds": 0}})
        waits = await seen_wait(task)
    assert waits["limit"].startswith("tool:desk.slow|input.name/60s|#")
    assert [line["name"] for line in ledger.lines("ended")] == ["a", "b", "a"]


async def seen_wait(task: TaskHandle) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    async def limited() -> object:
        view = await read_task(task.bus, task.task_id)
        found.extend(wait for wait in (view or {})["waits_for"] if "limit" in wait)
        return found

    await until(limited, SECONDS, "the call waits for a slot")
    return found[0]
