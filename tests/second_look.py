"""Runs pytest, and what failed once more, by itself: `python -m tests.second_look [arguments of pytest]`.

Thousands of tests here run against real servers and processes, on machines that others use as well. One that fails
among all others and passes alone has found a race, in itself or in what it tests. That is told loudly and has to be
mended, but it is seldom the doing of the change at hand, and does not refuse it. What fails twice does, and so do more
than three failures.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_MOST = 3
"""More failures than these have one cause, which a second look would only hide."""


class Failures:
    """The tests of one run that failed, in order; a pytest plugin."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None


def main(arguments: list[str]) -> int:
    """The exit status: pytest's own, or 0 where all that failed has passed alone."""
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.tests) <= AT_MOST:
        return status
    print(f"\nA second look at {len(failures.tests)} of the tests, by themselves:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failures.tests], check=False).returncode
    if again == 0:
        for test in failures.tests:
            print(f"FLAKY: {test} failed above and passed alone: a defect of the test or of what it tests", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
