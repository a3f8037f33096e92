"""A type checker finds a wrong input or option of `client.submit(function, …)`, and accepts a correct one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

DECLARED = """
from dataclasses import dataclass

from weft import Agent, AgentContext, App, Client, SubmitOptions, handles

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


class Clerk(Agent):
    @handles(Order)
    async def take(self, message: Order, ctx: AgentContext) -> None: ...


app.add_agent("clerk", Clerk)


async def main(client: Client) -> None:
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
"""


@pytest.mark.slow
def test_mypy_accepts_the_good_calls_and_refuses_each_bad_one(tmp_path: Path) -> None:
    for name, calls in (("good", GOOD), ("bad", BAD)):
        (tmp_path / f"{name}.py").write_text(DECLARED + calls.lstrip("\n"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *(str(tmp_path / f"{name}.py") for name in ("good", "bad"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    wrong = re.findall(r"/(good|bad)\.py:(\d+): error: ", done.stdout)
    first = DECLARED.count("\n") + 1
    assert {(name, int(line) - first) for name, line in wrong} == {
        ("bad", number) for number in range(len(BAD.strip().splitlines()))
    }, done.stdout + done.stderr
