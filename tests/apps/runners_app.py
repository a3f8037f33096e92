"""The app for tests that kill services while they run runners and swarms."""

from __future__ import annotations

import asyncio
from typing import Any

from runtime_core.app.app import App
from runtime_core.declare.tool import ToolContext
from runtime_core.errors import ToolError
from runtime_core.integrations.aworld.orchestration import Swarm
from runtime_core.integrations.aworld.runner import Runner, TaskRunner
from runtime_core.integrations.aworld.topology import Loopable
from runtime_core.runs.context import AgentContext
from runtime_core.runs.policy import ActionModel, Observation
from runtime_core.wire.events import TaskResponse
from tests.apps.fleet_app import note

app = App("runners")


@app.tool
async def effect(ctx: ToolContext, path: str, name: str, seconds: float = 0.0) -> str:
    """An external effect, identified by its idempotency key."""
    note(path, f"tool {name} {ctx.idempotency_key}")
    await asyncio.sleep(seconds)
    return name


class Noting(TaskRunner):
    """Logs each phase once, by steps, and uses a tool in between."""

    async def pre_run(self) -> None:
        await super().pre_run()
        await self.ctx.step(note, self.observation.content, "pre", name="pre")

    async def do_run(self, context: object = None) -> TaskResponse:
        path = str(self.observation.content)
        answers = []
        for number in range(3):
            await self.ctx.step(note, path, f"do {number}", name="do")
            answers.append(await self.tools["effect"].step({"path": path, "name": f"t{number}", "seconds": 0.6}))
            await self.ctx.step(busy, path, number, name="busy")
        return TaskResponse(task_id=self.task.id, content=answers, status="success")

    async def post_run(self) -> None:
        await self.ctx.step(note, self.observation.content, "post", name="post")
        await super().post_run()


async def busy(path: str, number: int) -> None:
    """Work inside the handler. A kill may interrupt it, and it then begins again."""
    note(path, f"busy {number}")
    await asyncio.sleep(0.4)


class FailsAlways(Runner):
    """Logs each attempt and fails."""

    async def do_run(self, context: object = None) -> TaskResponse:
        await self.ctx.step(note, self.observation.content, "try", name="try")
        raise ValueError("never")


app.add_runner(Noting)
app.add_runner(FailsAlways)


def worker(name: str) -> None:
    async def work(ctx: AgentContext, seen: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        await ctx.step(note, seen["path"], f"agent {name}", name="note")
        await ctx.tool(effect, path=seen["path"], name=name, seconds=0.4)
        return {"path": seen["path"], "way": [*seen["way"], name]}

    app.agent(name)(work)


for each in ("first", "left", "right"):
    worker(each)


@app.tool
async def secret(path: str) -> str:
    note(path, "tool secret")
    return "the secret"


@app.agent("pries")
async def pries(ctx: AgentContext, seen: dict[str, Any]) -> str:  # Any: JSON
    """Works, then calls a tool that its task may not allow."""
    await ctx.step(busy, seen["path"], 7, name="busy")
    await ctx.tool(effect, path=seen["path"], name="allowed")
    try:
        return str(await ctx.tool(secret, path=seen["path"]))
    except ToolError as error:
        return error.type


@app.agent("queries")
async def queries(ctx: AgentContext, text: str) -> str:
    return f"{text}: {await ctx.human('Publish?')}"


@app.agent("joins")
async def joins(ctx: AgentContext, parts: list[dict[str, Any]]) -> dict[str, Any]:  # Any: JSON
    return {"path": parts[0]["path"], "way": [part["way"] for part in parts]}


class Learns:
    """An object with attributes that must survive a kill: it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
        self.calls += 1
        if self.calls > 4:
            return [ActionModel(policy_info=self.calls)]
        path = observation.content if self.calls == 1 else observation.info.get("path", "")
        return [
            ActionModel(tool_name="effect", params={"path": str(path), "name": f"c{self.calls}", "seconds": 0.3}),
        ]


app.add_agent("learns", Learns())
app.add_swarm("loop", Swarm(Loopable("first", 9, lambda output: len(str(output)) > 100)))
