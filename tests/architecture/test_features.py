"""The table of features names tests, and all of them exist."""

from __future__ import annotations

import re

from tests.architecture.tree import ROOT

TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "features.md"
MOST_TESTS = 8
"""A row that names a file with more tests must say which of them assert what it says."""
FIELDS = ("capability", "AWorld", "AutoGen", "Weft: where", "test")


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of its tables, without the headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row != list(FIELDS) and not set("".join(row)) <= set("-|")]


def missing_in(cell: str, tests: dict[str, set[str]]) -> list[str]:
    """Return the names in a cell that are not among `tests` (path below `tests/` → names in it). `…` stands for the
    rest of a name."""
    missing = []
    for named in re.findall(r"`([^`]+)`", cell):
        path, _, name = named.rpartition("::")
        if named.endswith(".py"):
            path, name = named, ""
        there = tests.get(path, set()) if path else set().union(*tests.values())
        known = path in tests if not name else any(each == name or _begins(each, name) for each in there)
        if not known:
            missing.append(named)
    return missing


def vague_in(cell: str, tests: dict[str, set[str]]) -> list[str]:
    """Return the files that a cell names as a whole, and that hold more than MOST_TESTS tests."""
    return [named for named in re.findall(r"`([^`:]+\.py)`", cell) if len(tests.get(named, ())) > MOST_TESTS]


def _begins(test: str, name: str) -> bool:
    return name.endswith("…") and test.startswith(name.removesuffix("…"))


def all_tests() -> dict[str, set[str]]:
    named = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    found = {str(path.relative_to(TESTS)): set(named.findall(path.read_text("utf-8"))) for path in TESTS.rglob("*.py")}
    return {path: tests for path, tests in found.items() if tests}


def test_every_feature_names_a_test_that_exists() -> None:
    rows, tests = rows_of(PAGE.read_text("utf-8")), all_tests()
    assert len(rows) > 100
    assert [row for row in rows if len(row) != len(FIELDS) or not re.search("`.*test_.*`", row[-1])] == []
    assert {row[0]: missing for row in rows if (missing := missing_in(row[-1], tests))} == {}
    assert {row[0]: vague for row in rows if (vague := vague_in(row[-1], tests))} == {}, "name the tests in it"


def test_a_file_with_too_many_tests_is_vague() -> None:
    tests = {"unit/test_a.py": {f"test_{number}" for number in range(MOST_TESTS + 1)}, "unit/test_b.py": {"test_0"}}
    assert vague_in("`unit/test_a.py`, `unit/test_b.py`, `unit/test_a.py::test_0`", tests) == ["unit/test_a.py"]


def test_a_missing_test_is_found() -> None:
    tests = {"unit/test_a.py": {"test_long_name", "test_second"}, "unit/test_b.py": {"test_third"}}
    here = "`unit/test_a.py`, `unit/test_a.py::test_second`, `unit/test_a.py::test_long_…`, `test_third`, `test_long_…`"
    gone = ["unit/test_c.py", "unit/test_b.py::test_second", "unit/test_b.py::test_long_…", "test_thir", "test_short_…"]
    assert missing_in(here, tests) == []
    assert missing_in(", ".join(f"`{name}`" for name in gone), tests) == gone
