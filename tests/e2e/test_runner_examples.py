"""The examples of runners print what they should, each as the program that a user starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = {
    "custom_runner": "empty completed \ngreets completed Hello, world\nrefuses failed whom shall I greet?\n",
    "tree_search": "completed find: bee a bee\n",
    "clear_parts": "completed [3, 10, 5, 16, 8, 4, 2, 1]\n",
    "event_driven": "completed A STREAM!\n",
    "task_with_hooks": (
        "init_logging task_created\n"
        "init_context task_created\n"
        "weft.step.recorded outline completed\n"
        "weft.step.recorded write completed\n"
        "weft.step.recorded weft.task completed\n"
        "weft.task.completed What is a stream? Who needs a stream?\n"
    ),
}


@pytest.mark.parametrize("example", OUTPUT)
def test_the_code_of_an_example_prints_its_documented_output(example: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    done = subprocess.run(
        [sys.executable, "-m", f"examples.runners.{example}"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == (OUTPUT[example], 0), done.stderr
