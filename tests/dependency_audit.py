"""Looks up known vulnerabilities of every locked package: `make audit`.

Exit status 1 means that a vulnerability was found. A service that does not answer, or does not know a package, fails
nothing: what was not looked up is said instead, so that no silence reads as a clean bill. Only the standard library and
pip-audit, as a program, are needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
IGNORED = LOCKS / "audit-ignored.txt"
"""One id a line, with the reason behind `#`."""
SECONDS = 600


@dataclass
class Audit:
    """What was found over all locks."""

    looked_up: set[str] = field(default_factory=set)
    not_looked_up: set[str] = field(default_factory=set)
    vulnerable: dict[tuple[str, str], str] = field(default_factory=dict)
    """By package with version, and id: the versions that mend it."""
    failures: list[str] = field(default_factory=list)


def ignored(file: Path = IGNORED) -> list[str]:
    """Ids of vulnerabilities that somebody has judged. Raises ValueError for one without a reason."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        name, _, reason = line.partition("#")
        if not name.strip():
            continue
        if not reason.strip():
            raise ValueError(f"{file.name}: give the reason behind {name.strip()}, after a #")
        found.append(name.strip())
    return found


def is_answered(lock: Path, command: Sequence[str]) -> bool:
    """Whether the service knows the first package of a lock: one without data is not asked for all of them."""
    pins = [line.partition(" ")[0] for line in lock.read_text(encoding="utf-8").splitlines() if re.match(r"\w", line)]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / lock.name
        first.write_text(f"{pins[0]}\n", encoding="utf-8")
        return bool(audit([first], [*command, "--no-deps"], [], hashes=False).looked_up)


def audit(locks: Sequence[Path], command: Sequence[str], ids: Sequence[str], *, hashes: bool = True) -> Audit:
    """Ask about the packages of each lock."""
    result = Audit()
    for lock in locks:
        options = ["--requirement", str(lock), "--disable-pip", "--format", "json"]
        options += ["--require-hashes"] if hashes else []
        options += [option for one in ids for option in ("--ignore-vuln", one)]
        try:
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS, check=False)
            found = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            why = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else []
            result.failures.append(f"{lock.name}: {(why or [str(error)])[0][:300]}")
            continue
        _read(found, result)
    return result


def _read(found: Any, result: Audit) -> None:  # Any: JSON
    for package in found["dependencies"]:
        if "skip_reason" in package:
            result.not_looked_up.add(package["name"])
            continue
        result.looked_up.add(package["name"])
        for one in package["vulns"]:
            mended = ", ".join(one.get("fix_versions", ())) or "no version"
            result.vulnerable[f"{package['name']} {package['version']}", one["id"]] = mended


def report(result: Audit) -> int:
    """Print the outcome; returns the exit status."""
    for (package, name), mended in sorted(result.vulnerable.items()):
        print(f"{package} has {name}, which is mended in {mended}")
    for failure in result.failures:
        print(f"NOT AUDITED: {failure}")
    missing = sorted(result.not_looked_up - result.looked_up)
    if missing:
        print(f"NOT AUDITED: the service knows nothing of {len(missing)} packages: {', '.join(missing)}")
    print(f"{len(result.looked_up)} packages looked up, {len(result.vulnerable)} known vulnerabilities")
    return 1 if result.vulnerable else 0


def main(arguments: Sequence[str]) -> int:
    """`arguments` are the program that asks, pip-audit."""
    locks = sorted(path for path in LOCKS.glob("*.txt") if path != IGNORED)
    if not is_answered(LOCKS / "run.txt", arguments):
        print("NOT AUDITED: the service of known vulnerabilities is not reached from here, or has no data")
        return 0
    return report(audit(locks, arguments, ignored()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [str(Path(sys.executable).with_name("pip-audit"))]))
