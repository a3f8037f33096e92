"""The releases of docs/changing-code.md, one after the other, with tasks that each of them has begun."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime_core.host.app_services import build_task_host
from runtime_core.host.local import LocalApp
from runtime_core.settings import Settings
from tests.servers.process import Server
from weft import AgentContext, App, Client

PAGE = Path(__file__).parents[3] / "docs" / "changing-code.md"
TOOLS = ("search", "search_archive", "check", "write")


def snippet(name: str) -> str:
    """Return the only Python block of the page with this name."""
    found = re.findall(rf"^```python {name}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} blocks named {name}"
    return str(found[0])


def release(name: str, slow: str = "", asked: asyncio.Event | None = None) -> App:
    """Return an app with the page's agent. The tool `slow` never answers in this process."""
    app = App("report")

    def declare(tool: str) -> None:
        @app.tool(name=tool)
        async def answer(query: str = "", text: str = "", about: str = "") -> str:
            if tool == slow:
                assert asked is not None
                asked.set()
                await asyncio.Event().wait()
            return f"{tool}({query or text or about})"

    for tool in TOOLS:
        declare(tool)
    exec(snippet(name), {"app": app, "AgentContext": AgentContext})  # our own page
    return app


NEW = "write(check(search_archive(tea)))"


@asynccontextmanager
async def running(app: App, url: str, namespace: str, folder: Path) -> AsyncIterator[None]:
    """Run the app's handlers for this long; what they leave unfinished stays on the broker."""
    settings = Settings(folder, "sqlite://", url, namespace=namespace, shutdown_seconds=0.1, lease_seconds=1.0)
    host = await build_task_host(app, settings)
    await host.start()
    try:
        yield
    finally:
        await host.stop()


async def test_the_releases_of_the_page_finish_each_others_tasks(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async def begin(client: Client, name: str, slow: str, task: str) -> None:
        """Begin a task with a release, and stop the release while the task waits for the slow tool."""
        asked = asyncio.Event()
        async with running(release(name, slow, asked), valkey.url, namespace, tmp_path):
            await client.submit("report", "tea", task_id=task)
            await asyncio.wait_for(asked.wait(), 60)

    async def result_of(client: Client, task: str) -> object:
        result = await (await client.task(task)).result(timeout=60)
        return result.output if result.status == "completed" else result

    async with Client.connect(valkey.url, namespace=namespace) as client:
        await begin(client, "before", "search", "old")
        await begin(client, "after", "write", "new")
        async with running(release("after"), valkey.url, namespace, tmp_path):
            assert await result_of(client, "old") == "write(search(tea))"
            assert await result_of(client, "new") == NEW
        await begin(client, "after", "write", "newer")
        async with running(release("later"), valkey.url, namespace, tmp_path):
            assert await result_of(client, "newer") == NEW
            await client.submit("report", "tea", task_id="latest")
            assert await result_of(client, "latest") == NEW


async def test_the_check_of_the_page_finds_the_difference(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'trajectory.db'}"
    local = LocalApp(release("before"), trajectory=url)
    async with local as client:
        await (await client.submit("report", "tea", task_id="t-1")).result(timeout=60)
        await local.recorded("t-1")
    names: dict[str, Any] = {"App": App}
    exec(snippet("check").replace('"weft"', '"local"'), names)  # our own page
    await names["check_recorded_tasks"](release("after"), url)
    with pytest.raises(AssertionError, match=r'ctx.tool\("search", query="tea"\); now ctx.tool\("search_archive"'):
        await names["check_recorded_tasks"](release("later"), url)
