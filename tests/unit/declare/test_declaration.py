"""Limits as a program declares them: one clear error for each mistake, and the share of a partition."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NotRequired, cast

import pytest
from prometheus_client import CollectorRegistry
from typing_extensions import TypedDict

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.declaration import Place, check_shares
from runtime_core.errors import ConfigurationError
from runtime_core.host.app_services import add_tools
from runtime_core.host.host import Host
from runtime_core.telemetry.metrics import Metrics
from weft import AgentContext, App, Limit

PLACE = Place("app.py", 1)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "Limit limits nothing: give running=…, rate=… with seconds=…, or debounce=…"),
        ({"debounce": 0}, "Limit.debounce is 0: give seconds above 0"),
        ({"debounce": True}, "Limit.debounce is True"),
        ({"debounce": float("nan")}, "Limit.debounce is nan"),
        ({"debounce": "1"}, "Limit.debounce is '1'"),
        ({"running": 1, "replaces": "all"}, "Limit.replaces is 'all': give 'waiting' or 'running'"),
        ({"running": 2, "replaces": "running"}, "running is 2: give running=1"),
        ({"running": 0}, "Limit.running is 0: give a whole number from 1"),
        ({"running": -1}, "Limit.running is -1"),
        ({"running": True}, "Limit.running is True"),
        ({"running": 1.5}, "Limit.running is 1.5"),
        ({"rate": 0, "seconds": 1}, "Limit.rate is 0"),
        ({"rate": 10_001, "seconds": 1}, "Limit.rate is 10001: give a whole number from 1 to 10000"),
        ({"rate": 1}, "rate without seconds: give both"),
        ({"running": 1, "seconds": 60}, "seconds without rate: give both"),
        ({"rate": 1, "seconds": 0}, "Limit.seconds is 0: give a number from 0.1"),
        ({"rate": 1, "seconds": float("nan")}, "Limit.seconds is nan"),
        ({"rate": 1, "seconds": float("inf")}, "Limit.seconds is inf"),
        ({"rate": 1, "seconds": "60"}, "Limit.seconds is '60'"),
        ({"per": "customer", "running": 1}, "Limit.per is 'customer': give 'tenant', 'session', 'key', 'input.<name>'"),
        ({"per": "input.", "running": 1}, "Limit.per is 'input.'"),
        ({"per": "input.a|b", "running": 1}, "Limit.per is"),
        ({"per": None, "running": 1}, "Limit.per is None"),
    ],
)
def test_wrong_limits_are_refused_with_the_remedy(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Limit(**given)  # type: ignore[arg-type]  # some are of the wrong type
    assert named in str(caught.value)


def _agent(limit: object) -> None:
    app = App("limits")

    @app.agent("a", limit=limit)  # type: ignore[arg-type]  # some are of the wrong type
    async def a(ctx: AgentContext) -> None: ...


def _tool(limit: object) -> None:
    app = App("limits")

    @app.tool(limit=limit)  # type: ignore[call-overload, untyped-decorator]  # some are of the wrong type
    def t(query: str) -> None: ...


@pytest.mark.parametrize(
    ("declare", "limit", "named"),
    [
        (_agent, 3, "agent 'a' (tests/unit/declare/test_declaration.py"),
        (_agent, 3, "has limit=3: give a Limit(running=…), or a list of them"),
        (_agent, "tenant", "has limit='tenant'"),
        (_agent, [Limit(running=1), 2], "has limit=2"),
        (
            _agent,
            [Limit(running=1), Limit(running=2)],
            "two limits per 'nothing' with the same seconds: give one Limit",
        ),
        (_tool, Limit(debounce=1), "must be the only limit of an agent"),
        (_agent, [Limit(debounce=1), Limit(per="tenant", running=1)], "put running and rate into the same Limit"),
        (_tool, Limit(per="key", running=1), "only agents have keys: give 'input.<name>'"),
        (
            _agent,
            Limit(per="key", running=1, replaces="running"),
            "wait in its mailbox until the running one ends: declare the agent with interleave=True",
        ),
    ],
)
def test_wrong_declarations_are_refused(declare: Callable[[object], None], limit: object, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        declare(limit)
    assert named in str(caught.value)


def test_a_function_may_have_several_limits() -> None:
    limits = [
        Limit(per="tenant", running=2),
        Limit(rate=30, seconds=60),
        Limit(rate=500, seconds=3600),
        Limit(running=9),
    ]
    _agent(limits)
    _tool(limits)
    _agent(Limit(per="key", running=1))
    _tool(Limit(per="input.account.api_key", rate=1, seconds=0.1))


@pytest.mark.parametrize("running", [1, 2, 7, 8])
@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_the_shares_of_all_partitions_make_the_limit(running: int, partitions: int) -> None:
    shares = [Limit(running=running).share(number, partitions)[0] for number in range(partitions)]
    assert min(shares) >= 1
    assert sum(shares) == max(running, partitions)
    assert Limit(per="key", running=running).share(partitions - 1, partitions) == (running, 0, 0)
    assert Limit(rate=9, seconds=1.5).share(0, 3) == (0, 3, 1500)


def test_a_limit_below_the_number_of_partitions_is_refused_where_handlers_start() -> None:
    check_shares("agent 'a'", [Limit(running=4), Limit(per="key", running=1)], 4, PLACE)
    for limit, said in ((Limit(running=3), "running=3"), (Limit(rate=1, seconds=60), "rate=1")):
        with pytest.raises(
            ConfigurationError, match=f"agent 'a' .app.py:1. has a limit of {said}, but .* 4 partitions"
        ):
            check_shares("agent 'a'", [limit], 4, PLACE)


class Change(TypedDict):
    document: str
    author: NotRequired[dict[str, str]]


@pytest.mark.parametrize(
    ("input", "per", "named"),
    [
        (
            Change,
            "input.documnt",
            "has a limit per 'input.documnt', but no 'documnt' there: give one of document, author",
        ),
        (Change | None, "input.documnt", "but no 'documnt' there: give one of document, author"),
        (Change, "input.document.id", "but no 'id' there: only an object has named fields"),
        (str, "input.name", "but no 'name' there"),
        (Change, "input.document", ""),
        (Change, "input.author.name", ""),
        (dict[str, Any], "input.a.b", ""),
        (Any, "input.a", ""),
        (dict, "input.a.b", ""),
        (Change, "tenant", ""),
    ],
)
def test_a_limit_by_a_field_that_the_input_lacks_is_refused(input: object, per: str, named: str) -> None:
    app = App("limits")

    async def a(ctx: AgentContext, value: Any) -> None: ...

    a.__annotations__["value"] = input
    app.agent("a", limit=Limit(per=per, running=1))(a)
    with pytest.raises(ConfigurationError) if named else nullcontext() as caught:
        app.check()
    assert named in str(caught and caught.value)


def test_a_limit_by_an_argument_that_the_tool_lacks_is_refused() -> None:
    app = App("limits")

    @app.tool(limit=Limit(per="input.api_kye", rate=30, seconds=60))
    def search(query: str, api_key: str) -> None: ...

    with pytest.raises(ConfigurationError, match="but no 'api_kye' there: give one of query, api_key"):
        app.check()


async def _nowhere() -> Transport:
    raise AssertionError("nothing connects")


async def test_a_limit_of_an_mcp_server_needs_a_share_for_each_partition() -> None:
    app = App("limits")
    app.add_mcp("files", command=["serve"], limit={"read": Limit(running=1)})
    host = Host(_nowhere, Metrics(CollectorRegistry(), "tool-handler"))
    with pytest.raises(
        ConfigurationError, match=r"MCP server 'files' .* running=1, but the namespace has 2 partitions"
    ):
        add_tools(host, app, cast(list[EventBus], [None, None]), ("",))
