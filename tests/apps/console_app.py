"""The app of the console's tests and screenshots: tasks that fail, wait for a person, take long, and stream."""

from __future__ import annotations

import time
from pathlib import Path

from weft import AgentContext, App, RetryPolicy

app = App("newsroom")


@app.tool
async def search(query: str, limit: int = 3) -> list[str]:
    """Search the archive."""
    return [f"{query}: page {number}" for number in range(1, limit + 1)]


@app.tool
def print_proof(path: str) -> str:
    """Wait until a file is there."""
    while not Path(path).exists():
        time.sleep(0.01)
    return path


@app.tool(retry=RetryPolicy(attempts=3, base_seconds=0.2))
async def fetch_quotes(symbol: str) -> dict[str, float]:
    """Fetch the prices of a share."""
    return parse_quotes(symbol, "<html>502 Bad Gateway</html>")


def parse_quotes(symbol: str, page: str) -> dict[str, float]:
    if not page.startswith("{"):
        raise ValueError(f"the exchange returned no JSON for {symbol}: {page}")
    return {symbol: 1.0}


@app.agent("reporter")
async def reporter(ctx: AgentContext, topic: str) -> str:
    """Research a topic and write a short text about it."""
    await ctx.emit(f"Looking for sources on {topic}.\n")
    pages = await ctx.gather(*(ctx.tool(search, query=f"{topic} {part}") for part in ("history", "today", "outlook")))
    await ctx.spend(model="gpt-5-mini", input_tokens=1240, output_tokens=310, cost=0.0042)
    text: str = await ctx.agent("writer", {"topic": topic, "pages": pages})
    await ctx.emit(text)
    return text


@app.agent("writer")
async def writer(ctx: AgentContext, facts: dict[str, object]) -> str:
    """Turn facts into prose."""
    await ctx.spend(model="gpt-5", input_tokens=2210, output_tokens=640, cost=0.0185)
    return f"{facts['topic']} in three paragraphs."


@app.agent("analyst")
async def analyst(ctx: AgentContext, symbol: str) -> str:
    """Fail in a tool: the exchange answers with HTML."""
    await ctx.tool(search, query=symbol)
    summary: str = await ctx.agent("pricing", symbol)
    return summary


@app.agent("pricing")
async def pricing(ctx: AgentContext, symbol: str) -> str:
    """Fetch prices."""
    quotes = await ctx.tool(fetch_quotes, symbol=symbol)
    return str(quotes)


@app.agent("editor")
async def editor(ctx: AgentContext, headline: str) -> str:
    """Ask a person what to do with an article."""
    await ctx.tool(search, query=headline, limit=1)
    decision: str = await ctx.human(
        f"Publish “{headline}”, or what is missing?", data={"headline": headline, "words": 640}
    )
    return f"{decision}: {headline}"


@app.agent("approver")
async def approver(ctx: AgentContext, text: str) -> list[object]:
    """Ask a person to approve a text, or to change it."""
    approval = await ctx.approve("Send this newsletter to 12,000 readers?", data=text)
    return [approval.verdict, approval.value, approval.reason]


@app.agent("archivist")
async def archivist(ctx: AgentContext, days: int) -> str:
    """Sleep for days between two searches."""
    await ctx.tool(search, query="old articles")
    await ctx.sleep(86_400.0 * days)
    return "archived"


@app.agent("listener")
async def listener(ctx: AgentContext, topic: str) -> object:
    """Wait for a message."""
    return await ctx.receive("breaking-news")


@app.agent("hasty")
async def hasty(ctx: AgentContext, text: str) -> str:
    """Stream a draft that its second attempt replaces."""
    await ctx.emit(f"draft {ctx.attempt} of {text} ", chunk=True)
    if ctx.attempt == 1:
        raise ConnectionError("the model's connection broke in the middle of the text")
    return f"{text} , in its second version"


@app.agent("printer")
async def printer(ctx: AgentContext, path: str) -> str:
    """Call a tool that takes long."""
    proof: str = await ctx.tool(print_proof, path=path)
    return proof
