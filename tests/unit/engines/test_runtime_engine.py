"""How long a step waits for its engine."""

from __future__ import annotations

import pytest

from runtime_core.engines.runtime_engine import wait_until


@pytest.mark.parametrize(
    ("context", "away_since", "until"),
    [
        (b"", 1000.0, 1060.0),
        (b'{"tenant":"shop"}', 1000.0, 1060.0),
        (b'{"engine_until":1500.0}', 1000.0, 1500.0),
        (b'{"engine_until":1500.0}', 9000.0, 9060.0),
        (b'{"engine_wait_seconds":5,"engine_until":1500.0}', 9000.0, 9005.0),
        (b'{"engine_wait_seconds":0,"engine_until":1500.0}', 9000.0, 9000.0),
        (b'{"engine_until":1500.0}', 0.0, 1500.0),
    ],
)
def test_a_step_waits_from_its_call_or_from_the_loss_of_its_engine(
    context: bytes, away_since: float, until: float
) -> None:
    assert wait_until(context, away_since) == until
