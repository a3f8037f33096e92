"""Agents that a model drives, and one-line helpers for their tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from runtime_core.declare.declaration import RetryPolicy
from tests.openai_server.driver import OpenAIServer
from weft import App, Client, LLMAgent, TaskHandle

QUICK = RetryPolicy(attempts=4, base_seconds=0.01, max_seconds=0.05, jitter=0.5)
WAIT = 120.0


class Desk:
    """An app whose agents ask the test server; its tools log each call."""

    def __init__(self, server: OpenAIServer) -> None:
        self.server = server
        self.app = App("desk")
        self.called: list[tuple[str, Any]] = []  # Any: the arguments
        called = self.called

        @self.app.tool
        def search(query: str, limit: int = 5) -> dict[str, Any]:  # Any: JSON
            """Search the web."""
            called.append(("search", query))
            return {"found": f"{query} is fine", "limit": limit}

        @self.app.tool
        def pay(amount: int) -> str:
            """Pay."""
            called.append(("pay", amount))
            return f"paid {amount}"

        @self.app.tool(name="files.read_file", retry=RetryPolicy(attempts=1))
        def read_file(path: str) -> str:
            called.append(("files.read_file", path))
            raise FileNotFoundError(f"there is no {path}")

    def add(self, name: str = "researcher", **given: Any) -> LLMAgent:  # Any: as LLMAgent takes them
        agent = LLMAgent(
            given.pop("model", "openai-chat:gpt-test"),
            **{"base_url": self.server.url, "api_key": self.server.key, "retry": QUICK, **given},
        )
        self.app.add_agent(name, agent)
        return agent

    def said(self, number: int = -1) -> list[dict[str, Any]]:  # Any: JSON
        """Return the messages of a request, by its place in the ledger."""
        entries = self.server.ledger()
        messages: list[dict[str, Any]] = self.server.request(entries[number].number)["messages"]
        return messages

    def results(self, number: int = -1) -> list[str]:
        """Return the tools' results in a request."""
        return [str(message["content"]) for message in self.said(number) if message["role"] == "tool"]

    def tools(self, number: int = -1) -> list[dict[str, Any]]:  # Any: JSON
        """Return the tools that a request offers."""
        entries = self.server.ledger()
        return [tool["function"] for tool in self.server.request(entries[number].number).get("tools", [])]


async def ask(client: Client, given: object = "Find out.", agent: str = "researcher", **more: Any) -> Any:  # Any: JSON
    """The agent's answer."""
    task = await client.submit(agent, given, **more)
    return (await task.result(timeout=WAIT)).value()


async def failure(
    client: Client, given: object = "Find out.", agent: str = "researcher", **more: Any
) -> tuple[str, str]:
    """Return type and message of the error with which the agent's task ends."""
    task = await client.submit(agent, given, **more)
    response = await task.result(timeout=WAIT)
    assert response.error is not None, response
    return response.error["type"], response.error["message"]


async def questions(task: TaskHandle, count: int) -> dict[str, Mapping[str, Any]]:  # Any: JSON
    """Return a task's first questions by their prompts: id and data."""
    found: dict[str, Mapping[str, Any]] = {}
    async for event in task.stream():
        if event.type == "weft.human.requested":
            found[event.data["prompt"]] = event.data
            if len(found) == count:
                return found
    raise AssertionError(f"the task has ended; it has asked {found}")


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < give_up_at, f"not in time: {what}"
        await asyncio.sleep(0.01)
