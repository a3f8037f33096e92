"""Runs AutoGen's test modules in a separate process, as they were published."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.autogen.exchanged import RUNTIME
from tests.autogen.sources import ROOT, source

TEST_SECONDS = 600
"""Far more than any of them takes: some send thousands of messages, on a machine that may be busy."""


def run_modules(
    package: str, modules: Iterable[str], mode: str, cache: Path, scratch: Path, url: str = "", only: str = ""
) -> dict[str, dict[str, int]]:
    """Run `tests/<module>.py` of the package's source for each module, in one process.

    `url` is the broker's in modes that need one. `only` selects tests, as `-k` does.

    Returns:
        For each module, how many tests passed, were skipped and are excepted.

    Raises:
        AssertionError: A test failed, or one that is excepted passed; with the end of what pytest said.
    """
    folder = source(package, cache)
    tests = folder / "tests"
    if (tests / "__init__.py").exists():
        # A package that is called `tests`, as ours is.
        tests = Path(shutil.copytree(tests, scratch / "their_tests"))
    report = scratch / "report.xml"
    paths = [str(ROOT), str(ROOT / "tests" / "autogen" / "helpers"), str(tests)]
    environment = {**os.environ, RUNTIME: mode, "PYTHONPATH": os.pathsep.join(paths), "WEFT_REDIS_URL": url}
    # Their own settings, not ours: the file is theirs, and warnings are no errors there.
    settings = ["--config-file", str(folder / "pyproject.toml"), "--rootdir", str(tests.parent)]
    plugins = ["-p", "tests.autogen.exchanged", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    output = ["-q", "-rfEX", "--no-header", f"--junitxml={report}", "-o", "junit_family=xunit2"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *settings,
            *plugins,
            *output,
            *(["-k", only] if only else []),
            *(str(tests / f"{module}.py") for module in modules),
        ],
        cwd=tests.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    return _counted(report)


def _counted(report: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        # As in `tests.test_runtime.TestClass`.
        module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        counts = found.setdefault(module, {"passed": 0, "skipped": 0, "excepted": 0})
        skipped = case.find("skipped")
        if skipped is None:
            counts["passed"] += 1
        else:
            counts["excepted" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
    return found


def totals(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how many tests each module has."""
    return {module: sum(counts.values()) for module, counts in found.items()}
