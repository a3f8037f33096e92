"""The app for tests of end hooks: each hook appends a line to the file that the task's metadata names."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from runtime_core.declare.declaration import RetryPolicy
from tests.apps.fleet_app import note
from weft import AgentContext, App, Reject
from weft.hooks import HookEvent

app = App("ends")

HOOKS = {
    "error": ["handle_error", "send_alert"],
    "post_task_call": ["after"],
    "session_failed": ["close_session"],
    "finished": ["celebrate"],
}
ONCE = RetryPolicy(attempts=1)


def told(event: HookEvent, name: str) -> None:
    error = event.error["type"] if event.error is not None else ""
    note(event.metadata["path"], f"{name} {event.task_id} {event.agent} {event.name or '-'} {error}")


@app.hook("start")
def begin(event: HookEvent) -> None:
    told(event, "begin")


@app.hook("error")
def handle_error(event: HookEvent) -> None:
    told(event, "handle_error")


@app.hook("error")
async def send_alert(event: HookEvent) -> None:
    told(event, "send_alert")


@app.hook("error")
def dies_once(event: HookEvent) -> None:
    """Ends its process at the first attempt."""
    marker = Path(event.metadata["path"] + ".died")
    if not marker.exists():
        marker.touch()
        os._exit(3)
    told(event, "dies_once")


@app.hook("post_task_call")
def after(event: HookEvent) -> None:
    told(event, "after")


@app.hook("session_failed")
def close_session(event: HookEvent) -> None:
    told(event, "close_session")


@app.hook("finished")
def celebrate(event: HookEvent) -> None:
    told(event, "celebrate")


@app.agent("naps", retry=ONCE)
async def naps(ctx: AgentContext) -> None:
    await ctx.sleep(3600)


@app.agent("steps", retry=ONCE)
async def steps(ctx: AgentContext) -> None:
    for _ in range(10):
        await ctx.sleep(0)


@app.agent("spends", retry=ONCE)
async def spends(ctx: AgentContext) -> None:
    await ctx.spend(tokens=100)
    await ctx.sleep(0)


@app.agent("raises", retry=ONCE)
async def raises(ctx: AgentContext) -> None:
    raise ValueError("no")


@app.agent("rejects")
async def rejects(ctx: AgentContext) -> None:
    raise Reject("no")


@app.agent("hangs", retry=ONCE, timeout_seconds=0.2)
async def hangs(ctx: AgentContext) -> None:
    await ctx.sleep(0)
    await ctx.step(_forever, name="forever")


@app.agent("unspeakable", retry=ONCE)
async def unspeakable(ctx: AgentContext) -> object:
    return object()


@app.agent("dies")
async def dies(ctx: AgentContext) -> None:
    os._exit(3)


@app.agent("echo")
async def echo(ctx: AgentContext, value: object) -> object:
    return value


@app.agent("tells", retry=ONCE)
async def tells(ctx: AgentContext, messages: list[str]) -> None:
    """Sends each message to one instance, which takes some time."""
    for message in messages:
        await ctx.send("queue", message, key="one")


@app.agent("queue", retry=ONCE)
async def queue(ctx: AgentContext, message: str) -> str:
    if message == "waits":
        await ctx.human("go on?")
    if message == "fails":
        raise ValueError("no")
    return message


@app.agent("asks", retry=ONCE)
async def asks(ctx: AgentContext, key: str) -> object:
    return await ctx.agent("queue", "fails", key=key)


async def _forever() -> None:
    await asyncio.Event().wait()
