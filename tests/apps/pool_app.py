"""An app with a tool of a pool, which handlers without WEFT_POOLS do not run."""

from __future__ import annotations

from weft import AgentContext, App

app = App("print-shop")


@app.tool(pool="gpu")
async def render_label(text: str) -> str:
    """Draw a label."""
    return f"<svg>{text}</svg>"


@app.agent("labeller")
async def labeller(ctx: AgentContext, text: str) -> str:
    """Draw a label on a machine with a graphics card."""
    await ctx.step(str.strip, text)
    return await ctx.tool(render_label, text=text)
