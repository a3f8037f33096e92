"""Fixtures of the tests that need AutoGen. Without it (in the usual environment) nothing is collected here."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.autogen.sources import ROOT

collect_ignore_glob = [] if find_spec("autogen_core") else ["*"]


@pytest.fixture(scope="session")
def autogen_cache() -> Path:
    """Where AutoGen's unpacked sources are kept between test runs."""
    return Path(os.environ.get("WEFT_TEST_CACHE") or ROOT / ".cache") / "autogen"
