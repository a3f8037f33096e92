"""Declared tools, and calls of them as a tool-handler makes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from runtime_core.app.app import App
from runtime_core.declare.tool import Tool, ToolContext

Call = Callable[..., Awaitable[object]]


def context() -> ToolContext:
    return ToolContext(task_id="t-1", run_id="r/1")


def declared(function: Callable[..., object], timeout_seconds: float = 60.0) -> Tool:
    app = App("test")
    app.tool(name="it", timeout_seconds=timeout_seconds)(function)
    app.check()
    return app.tools["it"]
