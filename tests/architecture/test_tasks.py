"""No asyncio task is started and forgotten: its errors would be lost, and nobody could end it or wait for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.tree import CORE, ROOT, sources

STARTS = {"create_task", "ensure_future"}
FORGETS = {
    "libs/runtime_core/src/runtime_core/runs/guest_loop.py": "the loop's own create_task keeps its tasks",
}
"""Modules that may call one of them and drop what it gives, with the reason."""


def forgotten(tree: ast.Module) -> Iterator[int]:
    """Return the lines that start a task and keep no reference to it. A task group keeps its own."""
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name)
    }
    for node in ast.walk(tree):
        # As a statement of its own, even with something called on it: `create_task(…).add_done_callback(…)`.
        made = node.value if isinstance(node, ast.Expr) else None
        while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
            if made.func.attr in STARTS:
                owner = made.func.value
                if not (isinstance(owner, ast.Name) and owner.id in groups):
                    yield made.lineno
                break
            made = made.func.value


@pytest.mark.parametrize(
    ("line", "is_forgotten"),
    [
        ("asyncio.create_task(work())", True),
        ("asyncio.ensure_future(work())", True),
        ("loop.create_task(work(), name='x').add_done_callback(log)", True),
        ("self.task = asyncio.create_task(work())", False),
        ("tasks.add(loop.create_task(work()))", False),
        ("await asyncio.create_task(work())", False),
        ("group.create_task(work())", False),
    ],
)
def test_a_task_without_an_owner_is_found(line: str, is_forgotten: bool) -> None:
    source = f"async def f():\n    async with asyncio.TaskGroup() as group:\n        {line}\n"
    assert bool(list(forgotten(ast.parse(source)))) is is_forgotten


def test_every_task_has_an_owner() -> None:
    found = {}
    for path, tree in sources((CORE, ROOT / "services"), *STARTS):
        if lines := list(forgotten(tree)):
            found[path.relative_to(ROOT).as_posix()] = lines
    assert set(found) == set(FORGETS), f"start it in a task group, or keep it where it is awaited: {found}"
