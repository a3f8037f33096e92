"""Makes a failing history small: hypothesis tries simpler choices as long as the same invariant breaks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes

from tests.simulation import history
from tests.simulation.choice_source import Drawn, Replayed, Seeded
from tests.simulation.history import Outcome
from tests.simulation.server import SimServer

_KEY = b"history"


class _Over(KeyboardInterrupt):
    """The time to minimise is over. An error of a kind that hypothesis passes on."""


def minimise(server: SimServer, seed: int, kind: str | None = None, *, seconds: float = 120.0) -> Outcome:
    """Return the smallest history that hypothesis finds within `seconds` and that breaks the same invariant as this
    seed's.

    `kind` is the invariant; None: the first one that the seed's history breaks. The outcome of a seed that breaks
    nothing is returned as it is.
    """
    first = history.run(server, Seeded(seed), seed=seed, story=True)
    if not first.violations or (kind is not None and kind not in first.kinds):
        return first
    wanted = kind or first.violations[0].kind
    best = first.choices
    until = time.monotonic() + seconds

    def fails(data: st.DataObject) -> bool:
        nonlocal best
        if time.monotonic() > until:
            raise _Over
        drawn = Drawn(lambda ways: data.draw(st.integers(0, ways - 1)))
        outcome = history.run(server, drawn, seed=seed)
        if drawn.stopped is not None:
            raise drawn.stopped
        if wanted not in outcome.kinds:
            return False
        if _size(outcome.choices) < _size(best):
            best = outcome.choices
        return True

    database = InMemoryExampleDatabase()
    # As one that was not shrunk yet: of those under the key itself hypothesis thinks that they were.
    database.save(_KEY + b".secondary", choices_to_bytes(first.choices))
    quietly = settings(
        database=database,
        phases=[Phase.reuse, Phase.shrink],
        max_examples=100_000,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=False,
    )
    with suppress(_Over):
        find(st.data(), fails, settings=quietly, database_key=_KEY)
    return history.run(server, Replayed(best), seed=seed, story=True)


def _size(choices: Sequence[int]) -> tuple[int, int]:
    used = list(choices)
    while used and not used[-1]:
        used.pop()
    return len([choice for choice in used if choice]), sum(used)
