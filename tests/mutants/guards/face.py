"""The public names, and the start of services from an installed wheel."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

MUTANTS: tuple[Mutant, ...] = (
    python(
        "lazy.py",
        "extra",
        "            if extra is None:\n",
        "            if True:\n",
        "a name without its library says which extra installs it",
        "unit:lazy",
    ),
    python(
        "lazy.py",
        "ours",
        '    if missing.partition(".")[0] in _OURS:\n',
        "    if False:\n",
        "a broken module of ours is not taken for a missing extra",
        "unit:lazy",
    ),
    python(
        "host/services.py",
        "unknown",
        "    if len(arguments) > 1 or name not in SERVICES:\n",
        "    if False:\n",
        "a name of no service is told in one line",
        "unit/host:services",
    ),
    python(
        "cli/up.py",
        "own_modules",
        'argv = [sys.executable, "-P", "-m", ENTRY',
        'argv = [sys.executable, "-m", ENTRY',
        "a folder of the user's does not shadow Weft's modules",
        "unit/host:supervisor",
    ),
)
