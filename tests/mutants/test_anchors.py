"""The list of mutants stays true: each anchor is there once, and what replaces it compiles."""

from __future__ import annotations

import ast

import pytest
from lupa import lua51

from tests.mutants.commands import command
from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.scratch import ROOT


def test_ids_are_unique() -> None:
    ids = [mutant.id for mutant in MUTANTS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_fits_the_tree(mutant: Mutant) -> None:
    mutated = mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
    if mutant.file.endswith(".py"):
        ast.parse(mutated)
    else:
        lua51.LuaRuntime().compile(mutated)
    for test in mutant.tests:
        assert command(test, ROOT) is not None, f"{mutant.id} names tests that do not exist: {test}"
