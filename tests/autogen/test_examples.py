"""The example of AutoGen programs prints what its page says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.autogen.sources import ROOT

WAITING = "Waiting for runtime to become idle..."
"""Printed beside what the writer prints: which of them comes first is not said."""


def test_the_example_prints_the_expected_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.autogen_team"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    printed = re.sub(r"(Added subscription: )\S+", r"\1<id>", done.stdout).splitlines()
    expected = (ROOT / "examples" / "autogen_team" / "expected_output.txt").read_text(encoding="utf-8").splitlines()
    assert WAITING in printed
    assert [line for line in printed if line != WAITING] == [line for line in expected if line != WAITING]
