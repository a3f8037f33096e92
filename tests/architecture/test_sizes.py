"""Bounds on the size of the code: a module has one role, and a function fits on a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.tree import CORE, parsed, statements

MODULES_MAX = 220
"""Modules of runtime_core, without the `__init__.py` files, which only describe their packages. Five are the console's,
which is a program of its own; three are the OpenAPI document."""
MODULE_LINES_MAX = 590
BODY_LINES_MAX = 55
"""Of a function, without its signature and its docstring."""
TABLES = {"metrics.py: __init__", "settings.py: from_environment"}
"""Functions that are one list, of all metrics and of all settings."""


def modules() -> list[Path]:
    return sorted(path for path in (CORE / "runtime_core").rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Return each function of a file with the length of its body in lines."""
    for node in statements(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if body:
                assert body[-1].end_lineno is not None
                yield f"{path.name}: {node.name}", body[-1].end_lineno - body[0].lineno + 1


def test_the_core_stays_small() -> None:
    count = sum(path.name != "__init__.py" for path in modules())
    assert count <= MODULES_MAX, "extend a module whose role it is, or merge two that have one role"


def test_a_module_has_one_role() -> None:
    lengths = {path.relative_to(CORE).as_posix(): path.read_text().count("\n") for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > MODULE_LINES_MAX} == {}


def test_a_function_fits_on_a_screen() -> None:
    found = [each for path in modules() for each in functions(path)]
    assert {name: lines for name, lines in found if lines > BODY_LINES_MAX and name not in TABLES} == {}


def test_a_package_only_describes_itself() -> None:
    """Code in an `__init__.py` has no name to look for."""
    with_code = [
        path.relative_to(CORE).as_posix()
        for path in modules()
        if path.name == "__init__.py"
        and any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in parsed(path).body)
    ]
    assert with_code == []
