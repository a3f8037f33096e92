"""State of an agent without a key ends with its run: the log says so once, and not for what Weft itself keeps there."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from runtime_core.declare.declaration import Agent
from runtime_core.host.local import LocalApp
from runtime_core.runs.definition import handles
from weft import AgentContext, App

app = App("states")


@app.agent("counts")
async def counts(ctx: AgentContext, _: object) -> int:
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    await ctx.sleep(0.001)
    return int(ctx.state["n"])


@app.agent("fails")
async def fails(ctx: AgentContext, _: object) -> None:
    ctx.state["n"] = 1
    raise ValueError("no result")


@app.agent("reads")
async def reads(ctx: AgentContext, _: object) -> object:
    return ctx.state.get("n")


@app.agent("keeps-a-window")
async def keeps_a_window(ctx: AgentContext, _: object) -> None:
    ctx.state.setdefault("window", {})["summary"] = "what Weft keeps for a model"
    ctx.state.setdefault("memory", {})["a"] = [1]


class Counter(Agent):
    """Begins with a value of its class."""

    state: ClassVar[dict[str, object]] = {"n": 0, "seen": []}

    @handles(int)
    async def add(self, number: int, ctx: AgentContext) -> int:
        if number:
            ctx.state["seen"].append(number)
        return len(ctx.state["seen"])


app.add_agent("counter", Counter)


async def logged(caplog: pytest.LogCaptureFixture, *runs: tuple[str, Any, str]) -> list[str]:
    """Run agents (name, input, key), and return what is logged of state."""
    async with LocalApp(app) as client:
        for agent, input, key in runs:
            await (await client.submit(agent, input, key=key)).result(timeout=60)
    return [record.getMessage() for record in caplog.records if "ctx.state" in record.getMessage()]


async def test_a_change_without_a_key_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = await logged(caplog, *[("counts", None, "")] * 3)
    assert said.startswith(
        "agent 'counts' changed ctx.state (\"n\") in a run without a key, so the change is lost now that the run has "
        "ended (task "
    )
    assert "give the agent a key, as in client.submit('counts', …, key=\"…\")" in said


async def test_each_agent_is_named(caplog: pytest.LogCaptureFixture) -> None:
    said = await logged(caplog, ("counts", None, ""), ("counter", 1, ""))
    assert ["'counts'" in said[0], "'counter'" in said[1], '("seen")' in said[1]] == [True] * 3


@pytest.mark.parametrize(
    "run",
    [
        ("counts", None, "k"),
        ("counter", 1, "k"),
        ("counter", 0, ""),
        ("reads", None, ""),
        ("fails", None, ""),
        ("keeps-a-window", None, ""),
    ],
)
async def test_nothing_is_logged_if_nothing_is_lost(
    caplog: pytest.LogCaptureFixture, run: tuple[str, Any, str]
) -> None:
    assert await logged(caplog, run) == []
