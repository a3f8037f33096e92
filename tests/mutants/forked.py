"""Runs pytest in a fork of this process, which has already imported the slow modules."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import hypothesis
import msgspec
import prometheus_client
import pydantic
import pytest
import pytest_asyncio
import sqlalchemy
import uvloop

from tests.servers.matrix import ALL, SELECTION

PRELOADED = (hypothesis, msgspec, prometheus_client, pydantic, pytest_asyncio, sqlalchemy, uvloop)
OURS = ("runtime_core", "weft", "services", "tests", "docs", "examples", "deploy", "benchmarks")
"""Packages that the fork must import from the copy."""


class Hangs(Exception):
    """The tests took longer than they may."""


def import_contracts(root: Path, here: Path) -> None:
    """Import the contract tests, and with them the product, from the copy at `root` instead of the tree at `here`."""
    _import_from(root, here)
    for path in sorted((root / "tests" / "contracts").glob("test_*.py")):
        importlib.import_module(f"tests.contracts.{path.stem}")


def run_pytest(
    arguments: tuple[str, ...], root: Path, here: Path, seconds: float, *, imported: bool = False
) -> tuple[int, str]:
    """Run pytest on the copy at `root` instead of the tree at `here`. Return its exit status and output.

    `imported`: with the modules that `import_contracts` has imported, since no Python file of the copy has changed.

    Raises:
        Hangs: it took longer than `seconds`; everything that it started is killed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            _become_pytest(arguments, root, here, output.fileno(), imported)
        status = _wait(child, seconds)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def _become_pytest(arguments: tuple[str, ...], root: Path, here: Path, output: int, imported: bool) -> None:
    status = 3
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = os.pathsep.join(_paths(root))
        os.environ[SELECTION] = ALL
        # The servers of this tree, so that nothing is downloaded for the copy.
        os.environ.setdefault("WEFT_TEST_CACHE", str(here / ".cache"))
        if imported:
            # The tests have asked for it while they were imported; the mutant has changed one of its files.
            sys.modules["runtime_core.bus.library"].library.cache_clear()
        else:
            _import_from(root, here)
        status = int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _import_from(root: Path, here: Path) -> None:
    """Import the packages of `OURS` from `root` from now on."""
    replaced = {"", *_paths(here), *_paths(root)}
    sys.path[:] = _paths(root) + [path for path in sys.path if path not in replaced]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


def _paths(root: Path) -> list[str]:
    return [str(root / "libs" / "runtime_core" / "src"), str(root)]


def _wait(child: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Hangs(f"longer than {seconds:.0f} seconds")
