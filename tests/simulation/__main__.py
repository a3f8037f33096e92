"""Run many histories, replay one by its seed, or minimise one: see `docs/simulation.md`."""

from __future__ import annotations

import argparse
import os
import random
import sys

from tests.simulation import history
from tests.simulation.choice_source import Seeded
from tests.simulation.history import Outcome
from tests.simulation.server import SimServer
from tests.simulation.shrink import minimise
from tests.simulation.workers import run_many


def main() -> int:
    asked = _arguments()
    if asked.seed is not None and asked.histories is None and asked.minutes is None:
        return _one(asked.seed, asked.minimise, asked.kind, asked.seconds)
    first = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    return run_many(first, asked.histories, asked.minutes, asked.processes, background=asked.background)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this history; with --histories or --minutes: the first seed")
    parser.add_argument("--histories", type=int, help="run so many histories")
    parser.add_argument("--minutes", type=float, help="run histories for so long")
    parser.add_argument("--processes", type=int, default=2, help="in so many processes (2)")
    parser.add_argument("--background", action="store_true", help="give way to other processes")
    parser.add_argument("--minimise", action="store_true", help="make the history of --seed small")
    parser.add_argument("--kind", help="the broken invariant that the small history must show")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to minimise (120)")
    asked = parser.parse_args()
    if asked.minimise and asked.seed is None:
        parser.error("--minimise needs --seed")
    if asked.seed is None and asked.histories is None and asked.minutes is None:
        asked.histories = 1000
    return asked


def _one(seed: int, small: bool, kind: str | None, seconds: float) -> int:
    with SimServer() as server:
        if small:
            outcome = minimise(server, seed, kind, seconds=seconds)
        else:
            outcome = history.run(server, Seeded(seed), seed=seed, story=True)
    _show(outcome)
    if outcome.violations and not small:
        print(f"minimise it: make simulate SEED={seed} MINIMISE=1")
    return bool(outcome.violations)


def _show(outcome: Outcome) -> None:
    for line in outcome.lines:
        print(line)
    print(
        f"{outcome.steps} steps, {outcome.seconds:.1f} s of virtual time, fingerprint {outcome.fingerprint},"
        f" faults: {', '.join(outcome.faults) or 'none'}"
    )
    for violation in outcome.violations:
        print(f"BROKEN {violation}")
    if not outcome.violations:
        print("all invariants hold")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts must be the same in every run of a seed.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
