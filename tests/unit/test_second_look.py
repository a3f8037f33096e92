"""What fails once is told and refuses nothing; what fails twice, or with many others, does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.tree import ROOT

TESTS = """
import pathlib

def test_good():
    pass

def test_bad_at_first():
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


def look(folder: Path, choice: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_these.py").write_text(TESTS)
    return subprocess.run(
        [sys.executable, "-m", "tests.second_look", "-p", "no:cacheprovider", "-k", choice],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_passes_is_run_once(tmp_path: Path) -> None:
    done = look(tmp_path, "good")
    assert done.returncode == 0
    assert "second look" not in done.stdout


def test_what_fails_once_is_told(tmp_path: Path) -> None:
    done = look(tmp_path, "good or bad_at_first")
    assert done.returncode == 0
    assert "FLAKY: test_these.py::test_bad_at_first failed above and passed alone" in done.stdout


def test_what_fails_twice_refuses(tmp_path: Path) -> None:
    done = look(tmp_path, "bad")
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


def test_many_failures_get_no_second_look(tmp_path: Path) -> None:
    done = look(tmp_path, "many")
    assert done.returncode == 1
    assert "second look" not in done.stdout


def test_nothing_to_run_is_no_success(tmp_path: Path) -> None:
    assert look(tmp_path, "nothing_of_this_name").returncode == 5
