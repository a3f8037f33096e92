"""This environment has both engines."""

from __future__ import annotations

from importlib.metadata import version


def test_the_engines_of_the_lock_are_installed() -> None:
    assert version("ray").startswith("2.")
    assert version("pyspark").startswith("4.")
