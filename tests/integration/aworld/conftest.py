"""Fixtures for tests of tasks by AWorld's names."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which tasks of this process are recorded."""
    folder = tmp_path / "weft-data"
    monkeypatch.setenv("WEFT_DATA_DIR", str(folder))
    return folder
