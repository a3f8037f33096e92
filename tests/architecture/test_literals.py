"""Stored words and letters have names: modules use these, so that a search finds every use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from runtime_core.wire.ids import ROOT_RUN, RunField
from runtime_core.wire.step import ENDED, OPEN, RESULT_ERROR, RESULT_OK
from tests.architecture.tree import CORE, ROOT, sources

STATUSES: set[object] = {*OPEN, *ENDED}
RESULTS: set[object] = {RESULT_OK, RESULT_ERROR}
FIELDS = {value for name, value in vars(RunField).items() if name.isupper() and len(value) > 1}
"""Names of one letter mean other fields elsewhere."""
DEFINED_IN = [CORE / "runtime_core" / "wire" / name for name in ("step.py", "ids.py")]


def values_in(node: ast.expr) -> Iterator[object]:
    """Return the constants that an expression is, or lists, or chooses between."""
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for each in node.elts:
            yield from values_in(each)
    elif isinstance(node, ast.IfExp):
        yield from values_in(node.body)
        yield from values_in(node.orelse)


def literals_in(tree: ast.Module) -> Iterator[tuple[int, object]]:
    """Return the lines on which a module writes a status, a run's id or the letter of a result by itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.keyword):
            continue
        found: set[object] = set()
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = " ".join(ast.unparse(side) for side in sides if not isinstance(side, ast.Constant))
            values = {value for side in sides for value in values_in(side)}
            found = values & STATUSES if "status" in names else set()
            found |= values & {ROOT_RUN} if "run" in names or "path" in names else set()
        elif isinstance(node, ast.keyword) and node.arg == "status":
            found = set(values_in(node.value)) & STATUSES
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            found = (RESULTS | FIELDS) & {node.value}
        for value in found:
            yield node.lineno, value


def test_stored_words_and_letters_are_used_by_name() -> None:
    written = [
        f"{path.relative_to(ROOT)}:{line} writes {value!r}"
        for path, tree in sources([CORE / "runtime_core"], "status", 'b"', '"r"')
        if path not in DEFINED_IN
        for line, value in literals_in(tree)
    ]
    assert written == [], "use Status, ROOT_RUN, RESULT_OK, RESULT_ERROR and RunField"


def test_literals_are_found() -> None:
    code = """
if end.status in ("completed", Status.FAILED): pass
if run == "r": pass
answer(status="failed" if error else other)
commit(b"K")
fields.get(b"cur")
kind = "completed"
"""
    assert sorted(literals_in(ast.parse(code))) == [(2, "completed"), (3, "r"), (4, "failed"), (5, b"K"), (6, b"cur")]
