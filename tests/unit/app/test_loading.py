"""An app is checked when it is loaded."""

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


def test_a_refused_declaration_is_shown_as_it_is(folder: Path) -> None:
    (folder / "twice_e.py").write_text(
        HEAD + "app = App('x')\n@app.tool\ndef a() -> None: ...\napp.tool(name='a')(lambda: 1)\n"
    )

    assert refusal("twice_e:app") == (
        "tool 'a' is declared twice, at twice_e.py:3 and at twice_e.py:5: rename one of them"
    )


def test_a_loaded_app_has_been_checked(folder: Path) -> None:
    (folder / "unchecked_h.py").write_text(
        HEAD + "app = App('x')\n@app.agent('it', tools=['none'])\nasync def it(ctx: 'AgentContext') -> None: ...\n"
    )

    text = refusal("unchecked_h:app")

    assert text == "agent 'it' (unchecked_h.py:3) names the unknown tool 'none': this app declares no tools"
