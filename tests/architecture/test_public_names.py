"""The public names are pinned: adding or removing one shows in the diff of a list."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter

import pytest

import runtime_core
from tests.architecture.tree import CORE, ROOT, imports_of, parsed, statements

PINNED = ROOT / "tests" / "architecture" / "public_names.txt"
FACE = CORE / "weft"
ELSEWHERE = ("weft.autogen",)
"""Modules whose library is not in this environment; `tests/autogen` imports them."""
ALIASES = "weft.aworld."
"""Modules with the import names of AWorld, whose names have another module too."""
OLD_NAMES = ("Agent", "AgentContext", "App", "Client", "Reject", "Retry", "ToolContext", "handles")
"""Names that `runtime_core` itself promises."""
TWO_CLASSES = {"Agent", "EventBus"}
"""Class names that both Weft's core and AutoGen or AWorld, whose names `weft` offers, use for their own thing."""
HEAVY = ("lupa", "mcp", "openai", "opentelemetry", "pandas", "pyarrow", "pydantic_ai", "pyspark", "ray", "sqlalchemy")


def modules() -> dict[str, list[str]]:
    """The modules of `weft` and the names in their `__all__`, without importing them."""
    found = {}
    for path in sorted(FACE.rglob("*.py")):
        module = ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
        assignments = [node for node in parsed(path).body if isinstance(node, ast.Assign)]
        names = [ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == "__all__"]
        if names or not module.startswith(ALIASES):  # a package of aliases may have no names
            [found[module]] = names
    return found


def printed_by(code: str) -> list[str]:
    """Return what a fresh interpreter prints, one word per line."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_public_names_are_those_of_the_list() -> None:
    public = sorted(f"{module}.{name}" for module, names in modules().items() for name in names)
    pinned = PINNED.read_text(encoding="utf-8").split()
    assert public == pinned, f"if this is meant, write the names to {PINNED.name} and CHANGELOG.md"


def test_a_name_has_one_module() -> None:
    # weft.errors lists all errors, those of `weft` too.
    own = {module: names for module, names in modules().items() if module != "weft.errors" and ALIASES not in module}
    places = Counter(name for names in own.values() for name in names)
    assert [name for name, count in places.items() if count > 1] == []


def test_a_class_name_has_one_meaning() -> None:
    names = [
        node.name
        for path in sorted((CORE / "runtime_core").rglob("*.py"))
        for node in statements(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]
    twice = {name for name, count in Counter(names).items() if count > 1}
    assert twice == TWO_CLASSES, "rename the one that is not public, or merge the two"


def test_the_first_module_stays_small() -> None:
    assert len(modules()["weft"]) <= 25


@pytest.mark.parametrize("module", [module for module in modules() if module not in ELSEWHERE])
def test_every_public_name_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in modules()[module] if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", [module for module in modules() if module not in ELSEWHERE])
def test_type_checkers_see_every_public_name_where_it_is(module: str) -> None:
    loaded = importlib.import_module(module)
    path = CORE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    imported = {found.imported for found in imports_of(path, CORE)}
    places: dict[str, str] = getattr(loaded, "_PLACES", {})
    if places:
        assert sorted(places) == sorted(modules()[module])
        assert {f"{place}.{name}" for name, place in places.items()} <= imported


def test_the_names_that_runtime_core_promises_are_those_of_weft() -> None:
    weft = importlib.import_module("weft")
    assert [name for name in OLD_NAMES if getattr(runtime_core, name) is not getattr(weft, name)] == []


def test_importing_weft_imports_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import weft; print(*sorted({*sys.modules} - before))"
    ours = [name for name in printed_by(code) if name.partition(".")[0] not in sys.stdlib_module_names]
    assert ours == ["runtime_core", "runtime_core.base", "runtime_core.base.lazy", "weft"]


def test_the_names_of_weft_load_no_engine_no_store_and_no_model_client() -> None:
    code = "import sys, weft; [getattr(weft, name) for name in weft.__all__]; print(*sys.modules)"
    loaded = printed_by(code)
    assert [name for name in HEAVY if name in loaded] == []


def test_an_app_and_the_command_load_no_engine_no_store_no_model_client_and_no_metrics() -> None:
    code = (
        "import sys; from runtime_core.app.loading import load_app;"
        " load_app('examples.research_desk.app:app'); import runtime_core.cli.task; print(*sys.modules)"
    )
    loaded = printed_by(code)
    assert "runtime_core.integrations.aworld.runner" in loaded
    assert [name for name in (*HEAVY, "prometheus_client") if name in loaded] == []


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("weft.pydantic_ai", "pydantic_ai", "llm"),
        ("weft.autogen", "autogen_core", "autogen"),
        ("runtime_core.integrations.autogen", "autogen_core", "autogen"),
    ],
)
def test_a_module_without_its_library_names_the_extra(module: str, library: str, extra: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = f"ModuleNotFoundError: {module} needs {library}, which is not installed: pip install 'weft[{extra}]'"
    assert done.stderr.splitlines()[-1] == told
