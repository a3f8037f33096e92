"""A seed determines a history: it replays with the same events, in this process and in another one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.simulation import history
from tests.simulation.choice_source import Replayed, Seeded
from tests.simulation.server import SimServer

SEEDS = range(1, 11)


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with SimServer() as server:
        yield server


def test_a_seed_gives_the_same_history_on_another_server(server: SimServer) -> None:
    first = [history.run(server, Seeded(seed), seed=seed, story=True) for seed in SEEDS]
    with SimServer() as other:
        again = [history.run(other, Seeded(seed), seed=seed, story=True) for seed in reversed(SEEDS)]
    assert [outcome.fingerprint for outcome in first] == [outcome.fingerprint for outcome in reversed(again)]
    assert len({outcome.fingerprint for outcome in first}) == len(first)


def test_the_choices_of_a_history_replay_it(server: SimServer) -> None:
    for seed in SEEDS:
        outcome = history.run(server, Seeded(seed), seed=seed, story=True)
        again = history.run(server, Replayed(outcome.choices), seed=seed, story=True)
        assert again.fingerprint == outcome.fingerprint, f"seed {seed}"


def test_another_process_replays_the_same_history() -> None:
    assert _fingerprint(7) == _fingerprint(7) != _fingerprint(8)


def _fingerprint(seed: int) -> str:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"fingerprint (\w+)", told)
    assert found, told
    return found[1]
