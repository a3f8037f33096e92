"""The commands that kill mutants, by name, from the narrowest to the widest."""

from __future__ import annotations

from pathlib import Path

PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "--no-header")
ONE_SERVER = "valkey-9"
SECONDS = 400.0
"""How long a command may take. One that takes longer hangs, which kills the mutant."""
SIMULATION = ("-m", "tests.simulation", "--seed", "0", "--histories", "600", "--processes", "2")
"""Arguments of Python; those of the other commands are pytest's. The same histories for each mutant."""
WIDE = ("simulation", "contracts")
"""What every mutant meets that its own tests have not killed."""


def command(name: str, root: Path) -> tuple[str, ...] | None:
    """Return the arguments for a name, or None if the tree does not have these tests.

    `contracts:commit_fence` is one file of contract tests, on one server; `contracts` is all of them.
    `servers:durability` is one on each server. `unit:journal` and `integration:order` are one file each.
    `simulation` is a number of seeded histories.
    """
    if name == "simulation":
        return SIMULATION if (root / "tests" / "simulation" / "__main__.py").exists() else None
    suite, _, test = name.partition(":")
    folder = "contracts" if suite == "servers" else suite
    target = f"tests/{folder}/test_{test}.py" if test else f"tests/{folder}"
    if not (root / target).exists():
        return None
    chosen = ("-k", ONE_SERVER) if suite == "contracts" else ()
    # A guard that is gone often shows as a wait that never ends.
    timeout = "--timeout=30" if folder == "contracts" else "--timeout=120"
    return (*PYTEST, target, timeout, *chosen)
