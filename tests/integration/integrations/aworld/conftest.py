"""Fixtures for tests of tasks by AWorld's names."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def recorded_apart(data_folder: Path) -> Path:
    """Record the tasks of each test in a separate folder."""
    return data_folder
