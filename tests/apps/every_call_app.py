"""An agent that uses every method of its context, so that a kill may hit any of them."""

from __future__ import annotations

from datetime import timedelta

from tests.apps.fleet_app import note
from weft import Agent, AgentContext, App, ToolContext, handles
from weft.hooks import Change, HookEvent

app = App("every-call")
app.add_sessions()


@app.tool
async def effect(ctx: ToolContext, path: str, name: str) -> str:
    """An external effect, identified by its idempotency key."""
    note(path, f"{name} {ctx.idempotency_key}")
    return name


@app.engine_function
def double(number: int) -> int:
    return 2 * number


@app.hook("after_llm_call", always=True)
def louder(event: HookEvent) -> Change | None:
    """Change the parrot's answer, which is text; those of other models stay."""
    return Change(event.payload.upper()) if isinstance(event.payload, str) else None


@app.agent("helper")
async def helper(ctx: AgentContext, wanted: dict[str, str]) -> str:
    await ctx.sleep(0.02)
    ctx.context.increment("helped")
    await ctx.spend(tokens=1)
    return str(await ctx.tool(effect, path=wanted["path"], name=wanted["name"]))


@app.agent("hears", topics=["done.*"])
async def hears(ctx: AgentContext, wanted: dict[str, str]) -> str:
    assert ctx.topic == "done.work", ctx.topic
    return str(await ctx.tool(effect, path=wanted["path"], name=f"heard-{wanted['name']}"))


class Tally(Agent):
    """Counts per key. It calls another agent meanwhile, which may call it back."""

    @handles(int)
    async def on_number(self, number: int, ctx: AgentContext) -> int:
        ctx.state["sum"] = ctx.state.get("sum", 0) + number
        if number > 0:
            # The other asks this instance back: a nested turn, which adds nothing.
            back: int = await ctx.agent("asks-back", ctx.key)
            assert back == ctx.state["sum"], (back, ctx.state)
        return int(ctx.state["sum"])


app.add_agent("tally", Tally)


@app.agent("asks-back")
async def asks_back(ctx: AgentContext, key: str) -> int:
    return int(await ctx.agent("tally", 0, key=key))


@app.agent("every-call")
async def every_call(ctx: AgentContext, path: str) -> dict[str, object]:
    name = ctx.task_id
    began, place, chance = ctx.now(), ctx.uuid(), ctx.random()

    async def branch(number: int) -> str:
        await ctx.sleep(0.01 * number)
        return str(await ctx.tool("effect", path=path, name=f"{name}-branch{number}"))

    at_once = await ctx.gather(
        ctx.tool(effect, path=path, name=f"{name}-tool"),
        ctx.agent(helper, {"path": path, "name": f"{name}-helper"}),
        ctx.engine("local").call(double, number=21),
        branch(1),
        branch(2),
    )
    await ctx.emit("half way")
    job = ctx.background(ctx.tool(effect, path=path, name=f"{name}-job"))
    assert await ctx.hook("before_context_compact", {"task": name}) == {"task": name}
    local = await ctx.step(lambda: [str(place), chance], name="local")
    await ctx.send(helper, {"path": path, "name": f"{name}-sent"})
    await ctx.publish("done.work", {"path": path, "name": name}, source=name)
    sums = [await ctx.agent("tally", number, key=name) for number in (1, 2)]
    said = await ctx.model("parrot", {"say": name}, lambda request: request["say"])
    assert said == name.upper(), said
    await ctx.note("said", said)
    await ctx.spend(tokens=10, requests=1, model="parrot")
    used = await ctx.usage()
    assert used["tokens"] == 11, used
    assert ctx.context.count("helped") == 1
    async with ctx.session() as session:
        session.increment("tasks")
    approved = await ctx.approve("Really?", data={"task": name}, timeout=timedelta(days=3))
    assert (approved.verdict, approved.value) == ("edit", "edited"), approved
    answered = await ctx.human("Go on?", data={"task": name}, timeout=timedelta(days=3))
    silent = await ctx.human("Nobody answers this.", timeout=0.05, default="by default")
    assert await job == f"{name}-job"
    await ctx.emit({"sums": sums})
    assert ctx.now() >= began
    assert local == [str(place), chance]
    return {"at_once": at_once[2], "sums": sums, "answered": answered, "silent": silent, "late": ctx.random() == chance}
