"""Tests import the product from their own tree, in a copy as well."""

from __future__ import annotations

from pathlib import Path

import runtime_core


def test_the_product_is_that_of_this_tree() -> None:
    assert Path(runtime_core.__file__).is_relative_to(Path(__file__).parents[2])
