"""An app for the tests of the command, the `weft up` that runs it, and how a command ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).resolve().parents[3]


APP = """
import asyncio
from pathlib import Path

from weft import AgentContext, App, Limit, Reject, RetryPolicy
from weft.hooks import Deny, HookEvent
from weft.aworld import TrajectoryItem, TrajectoryStrategy
from weft.engines import Reference
from weft.llm import ModelCall

app = App("desk", version="7")
ONCE = RetryPolicy(attempts=1)
LATER = RetryPolicy(attempts=3, base_seconds=300.0)


@app.tool(retry=ONCE)
async def broken(text: str) -> str:
    if text != "right":
        raise ValueError(f"cannot do {text}")
    return "done right"


@app.tool(retry=RetryPolicy(attempts=3, base_seconds=0.001))
async def stubborn(text: str) -> str:
    raise RuntimeError(f"never {text}")


@app.tool(retry=LATER)
async def moody(text: str) -> str:
    raise RuntimeError("not now")


@app.reward
def length(item: TrajectoryItem, end: object) -> float:
    return float(len(str(item.action.content)))


class Nothing(TrajectoryStrategy):
    def keep(self, item: TrajectoryItem) -> bool:
        return False


@app.agent("echo")
async def echo(ctx: AgentContext, value: object) -> object:
    return value


@app.engine_function
def repeated(count: int) -> str:
    return "x" * count


@app.tool
def measured(text: Reference) -> int:
    return len(text.load())


@app.agent("large")
async def large(ctx: AgentContext, count: int) -> int:
    return await ctx.tool(measured, text=await ctx.engine().call(repeated, count=count))


@app.agent("spends")
async def spends(ctx: AgentContext, tokens: int) -> None:
    await ctx.spend(tokens=tokens, cost=0.5)


@app.agent("thinks")
async def thinks(ctx: AgentContext, given: object) -> None:
    for model in ("large", "small"):
        await ctx.model(model, {"messages": [{"role": "user", "content": "Where is Ulm?"}]}, answered)
    remedy = "set OPENAI_API_KEY " * 20 + "now"
    raise Reject("openai refused the model 'large':\\n  401 for Bearer abc123def456\\n" + remedy)


def answered(request: object, call: ModelCall) -> object:
    call.spend(model="large-1", tokens=4, input_tokens=3, output_tokens=1, cost=0.25)
    call.row(attributes={"gen_ai.response.model": "large-1"})
    part = {"part_kind": "text", "content": "On the Danube."}
    return {"message": {"kind": "response", "parts": [part]}, "finish_reason": "stop", "model": "large-1"}


@app.agent("strict")
async def strict(ctx: AgentContext, value: int) -> int:
    return value


@app.agent("shout")
async def shout(ctx: AgentContext, text: str) -> str:
    for word in text.split():
        await ctx.emit(word.upper() + " ")
    await ctx.emit({"words": len(text.split())})
    return text.upper()


@app.agent("rejecting")
async def rejecting(ctx: AgentContext, text: str) -> str:
    raise Reject(f"no {text}")


@app.agent("publisher")
async def publisher(ctx: AgentContext, text: str) -> object:
    return await ctx.human("Publish it?", data={"text": text}, type=bool)


@app.hook("before_tool_call")
def refuse(event: HookEvent) -> Deny:
    return Deny("not from here")


@app.agent("approver")
async def approver(ctx: AgentContext, text: str) -> object:
    approval = await ctx.approve("Send it?", data={"text": text}, timeout=3600, default=False)
    return [approval.verdict, approval.value]


@app.agent("asker")
async def asker(ctx: AgentContext, text: str) -> object:
    return await ctx.agent("publisher", text)


@app.agent("alone", limit=Limit(running=1))
async def alone(ctx: AgentContext) -> None:
    await ctx.human("well?")


@app.agent("sleeper")
async def sleeper(ctx: AgentContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "slept"


@app.agent("caller")
async def caller(ctx: AgentContext, text: str) -> object:
    return await ctx.tool(broken, text=text)


@app.agent("tries")
async def tries(ctx: AgentContext, text: str) -> object:
    return await ctx.tool(stubborn, text=text)


@app.agent("twice")
async def twice(ctx: AgentContext, text: str) -> object:
    return await ctx.gather(ctx.tool(broken, text=text), ctx.tool(broken, text=text))


@app.agent("patient")
async def patient(ctx: AgentContext, text: str) -> object:
    return await ctx.tool(moody, text=text)


@app.engine_function(pool="big")
def rank(text: str) -> str:
    return text


@app.agent("ranks")
async def ranks(ctx: AgentContext, text: str) -> object:
    return await ctx.engine("ray").call(rank, text=text)


@app.agent("blocked")
async def blocked(ctx: AgentContext, flag: str) -> str:
    Path(flag + ".begun").touch()
    while not Path(flag).exists():
        await asyncio.sleep(0.02)
    return "unblocked"
"""


@dataclass(frozen=True)
class Desk:
    """A `weft up` that runs, and its folder."""

    folder: Path
    url: str
    log: Path

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # Any: JSON
        return json.loads(self.out)


Weft = Callable[..., Ended]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "runtime_core.cli.main", *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return {**kept, "WEFT_DATA_DIR": str(folder / "data"), "WEFT_LEASE_SECONDS": "1", **more}


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_at, "the condition did not come true in time"
        time.sleep(0.02)


def shown_with(weft: Weft, task: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:  # Any: JSON
    """Return `weft task show --json` once it shows what is expected."""
    seen: dict[str, Any] = {}

    def holds() -> bool:
        ended = weft("task", "show", task, "--json")
        if ended.status == 0:
            seen.clear()
            seen.update(ended.json)
        return bool(seen) and bool(condition(seen))

    until(holds)
    return seen


def letters_of(weft: Weft, task: str) -> list[str]:
    return [letter["letter_id"] for letter in weft("dead", "list", "--task", task, "--json").json]
