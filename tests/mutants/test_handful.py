"""CI tests a few mutants in each run, so that the machinery works. `make mutants` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mutants.__main__ import judge
from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.scratch import Scratch, scratch

HANDFUL = ("submit.dedupe", "commit_turn.current", "leave.uncounted", "turn_port.journal_moved")


@pytest.fixture(scope="module")
def copy() -> Iterator[Scratch]:
    with scratch(forks=False) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.id in HANDFUL], ids=lambda mutant: mutant.id)
def test_the_mutant_is_killed(copy: Scratch, mutant: Mutant) -> None:
    assert judge(copy, mutant, mutant.tests).killed_by


def test_the_copy_is_whole_again_after_a_mutant(copy: Scratch) -> None:
    path = copy.root / MUTANTS[0].file
    before = path.read_text(encoding="utf-8")
    with copy.without(MUTANTS[0]):
        assert path.read_text(encoding="utf-8") != before
    assert path.read_text(encoding="utf-8") == before
