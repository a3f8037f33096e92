"""Type checkers find wrong arguments and results of calls by function, and accept correct ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

DECLARED = """
from dataclasses import dataclass
from datetime import timedelta
from typing import assert_type

from weft import Agent, AgentContext, App, Client, SubmitOptions, ToolContext, handles

app = App("typed")


@dataclass
class Order:
    item: str


@app.agent("greet")
async def greet(ctx: AgentContext, name: str) -> str:
    return name


@app.agent("now")
async def now(ctx: AgentContext) -> float:
    return 0.0


@app.agent("buy")
async def buy(ctx: AgentContext, order: Order) -> Order:
    return order


@app.agent("offer")
async def offer(ctx: AgentContext, item: str = "tea") -> Order:
    return Order(item)


@app.tool
async def search(query: str, limit: int = 3) -> list[Order]:
    return []


@app.tool(name="counts", timeout_seconds=3)
def count(query: str) -> dict[str, int]:
    return {}


@app.tool
async def charge(ctx: ToolContext, order: Order) -> Order:
    return order


def plain(count: int, unit: str = "") -> str:
    return unit * count


def weigh(order: Order) -> Order:
    return order


async def pack(count: int) -> int:
    return count


class Clerk(Agent):
    @handles(Order)
    async def take(self, message: Order, ctx: AgentContext) -> None: ...


app.add_agent("clerk", Clerk)


async def main(client: Client, ctx: AgentContext) -> None:
"""

GOOD = """
    task = await client.submit(greet, "Ann", key="a", session_id="s", task_id="t", stream=True, timeout=None)
    answer: object = (await task.result(timeout=5)).value()
    await client.submit(greet, "Ann", options=SubmitOptions(max_steps=3, tenant="acme"))
    await client.submit(now)
    await client.submit(now, key="a")
    await client.submit(buy, Order("tea"))
    await client.submit("greet", {"any": "JSON"})
    await client.submit(Clerk, Order("tea"))
    orders: list[Order] = await ctx.tool(search, query="tea")
    orders = await ctx.tool(search, "tea", limit=5)
    counts: dict[str, int] = await ctx.tool(count, "tea")
    order: Order = await ctx.tool(charge, Order("tea"))
    order = await ctx.tool(charge, order=order)
    name: str = await ctx.agent(greet, "Ann", key="a")
    time: float = await ctx.agent(now)
    order = await ctx.agent(offer)
    order = await ctx.agent(offer, "milk")
    other: int = await ctx.tool("elsewhere", anything=1)
    other = await ctx.agent("elsewhere", {"any": "JSON"})
    await ctx.agent(Clerk, Order("tea"))
    sent: str = await ctx.send(buy, Order("tea"))
    plain_json: str = await ctx.step(plain, 1, unit="kg")
    plain_json = await ctx.step(plain, 1, name="weigh")
    plain_json = await ctx.step(lambda: "JSON")
    read: dict[str, str] = await ctx.step(weigh, Order("tea"))
    assert_type(await ctx.step(plain, 1), str)
    assert_type(await ctx.step(plain, 1, name="weigh"), str)
    assert_type(await ctx.step(pack, 1), int)
    assert_type(await ctx.step(pack, 1, name="pack"), int)
    assert_type(await ctx.background(ctx.agent(offer)), Order)
    assert_type(await ctx.wait_for(pack(1), timeout=3), int)
    await client.schedule("s", greet, "Ann", every=60)
    await client.schedule("s", now, cron="0 9 * * *")
    await client.schedule("s", offer, delay=3, key="a")
    await client.schedule("s", "elsewhere", {"any": "JSON"}, every=timedelta(days=1))
    await client.schedule("s", Clerk, Order("tea"), every=60)
    print(answer, orders, counts, order, name, time, other, sent, plain_json, read)
"""

BAD = """
    await client.submit(greet, 5)
    await client.submit(greet)
    await client.submit(now, "an input")
    await client.submit(buy, "tea")
    await client.submit(greet, "Ann", keys="a")
    await client.submit(greet, "Ann", timeout="soon")
    await client.submit(greet, "Ann", options={"max_steps": 3})
    await client.submit(greet, "Ann", max_steps=3)
    client.submit(greet, "Ann").result()
    await (await client.submit(greet, "Ann")).result(seconds=3)
    await client.submit(len, "Ann")
    await ctx.tool(search, query=1)
    await ctx.tool(search, q="tea")
    await ctx.tool(search)
    await ctx.tool(search, "tea", 3, 4)
    await ctx.tool(charge, Order("tea"), Order("tea"))
    (await ctx.tool(search, "tea")).item
    (await ctx.tool(charge, Order("tea"))).price
    await ctx.tool(5)
    await ctx.agent(greet, 5)
    await ctx.agent(greet)
    await ctx.agent(now, "an input")
    (await ctx.agent(buy, Order("tea"))).price
    await ctx.agent(search, "tea")
    await ctx.send(buy, "tea")
    await ctx.step(plain, "1")
    await ctx.step(plain)
    await ctx.step(plain, 1, other=3)
    await ctx.step(greet)
    (await ctx.step(plain, 1)).price
    (await ctx.step(pack, 1, name="pack")).price
    (await ctx.background(ctx.agent(offer))).price
    await client.schedule("s", greet, 5, every=60)
    await client.schedule("s", greet, every=60)
    await client.schedule("s", now, "an input", every=60)
    await client.schedule("s", len, "Ann", every=60)
    await client.schedule("s", greet, "Ann", every="daily")
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    for name, calls in (("good", GOOD), ("bad", BAD)):
        (folder / f"{name}.py").write_text(DECLARED + calls.lstrip("\n"))
    return folder


def assert_each_bad_call_is_refused(found: set[tuple[str, int]], output: str) -> None:
    first = DECLARED.count("\n") + 1
    assert {(name, line - first) for name, line in found} == {
        ("bad", number) for number in range(len(BAD.strip().splitlines()))
    }, output


@pytest.mark.slow
def test_mypy_accepts_the_good_calls_and_refuses_each_bad_one(programs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(programs / "good.py"), str(programs / "bad.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    wrong = re.findall(r"/(good|bad)\.py:(\d+): error: ", done.stdout)
    assert_each_bad_call_is_refused({(name, int(line)) for name, line in wrong}, done.stdout + done.stderr)


@pytest.mark.slow
def test_pyright_accepts_the_good_calls_and_refuses_each_bad_one(programs: Path) -> None:
    # Expressions that stand alone, as in BAD, are what the checker would otherwise also report.
    settings = {
        "typeCheckingMode": "strict",
        "reportUnusedExpression": False,
        "reportUnusedImport": False,
        "reportUnusedCoroutine": False,
    }
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(Path(sys.executable).with_name("basedpyright")), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [*command, "good.py", "bad.py"], cwd=programs, capture_output=True, text=True, timeout=280, check=False
    )
    wrong = {
        (Path(found["file"]).stem, found["range"]["start"]["line"] + 1)
        for found in json.loads(done.stdout)["generalDiagnostics"]
        if found["severity"] == "error"
    }
    assert_each_bad_call_is_refused(wrong, done.stdout + done.stderr)
