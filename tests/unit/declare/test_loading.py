"""Finding the object, such as an app, that a setting names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_core.app.loading import load_app
from runtime_core.errors import ConfigurationError

HEAD = "from runtime_core.app.app import App\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory. Modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(reference: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load_app(reference)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_app_is_found_in_the_current_directory(folder: Path) -> None:
    (folder / "shop_a").mkdir()
    (folder / "shop_a" / "__init__.py").touch()
    (folder / "shop_a" / "desk.py").write_text(HEAD + "class here:\n    app = App('inner')\napp = App('desk')\n")

    assert load_app("shop_a.desk:app").name == "desk"
    assert load_app("shop_a.desk:here.app").name == "inner"
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("", ""),
        ("desk", ": did you mean desk:app?"),
        ("desk.py:app", ": did you mean desk:app?"),
        ("./shop/desk.py", ": did you mean shop.desk:app?"),
        ("shop/desk:main", ": did you mean shop.desk:main?"),
        ("desk:", ": did you mean desk:app?"),
        (":app", ""),
        ("desk:app()", ""),
        ("desk app:app", ""),
        ("desk:app\n", ""),
    ],
)
def test_another_spelling_is_refused_with_the_likely_one(folder: Path, reference: str, hint: str) -> None:
    assert refusal(reference) == f"app {reference!r} is not of the form package.module:app{hint}"


def test_a_missing_module_names_the_searched_folders(folder: Path) -> None:
    assert refusal("nowhere_b:app").startswith(f"app 'nowhere_b:app': there is no module 'nowhere_b' in {folder} or")


def test_a_missing_part_of_a_package_is_named(folder: Path) -> None:
    (folder / "shop_c").mkdir()
    (folder / "shop_c" / "__init__.py").touch()

    assert "there is no module 'shop_c.desk' in" in refusal("shop_c.desk:app")


@pytest.mark.parametrize(
    ("source", "line", "error"),
    [
        ("x = 1\nimport missing_library_d\n", 2, "ModuleNotFoundError: No module named 'missing_library_d'"),
        ("from json import nothing\n", 1, "ImportError: cannot import name 'nothing' from 'json'"),
        ("\n\n1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("def f(:\n", 1, "invalid syntax"),
        ("raise ValueError('two\\nlines')\n", 1, "ValueError: two lines"),
    ],
)
def test_an_error_inside_the_module_is_named_with_its_line(folder: Path, source: str, line: int, error: str) -> None:
    (folder / "broken_d.py").write_text(source)

    text = refusal("broken_d:app")

    assert text.startswith(f"app 'broken_d:app' cannot be imported: {folder / 'broken_d.py'}:{line}: {error}")


def test_a_missing_attribute_lists_the_apps_or_similar_names(folder: Path) -> None:
    (folder / "names_f.py").write_text(HEAD + "desk = App('x')\n")
    (folder / "similar_f.py").write_text("appp = 1\n")
    (folder / "bare_f.py").touch()

    assert refusal("names_f:app") == "app 'names_f:app': names_f has no 'app'; its apps are desk"
    assert refusal("similar_f:app") == "app 'similar_f:app': similar_f has no 'app': did you mean appp?"
    assert refusal("bare_f:app").endswith("has no 'app': add app = App('name') to it")


def test_anything_but_an_app_is_named_by_its_type(folder: Path) -> None:
    (folder / "other_g.py").write_text(HEAD + "desk = App('x')\napp = 5\n")

    assert refusal("other_g:app") == "app 'other_g:app' is of type int, not App; its apps are desk"
