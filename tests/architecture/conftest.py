"""Forgets what these tests have parsed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.architecture.tree import parsed


@pytest.fixture(scope="package", autouse=True)
def parsed_modules() -> Iterator[None]:
    """Other tests of this process collect garbage, and would look through a million nodes each time."""
    yield
    parsed.cache_clear()
