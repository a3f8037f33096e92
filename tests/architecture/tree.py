"""What the architecture tests read: the repository's own files, and the imports of its modules."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "libs" / "runtime_core" / "src"

_HIDDEN_OURS = {".ci", ".github"}
_NOT_OURS = {"__pycache__", "dist", "node_modules", "results"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module, even inside functions and under TYPE_CHECKING."""

    importer: str
    imported: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.imported}"


def own_files() -> Iterator[Path]:
    """Return the repository's files, without those that tools and runs create."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name in _HIDDEN_OURS or not (name.startswith(".") or name in _NOT_OURS)]
        for name in files:
            if name != ".git":  # a file in a linked work tree
                yield Path(folder, name)


def sources(folders: Iterable[Path], *texts: str) -> Iterator[tuple[Path, ast.Module]]:
    """Return the modules below these folders that contain one of these texts: the parser takes seconds for all."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if any(text in source for text in texts):
            yield path, parsed(path)


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a module, which several tests look through and none changes."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def production_imports() -> tuple[Import, ...]:
    """Return the imports of the modules of runtime_core, weft and the services."""
    return tuple(
        found
        for base, folder in ((CORE, CORE / "runtime_core"), (CORE, CORE / "weft"), (ROOT, ROOT / "services"))
        for path in sorted(folder.rglob("*.py"))
        if "tests" not in path.relative_to(base).parts
        for found in imports_of(path, base)
    )


def imports_of(path: Path, base: Path) -> Iterator[Import]:
    """Return all imports of one file, whose module name is relative to `base`."""
    parts = path.relative_to(base).with_suffix("").parts
    package = parts[:-1]
    importer = ".".join(package if parts[-1] == "__init__" else parts)
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, path, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*above, *([node.module] if node.module else [])))
            for alias in node.names:
                # The name may be a module or a thing in one; both begin with the module's name.
                yield Import(importer, f"{source}.{alias.name}", path, node.lineno)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Return all statements of a module, also inside others: `ast.walk` would visit each expression, too."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, name, None)
        for child in below if isinstance(below, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def module_graph() -> dict[str, set[str]]:
    """Return for each module of runtime_core those that it imports, including imports for types."""
    modules = {
        ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
        for path in (CORE / "runtime_core").rglob("*.py")
    }
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in production_imports():
        # `a.b.c` may be the module c of the package a.b, or the name c of the module a.b.
        for imported in (found.imported, found.imported.rpartition(".")[0]):
            if imported in modules and found.importer in modules and imported != found.importer:
                graph[found.importer].add(imported)
                break
    return graph


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another (the strongly connected components of two and more)."""
    reached = {start: _reached(graph, start) for start in graph}
    found = {frozenset(other for other in reached[start] if start in reached[other]) for start in graph}
    return sorted(sorted(group) for group in found if len(group) > 1)


def _reached(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    seen: set[str] = {start}
    waiting = [start]
    while waiting:
        for module in graph.get(waiting.pop(), ()):
            if module not in seen:
                seen.add(module)
                waiting.append(module)
    return seen


def within(module: str, *packages: str) -> bool:
    """Whether the module is one of the packages or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)
