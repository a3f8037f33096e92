"""Remove guards one at a time and see whether a test notices: `make mutants`, `make mutants ONLY=submit.dedupe,…`.

Results are kept in `.cache/mutants.json` while the tree stays the same, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.commands import PYTEST, WIDE, command
from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.scratch import ROOT, Scratch, digest, scratch

KEPT = ROOT / ".cache" / "mutants.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which command noticed that the guard is gone; empty if none did."""

    killed_by: str
    seconds: float


def judge(copy: Scratch, mutant: Mutant, names: tuple[str, ...]) -> Verdict:
    """Run these commands on the copy without the guard, until one fails."""
    started = time.monotonic()
    with copy.without(mutant):
        for name in names:
            arguments = command(name, copy.root)
            if arguments is not None and not copy.passes(arguments, imported=mutant.file.endswith(".lua")):
                return Verdict(name, time.monotonic() - started)
    return Verdict("", time.monotonic() - started)


class Results:
    """The known results of this tree's mutants, written to disk after each one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = digest()
        self.verdicts: dict[str, Verdict] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["tree"] == self._tree:
                self.verdicts = {key: Verdict(**verdict) for key, verdict in kept["verdicts"].items()}

    def find(self, mutant: Mutant) -> Verdict | None:
        return self.verdicts.get(_key(mutant))

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        self.verdicts[_key(mutant)] = verdict
        self._path.parent.mkdir(exist_ok=True)
        kept = {"tree": self._tree, "verdicts": {key: asdict(one) for key, one in self.verdicts.items()}}
        self._path.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _key(mutant: Mutant) -> str:
    return json.dumps([mutant.id, mutant.anchor, mutant.replacement, mutant.tests])


def chosen(only: str) -> list[Mutant]:
    """The mutants with these ids, or whose ids start with one and a dot; all if `only` is empty."""
    if not only:
        return list(MUTANTS)
    wanted = tuple(only.split(","))
    found = [
        mutant for mutant in MUTANTS if mutant.id in wanted or mutant.id.startswith(tuple(f"{w}." for w in wanted))
    ]
    if not found:
        raise SystemExit(f"no mutant is named {only}; known are {', '.join(mutant.id for mutant in MUTANTS)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="ids, or names of functions, with commas between")
    parser.add_argument("--narrow", action="store_true", help="run only the tests that a mutant names")
    parser.add_argument("--again", action="store_true", help="forget the results that are kept")
    parser.add_argument("--results", type=Path, default=KEPT, help="where results are kept (.cache/mutants.json)")
    options = parser.parse_args()
    mutants, survivors = chosen(options.only), []
    results = Results(options.results)
    with scratch(forks=True) as copy:
        if not copy.passes((*PYTEST, "tests/mutants/test_copy.py")):
            raise SystemExit("the copy of the tree is not what its tests import")
        for mutant in mutants:
            verdict = None if options.again else results.find(mutant)
            if verdict is None:
                names = mutant.tests if options.narrow else (*mutant.tests, *WIDE)
                verdict = judge(copy, mutant, names)
                if verdict.killed_by or not options.narrow:
                    results.keep(mutant, verdict)
            outcome = f"killed by {verdict.killed_by}" if verdict.killed_by else "SURVIVED"
            if not verdict.killed_by and mutant.survives:
                outcome = f"survives: {mutant.survives}"
            elif not verdict.killed_by:
                survivors.append(mutant)
            elif mutant.survives:
                outcome += " (listed as a survivor: remove the reason)"
            print(f"{mutant.id:<38} {verdict.seconds:6.1f} s  {outcome}", flush=True)
    print(f"{len(mutants)} mutants, {len(survivors)} survived without a reason")
    for mutant in survivors:
        print(f"  {mutant.id}: {mutant.promise}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
