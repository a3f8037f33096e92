"""The examples of events in the documents have the members of the events that a broker publishes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from docs.generate_events import EXAMPLES
from runtime_core.errors import Rejected
from runtime_core.host.local import LocalApp
from runtime_core.wire.codec import decode
from runtime_core.wire.events import CANCELLED, COMPLETED, FAILED, StreamingMode, accepted, rejected
from weft import AgentContext, App, Client, Reject

WIRE = Path(__file__).parents[2] / "docs" / "wire.md"
app = App("desk")


@app.tool
def search(query: str) -> str:
    return query


@app.agent("writer")
async def writer(ctx: AgentContext, how: str) -> str:
    ctx.spend(tokens=1)
    await ctx.tool(search, query=how)
    await ctx.emit("Redis ")
    if how == "asks":
        await ctx.human("Publish this draft?", data=how, timeout=86_400, default=False)
    if how == "fails":
        raise Reject("no connection")
    return how


async def published(client: Client, how: str) -> dict[str, set[str]]:
    """Return the members of each type of event on a task's stream."""
    task = await client.submit("writer", how, stream=StreamingMode.ALL)
    found: dict[str, set[str]] = {}
    async for event in task.stream(mode=StreamingMode.ALL):
        found.setdefault(event.type, set()).update(event.data)
        if event.request_id:
            await task.cancel("no longer needed")
    return found


async def test_the_examples_have_the_members_of_real_events() -> None:
    refusal = Rejected("overloaded", "too many open tasks", 1.0, "t-1")
    members: dict[str, set[str]] = {}
    for fact in (accepted("t-1", at_ms=0), rejected("7-0", refusal, at_ms=0)):
        value = decode(fact.data)
        assert isinstance(value, dict)
        members[fact.type] = set(value)
    async with asyncio.timeout(60), LocalApp(app) as client:
        for how in ("completes", "fails", "asks"):
            for type, names in (await published(client, how)).items():
                members.setdefault(type, set()).update(names)
    assert {COMPLETED, FAILED, CANCELLED} <= set(members)
    examples = re.findall(r"^`(weft\.[a-z.]+)`.*?\n+```json\n(.*?)\n```", WIRE.read_text(), re.S | re.M)
    assert {type for type, _ in examples} == set(members) == {type for type, *_ in EXAMPLES}
    for type, text in [*examples, *((type, data.decode()) for type, _, _, data in EXAMPLES)]:
        value = decode(text.encode())
        assert isinstance(value, dict)
        assert set(value) <= members[type], type
