"""An app whose guard denies some calls of a tool, and asks a person about others."""

from __future__ import annotations

from weft import App
from weft.hooks import Allow, Ask, Deny, HookEvent

app = App("shed")


@app.tool
async def erase(path: str, times: int = 1) -> str:
    """Erase a file."""
    return f"erased {path} {times} times"


@app.tool
async def tidy() -> str:
    """Tidy up."""
    return "tidy"


@app.hook("before_tool_call", guard=True, always=True)
def only_temporary(event: HookEvent) -> Allow | Deny | Ask:
    path = str(event.payload.get("path", "/tmp/"))
    if not path.startswith("/tmp/"):
        return Deny("only files under /tmp/ may be erased")
    return Ask(f"Erase {path}?") if "keep" in path else Allow()
