"""Run pytest, then rerun the failed tests alone: `python -m tests.rerun_failed [arguments of pytest]`.

Thousands of tests run here against real servers and processes, on shared machines. A test that fails among the others
and passes alone has a race, in the test or in the code under test. The change is seldom the cause, so such a failure
does not block it. It is still a defect: it gets a line in `tests/flaky.txt` with its date, and the test is not rerun
once that line is older than 14 days. A test that fails twice blocks the change, and so do more than three failures.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from tests import flaky

MAX_RERUNS = 3
"""More failures than these have one cause, which a rerun would hide."""


class Failures:
    """Collects the failed tests of one run, in order; a pytest plugin."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None


def main(arguments: list[str], path: Path = flaky.LIST, today: date | None = None) -> int:
    """Return pytest's exit status, or 0 if every test that failed passed alone and may still be flaky."""
    today = today or date.today()
    listed = flaky.read(path)
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.tests) <= MAX_RERUNS:
        return status
    if overdue := [test for test in failures.tests if _is_overdue(test, listed, today)]:
        for test in overdue:
            seen = listed[flaky.name_of(test)]
            print(f"\nNot rerun: {test} has been listed as flaky since {seen}, for more than {flaky.GRACE.days} days")
        return status
    print(f"\nRerunning {len(failures.tests)} failed tests alone:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failures.tests], check=False).returncode
    if again == 0:
        for test in failures.tests:
            print(
                f"FLAKY: {test} failed above and passed alone: the test or the code under test has a race", flush=True
            )
        for name in dict.fromkeys(map(flaky.name_of, failures.tests)):
            if name not in listed:
                print(f"FLAKY: add this line to tests/{path.name}: {today} {name}", flush=True)
    return again


def _is_overdue(test: str, listed: dict[str, date], today: date) -> bool:
    seen = listed.get(flaky.name_of(test))
    return seen is not None and flaky.is_overdue(seen, today)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
