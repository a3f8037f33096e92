"""The documents name only what exists, and no file names a path or host of one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.tree import CORE, ROOT, own_files

DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/internals/keys.md", "docs/internals/steps.md")
BASES = (ROOT, CORE / "runtime_core", CORE)
"""Where a path in a document may begin: the repository, or the core package."""
EXTENSIONS = r"\.(py|md|toml|lua|ya?ml|json|txt|sh|tla|js|java)"

# Put together here, so that this file does not name them either.
HOSTS = (
    "pypi" + ".org",
    "python" + "hosted",
    "npm" + "js.",
    "deb." + "debian",
    "maven" + ".org",
)
MACHINE_PATHS = ("/" + "work/", "/" + "opt/pypi", "/" + "opt/wheels", "/" + "tmp/spec", "/" + "root/")


def paths_named_in(text: str) -> list[str]:
    """Return what looks like a path in backticks, outside of code blocks.

    It ends in a slash or a known extension, or begins with a folder of ours. `<name>` stands for any name.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        path = re.sub(r"<[^<>]+>", "*", quoted)
        if not re.fullmatch(r"[\w.*/-]+", path) or path.startswith("/"):
            continue
        first = path.partition("/")[0]
        # What tools leave behind may be there or not.
        begins_with_ours = "/" in path and first != ".cache" and any((base / first).is_dir() for base in BASES)
        if begins_with_ours or re.search(rf"({EXTENSIONS}|/)$", path):
            found.append(path)
    return found


def exists(path: str) -> bool:
    return any(next(base.glob(path.rstrip("/")), None) is not None for base in BASES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document: str) -> None:
    page = ROOT / document
    missing = [path for path in paths_named_in(page.read_text(encoding="utf-8")) if not exists(path)]
    assert missing == [], f"{document} names paths that do not exist"


def missing_from_docstring(package: Path) -> list[str]:
    """Return the files that a package's docstring names, as in `keys.py`, and that do not exist."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.findall(r"(?<![\w/.])[\w/.]*\w\.(?:py|lua)\b", docstring)
    return [path for path in named if not ((package / path).exists() or exists(path))]


def test_every_file_that_a_packages_docstring_names_exists() -> None:
    packages = sorted(path.parent for folder in (CORE, ROOT / "services") for path in folder.rglob("__init__.py"))
    missing = {str(package.relative_to(ROOT)): missing_from_docstring(package) for package in packages}
    assert {package: found for package, found in missing.items() if found} == {}


def test_a_missing_file_in_a_docstring_is_found(tmp_path: Path) -> None:
    (tmp_path / "keys.py").touch()
    (tmp_path / "__init__.py").write_text('"""1. keys.py  the keys\n2. gone.py, `functions/gone.lua`, bus/keys.py"""')
    assert missing_from_docstring(tmp_path) == ["gone.py", "functions/gone.lua"]


def test_paths_are_distinguished_from_other_words() -> None:
    text = (
        "`bus/keys.py` `services/<name>/README.md` `tests/` `Makefile` `type/key` `application/json`\n"
        "`make test` `weft:{p}:agent` `weft.task.submit` `redis://` `libs/runtime_core`\n"
        "```\n`docs/none.md`\n```\n`docs/none.md`"
    )
    assert paths_named_in(text) == [
        "bus/keys.py",
        "services/*/README.md",
        "tests/",
        "libs/runtime_core",
        "docs/none.md",
    ]
    assert exists("tests/architecture/test_docs.py")
    assert exists("consumer/effects.py")
    assert not exists("docs/none.md")


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}" for path in own_files() for word in words_of(path, (*HOSTS, *MACHINE_PATHS))
    ]
    assert found == [], "name no registry and no path that only one machine has"


def test_a_forbidden_word_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"see https://{HOSTS[0]}/x and {MACHINE_PATHS[0]}main")
    assert words_of(page, (*HOSTS, *MACHINE_PATHS)) == [HOSTS[0], MACHINE_PATHS[0]]


def words_of(path: Path, words: tuple[str, ...]) -> list[str]:
    """Return the words that the file contains; none for a binary file."""
    content = path.read_bytes()
    if b"\0" in content:
        return []
    text = content.decode("utf-8", errors="replace")
    return [word for word in words if word in text]


_ELSEWHERE = {"runtime_core", "weft", *(path.stem for path in (CORE / "runtime_core").iterdir())}
"""Names that the description of any package may use."""


@pytest.mark.parametrize("package", sorted(CORE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_a_package_describes_modules_that_it_has(package: Path) -> None:
    described = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
    modules = {path.stem for path in package.parent.iterdir()}
    named = re.findall(r"`([a-z_]+)`", described)
    assert [name for name in named if name not in modules | _ELSEWHERE] == []
