"""Runs many histories in several processes, and reports the results."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from tests.simulation import history
from tests.simulation.choice_source import Seeded
from tests.simulation.server import SimServer

PROGRESS_SECONDS = 30.0
YIELDING = 10
"""Niceness in the background. More would starve histories on a machine that is always busy."""
SHOWN = 8
"""Seeds that the summary names for each broken invariant."""


@dataclass
class Found:
    """The results of the histories so far."""

    histories: int = 0
    broken: int = 0
    seeds: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, seed: int, violations: list[tuple[str, str]]) -> None:
        self.histories += 1
        self.broken += bool(violations)
        for kind, text in violations:
            seeds = self.seeds.setdefault(kind, [])
            if seed not in seeds:
                seeds.append(seed)
            if kind not in self.examples:
                self.examples[kind] = text
                print(f"seed {seed}: {kind}: {text[:300]}\n  replay it: make simulate SEED={seed}", flush=True)

    def tell(self, seconds: float) -> None:
        rate = self.histories / seconds if seconds else 0.0
        print(
            f"{self.histories} histories in {seconds:.0f} s ({rate:.0f} per second), {self.broken} broke an invariant"
        )
        for kind, seeds in sorted(self.seeds.items()):
            some = ", ".join(str(seed) for seed in sorted(seeds)[:SHOWN])
            print(f"  {kind}: {len(seeds)} histories, seeds {some}{', …' if len(seeds) > SHOWN else ''}")
        if self.seeds:
            seed = min(min(seeds) for seeds in self.seeds.values())
            print(f"replay one:   make simulate SEED={seed}")
            print(f"minimise one: make simulate SEED={seed} MINIMISE=1")


Report = tuple[int, list[tuple[str, str]]]


def run_many(
    first: int, histories: int | None, minutes: float | None, processes: int, *, background: bool = False
) -> int:
    """Run `histories` histories, or as many as `minutes` allow. Return 1 if an invariant broke, else 0.

    In the `background` they give way to other processes, since virtual time knows no lateness.
    """
    print(f"the first seed is {first}", flush=True)
    context = multiprocessing.get_context("spawn")
    reports: Queue[Report | None] = context.Queue()
    began = time.monotonic()
    workers = [
        context.Process(
            target=_work, args=(first, number, processes, histories, minutes, reports, background), daemon=True
        )
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    found, running, died = Found(), processes, False
    told = began
    while running:
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"{found.histories} histories after {told - began:.0f} s", flush=True)
        try:
            report = reports.get(timeout=1.0)
        except KeyboardInterrupt:
            break  # the summary so far is worth having
        except Empty:
            if any(worker.exitcode for worker in workers):
                died = True
                break
            continue
        if report is None:
            running -= 1
        else:
            found.add(*report)
    for worker in workers:
        if running:
            worker.terminate()
        worker.join()
    found.tell(time.monotonic() - began)
    if died:
        print("a process of the simulation ended by an error of its own: see above")
    return bool(found.broken) or died


def _work(
    first: int,
    number: int,
    processes: int,
    histories: int | None,
    minutes: float | None,
    reports: Queue[Report | None],
    background: bool,
) -> None:
    until = None if minutes is None else time.monotonic() + 60 * minutes
    parent = multiprocessing.parent_process()
    if background:
        stand_back()
    with SimServer() as server:
        # The first history loads what all others use: the collector need not look at it again.
        history.run(server, Seeded(first), seed=first)
        gc.collect()
        gc.freeze()
        gc.set_threshold(4000, 20, 1000)
        for seed in _seeds(first, number, processes, histories):
            if until is not None and time.monotonic() > until:
                break
            if parent is not None and not parent.is_alive():
                return
            try:
                outcome = history.run(server, Seeded(seed), seed=seed)
            except BaseException:
                print(f"seed {seed}: the simulation itself failed", file=sys.stderr, flush=True)
                raise
            reports.put((seed, [(violation.kind, violation.text) for violation in outcome.violations]))
    reports.put(None)


def stand_back() -> None:
    """Let this process, and those that it starts, give way to others."""
    os.nice(YIELDING)
    # Linux may divide a processor among sessions first. Then niceness counts within a session, which has its own.
    os.setsid()
    with contextlib.suppress(OSError):  # it does not
        Path("/proc/self/autogroup").write_text(str(YIELDING))


def _seeds(first: int, number: int, processes: int, histories: int | None) -> Iterator[int]:
    for offset in count(number, processes):
        if histories is not None and offset >= histories:
            return
        yield first + offset
