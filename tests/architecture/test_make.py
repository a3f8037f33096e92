"""The Makefile passes its variables on unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

TARGETS = [
    "help",
    "setup",
    "lock",
    "format",
    "check",
    "test",
    "test-unit",
    "test-simulation",
    "test-main",
    "test-autogen",
    "test-engines",
    "test-ray",
    "test-spark",
    "test-matrix",
    "run",
    "bench",
    "ledger",
    "chaos",
    "simulate",
    "model",
    "mutants",
    "audit",
    "docs",
    "screenshots",
    "dist",
    "ci",
    "clean",
]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def door(tmp_path: Path) -> Path:
    """A copy of the Makefile beside an environment whose Python logs its arguments."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexec python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / "requirements").mkdir()
    for name in (
        "Makefile",
        "pyproject.toml",
        "requirements/dev.txt",
        "requirements/run.txt",
        "requirements/autogen.txt",
        "requirements/engines.txt",
        "requirements/engines-build.txt",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    for stamp in (".setup", ".setup-run"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(door: Path, *arguments: str) -> str:
    done = subprocess.run(["make", "-s", *arguments], cwd=door, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


def test_help_lists_every_target(door: Path) -> None:
    listed = [line.split()[1] for line in make(door, "help").splitlines()]
    assert listed == TARGETS


@pytest.mark.parametrize(
    "value", ["plain", "two words", 'it\'s "quoted"', "$HOME costs $5", "a;b|c & `d`", "#1 \\ *", "größe"]
)
def test_run_passes_topic_and_docs_unchanged(door: Path, value: str) -> None:
    told = json.loads(make(door, "run", f"TOPIC={value}", f"DOCS={value}"))
    assert told == ["-m", "examples.research_desk", "--docs", value, "--topic", value]


def test_run_passes_no_arguments_by_default(door: Path) -> None:
    assert json.loads(make(door, "run")) == ["-m", "examples.research_desk"]


def test_a_second_setup_does_nothing(door: Path) -> None:
    assert make(door, "setup") == ""


def test_a_changed_lock_is_installed_again(door: Path) -> None:
    stamp = door / ".venv" / ".setup"
    # An explicit time: two files written within one tick of the clock are equally old to make.
    os.utime(stamp, (1, 1))
    assert '"--require-hashes"' in make(door, "setup")
    assert stamp.stat().st_mtime > 1
    assert make(door, "setup") == ""


def test_ci_runs_the_tests_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "exec make test"


def test_the_tests_run_on_one_server_and_in_the_matrix_on_all() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    recipe = lines[next(number for number, line in enumerate(lines) if line.startswith("test-matrix:")) + 1]
    assert recipe == "\tWEFT_TEST_SERVERS=all $(MAKE) --no-print-directory test"
    assert "WEFT_TEST_SERVERS" not in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_nightly_run_tests_the_matrix_and_slow_tests(tmp_path: Path) -> None:
    """A failed step fails the nightly run but does not stop the other steps."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "nightly", tmp_path / ".ci" / "nightly")
    for program in ("bin/make", ".venv/bin/python"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text('#!/bin/sh\necho "ran $*"\n[ "$1" != test-matrix ]\n')
        (tmp_path / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "WEFT_NIGHTLY_MINUTES": "1"}
    done = subprocess.run(
        [tmp_path / ".ci" / "nightly"], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    ran = [line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert ran == ["test-matrix", "-m tests.flaky", "chaos", "simulate MINUTES=1", "mutants"]
    assert done.returncode == 1
