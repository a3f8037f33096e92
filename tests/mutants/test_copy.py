"""Tests import the product from their own tree, in a copy as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import runtime_core
from tests.service_forks import SOURCES


def test_the_product_is_that_of_this_tree() -> None:
    assert Path(runtime_core.__file__).is_relative_to(Path(__file__).parents[2])


def test_the_services_that_a_test_starts_are_those_of_this_tree() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import runtime_core; print(runtime_core.__file__)"],
        env={"PYTHONPATH": SOURCES}, cwd="/", capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(said.strip()) == Path(runtime_core.__file__)
