"""Small agents and a tool for tests of tasks and swarms."""

from __future__ import annotations

from weft import AgentContext, TaskResponse


async def upper(ctx: AgentContext, text: str) -> str:
    return text.upper()


async def exclaim(ctx: AgentContext, text: str) -> str:
    return text + "!"


async def question(ctx: AgentContext, text: str) -> str:
    return text + "?"


async def join(ctx: AgentContext, parts: list[str]) -> str:
    return " ".join(parts)


async def broken(ctx: AgentContext, text: str) -> str:
    raise ValueError(f"no {text}")


async def add(a: int, b: int) -> int:
    return a + b


def failure(response: TaskResponse) -> tuple[str, str]:
    assert response.error is not None
    return response.error["type"], response.error["message"]
