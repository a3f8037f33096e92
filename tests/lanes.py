"""Run make targets in lanes beside each other: `python -m tests.lanes test-main -- test-ray -- test-autogen`.

Targets of one lane run one after the other, even after one that fails. The first lane prints as it goes. Each other
lane writes to `.cache/lanes/`, and its output follows once all lanes have ended. Most tests wait more than they
compute, so lanes on two cores take little longer than the longest one alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

LOGS = Path(".cache") / "lanes"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A target that ran."""

    target: str
    seconds: float
    status: int


def run(targets: Sequence[str], log: Path | None) -> list[Outcome]:
    """Run targets, with their output in `log` if there is one. A target that a signal ends ends the lane."""
    ended: list[Outcome] = []
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        for target in targets:
            # The arguments in ARGS are for the main suite: other environments lack some of its plugins.
            command = ["make", "--no-print-directory", target, *(["ARGS="] if log else [])]
            started = time.monotonic()
            status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
            ended.append(Outcome(target, time.monotonic() - started, status))
            if status < 0:
                break
    return ended


def split(arguments: Sequence[str]) -> list[list[str]]:
    """Return the targets of each lane: `--` begins the next one."""
    lanes: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            lanes.append([])
        else:
            lanes[-1].append(argument)
    return lanes


def main(arguments: Sequence[str]) -> int:
    """Run the lanes and say how each target ended. Return 1 if any failed."""
    lanes = split(arguments)
    LOGS.mkdir(parents=True, exist_ok=True)
    logs = [None, *(LOGS / f"{lane[0]}.log" for lane in lanes[1:])]
    # Ctrl-C reaches every process of the terminal, so each lane ends by itself before the pool does.
    with ThreadPoolExecutor(len(lanes)) as pool:
        outcomes = [outcome for ended in pool.map(run, lanes, logs) for outcome in ended]
    for log in logs:
        if log:
            print(f"\n{log}:\n{log.read_text(encoding='utf-8', errors='replace')}")
    for outcome in outcomes:
        print(f"{outcome.target:<14} {outcome.seconds:5.0f} s  {'FAILED' if outcome.status else 'passed'}", flush=True)
    return 1 if any(outcome.status for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
