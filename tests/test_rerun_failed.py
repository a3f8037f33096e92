"""A test that fails once is reported and blocks nothing. One that fails twice, with many others, or too late, does."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import flaky
from tests.architecture.tree import ROOT

TESTS = """
import pathlib

def test_good():
    pass

def test_fails_at_first():
    seen = pathlib.Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_bad():
    assert False

def many(number):
    def test():
        assert False
    return test

for number in range(4):
    globals()[f"test_many_{number}"] = many(number)
"""


RERUN = """
import sys, datetime, pathlib
from tests.rerun_failed import main

sys.exit(main(sys.argv[1:], pathlib.Path("flaky.txt"), datetime.date(2026, 1, 31)))
"""
TODAY = date(2026, 1, 31)
NAME = "test_these.py::test_fails_at_first"


def rerun(folder: Path, choice: str, listed: str = "") -> subprocess.CompletedProcess[str]:
    """Run the chosen tests on 31 January 2026, where these tests are listed as flaky."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_these.py").write_text(TESTS)
    (folder / "flaky.txt").write_text(listed)
    return subprocess.run(
        [sys.executable, "-c", RERUN, "-p", "no:cacheprovider", "-k", choice],
        cwd=folder,
        # Without plugins, pytest starts in a fraction of the time.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_test_that_passes_runs_once(tmp_path: Path) -> None:
    done = rerun(tmp_path, "good")
    assert done.returncode == 0
    assert "Rerunning" not in done.stdout


def test_a_test_that_fails_once_is_reported(tmp_path: Path) -> None:
    done = rerun(tmp_path, "good or fails_at_first")
    assert done.returncode == 0
    assert f"FLAKY: {NAME} failed above and passed alone" in done.stdout
    assert f"FLAKY: add this line to tests/flaky.txt: 2026-01-31 {NAME}\n" in done.stdout


def test_a_listed_test_is_rerun_for_fourteen_days(tmp_path: Path) -> None:
    done = rerun(tmp_path, "fails_at_first", f"{TODAY - timedelta(days=14)} {NAME}\n")
    assert done.returncode == 0
    assert f"FLAKY: {NAME} failed above and passed alone" in done.stdout
    assert "add this line" not in done.stdout


def test_a_test_that_is_listed_for_longer_fails_permanently(tmp_path: Path) -> None:
    done = rerun(tmp_path, "fails_at_first", f"{TODAY - timedelta(days=15)} {NAME}\n")
    assert done.returncode == 1
    assert f"Not rerun: {NAME} has been listed as flaky since 2026-01-16" in done.stdout
    assert "FLAKY" not in done.stdout


def test_the_nightly_run_names_tests_that_are_listed_for_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flaky.txt"
    path.write_text("# a reason\n\n2026-01-16 tests/test_a.py::test_a\n2026-01-17 tests/test_b.py::test_b\n")
    assert flaky.main(path, TODAY) == 1
    assert capsys.readouterr().out.splitlines() == [
        "OVERDUE: tests/test_a.py::test_a is listed as flaky since 2026-01-16: fix it and remove its line from "
        "tests/flaky.txt"
    ]
    assert flaky.main(path, TODAY - timedelta(days=1)) == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tests/test_a.py::test_a", "is not a date"),
        ("2026-01-31", "is not the id of a test"),
        ("2026-01-31 tests/test_a.py", "is not the id of a test"),
        ("2026-01-31 tests/test_a.py::test_a[1]", "is not the id of a test"),
        ("2026-01-31 a.py::a\n2026-01-30 a.py::a", "is listed twice"),
    ],
)
def test_a_wrong_line_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "flaky.txt"
    path.write_text(line)
    with pytest.raises(ValueError, match=problem):
        flaky.read(path)


def test_a_race_is_listed_without_the_parameters_of_its_test() -> None:
    assert flaky.name_of("tests/test_a.py::test_a[valkey-9-[x]]") == "tests/test_a.py::test_a"


def test_the_list_names_files_that_exist() -> None:
    for test in flaky.read():
        assert (ROOT / test.partition("::")[0]).is_file(), test
