"""Read `tests/flaky.txt`, the list of flaky tests: `python -m tests.flaky` fails if one was not fixed in time."""

from __future__ import annotations

import sys
from datetime import date, timedelta
from pathlib import Path

LIST = Path(__file__).with_name("flaky.txt")
GRACE = timedelta(days=14)
"""How long a listed test is still rerun."""


def name_of(test: str) -> str:
    """Return a test's id without parameters: a race seldom depends on them."""
    return test.partition("[")[0]


def read(path: Path = LIST) -> dict[str, date]:
    """Return the day on which each listed test was first seen to be flaky.

    Raises:
        ValueError: A line is not a date and a test's id, or a test is listed twice.
    """
    found: dict[str, date] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        day, _, test = line.partition(" ")
        test = test.strip()
        try:
            seen = date.fromisoformat(day)
        except ValueError:
            raise ValueError(f"{path}:{number}: {day!r} is not a date such as 2026-01-31") from None
        if "::" not in test or test != name_of(test):
            raise ValueError(f"{path}:{number}: {test!r} is not the id of a test without parameters")
        if test in found:
            raise ValueError(f"{path}:{number}: {test} is listed twice; keep the earlier date")
        found[test] = seen
    return found


def is_overdue(seen: date, today: date) -> bool:
    return today - seen > GRACE


def main(path: Path = LIST, today: date | None = None) -> int:
    """Print the tests that are listed for too long. Return 1 if there are any."""
    today = today or date.today()
    overdue = {test: seen for test, seen in read(path).items() if is_overdue(seen, today)}
    for test, seen in overdue.items():
        print(f"OVERDUE: {test} is listed as flaky since {seen}: fix it and remove its line from tests/{path.name}")
    return 1 if overdue else 0


if __name__ == "__main__":
    sys.exit(main())
