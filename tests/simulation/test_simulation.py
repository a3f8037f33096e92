"""The command that runs many histories does so, and no invariant breaks. `make test-simulation` runs many more."""

from __future__ import annotations

import subprocess
import sys

import pytest

HISTORIES = 10
FIRST_SEED = 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_history_breaks_an_invariant() -> None:
    # In separate processes: histories have their own clock, and take logging away.
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tests.simulation", "--background"),
            *("--seed", str(FIRST_SEED), "--histories", str(HISTORIES)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-2000:]}"
    assert f"{HISTORIES} histories in " in ran.stdout
