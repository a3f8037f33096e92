"""The tests of a module are where its name says: those of `runs/commit.py` in `tests/unit/runs/test_commit.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.tree import CORE, ROOT

TESTS = ROOT / "tests"
PACKAGE = CORE / "runtime_core"

OWN_ENVIRONMENTS = {
    "engines/ray": "engines/test_ray_{}.py",
    "engines/spark": "engines/test_spark_{}.py",
    "integrations/autogen": "autogen/test_{}.py",
    "integrations/aworld/engines": "engines/test_{}.py",
}
"""Folders whose modules may also be tested with libraries that the other tests do without, and where."""

WITHOUT = {
    "engines/ray/holder.py": "it runs only inside Ray: engines/test_ray_backend.py kills it, and its drivers",
    "engines/spark/jobs.py": "it needs a Spark session: engines/test_spark_backend.py runs jobs on a real server",
    "engines/spark/worker.py": "it runs on Spark's workers: engines/test_spark_backend.py runs calls on real ones",
    "gateway/openapi_resources.py": "a part of one document: unit/gateway/test_openapi.py checks the whole of it",
    "runs/ports.py": "protocols, and values without methods",
}
"""Modules without tests of their name, with the reason. Paths of tests are below `tests/`."""


def modules(package: Path = PACKAGE) -> list[Path]:
    """Return the modules of runtime_core. An `__init__.py` only describes its package."""
    return sorted(path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py")


def places(module: Path) -> list[Path]:
    """Return where the tests of a module may be."""
    folder, name = module.parent, f"test_{module.stem.strip('_')}.py"
    found = [TESTS / "unit" / folder / name, TESTS / "integration" / folder / name, TESTS / "contracts" / name]
    if folder.as_posix() in OWN_ENVIRONMENTS:
        found.append(TESTS / OWN_ENVIRONMENTS[folder.as_posix()].format(module.stem))
    return found


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("errors.py", "unit/test_errors.py"),
        ("host/__main__.py", "integration/host/test_main.py"),
        ("state_manager/measures.py", "contracts/test_measures.py"),
        ("engines/ray/calls.py", "engines/test_ray_calls.py"),
        ("integrations/aworld/engines/ray_hosts.py", "engines/test_ray_hosts.py"),
    ],
)
def test_a_module_may_be_tested_at_its_place(module: str, test: str) -> None:
    assert TESTS / test in places(Path(module))


def test_each_module_has_tests_of_its_name() -> None:
    missing = {module.as_posix() for module in modules() if not any(path.is_file() for path in places(module))}
    new = {name: [path.relative_to(ROOT).as_posix() for path in places(Path(name))] for name in missing - set(WITHOUT)}
    assert new == {}, "write tests in one of these files, or move those of the module there"
    assert set(WITHOUT) - missing == set(), "it has tests, or does not exist: remove it from WITHOUT"


def test_the_modules_without_tests_stay_few() -> None:
    assert len(WITHOUT) <= 10
    for module, reason in WITHOUT.items():
        for word in reason.split():
            if word.strip(",:").endswith(".py"):
                assert (TESTS / word.strip(",:")).is_file(), f"{module}: {word}"


def test_the_folders_of_tests_are_those_of_the_modules() -> None:
    """A file in another folder is not found by anyone who looks for it."""
    folders = {module.parent.as_posix() for module in modules()} | {"."}
    elsewhere = {
        path.relative_to(ROOT).as_posix()
        for kind in ("unit", "integration")
        for path in (TESTS / kind).rglob("test_*.py")
        if path.parent.relative_to(TESTS / kind).as_posix() not in folders
    }
    assert elsewhere == set()
