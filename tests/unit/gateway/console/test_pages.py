"""Pages of the console: a search that continues, and a task as a program."""

from __future__ import annotations

from runtime_core.client.task_view import TaskPage
from runtime_core.gateway.console.pages import search, snippets


async def test_a_search_continues_to_the_end() -> None:
    """A part of a search ends early, with a cursor. The page offers to search on only if its time is over."""
    parts = {"": TaskPage([{"task_id": "new"}], "a"), "a": TaskPage([], "b"), "b": TaskPage([{"task_id": "old"}], "")}
    asked: list[tuple[int, str]] = []

    async def read(limit: int, cursor: str) -> TaskPage:
        asked.append((limit, cursor))
        return parts[cursor]

    assert await search(read, 3, "") == TaskPage([{"task_id": "new"}, {"task_id": "old"}], "")
    assert asked == [(3, ""), (2, "a"), (2, "b")]
    assert await search(read, 1, "") == TaskPage([{"task_id": "new"}], "a")


def test_a_task_as_python_is_a_whole_program() -> None:
    program = snippets({"agent": "greeter", "input": {"name": "Ann"}}, "http://127.0.0.1", keyed=False)["Python"]
    compile(program, "task.py", "exec")
    assert "from weft import Client" in program
