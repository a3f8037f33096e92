"""A child that user code forks never comes back into Weft, and ends by a signal as usual."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKS = """
import os, sys, threading
from runtime_core.base.lifeline import guard_forks
from runtime_core.declare.tool import _guarded

guard_forks()

def twice():
    if how == "process":
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=print, args=("ran",), kwargs={"flush": True})
        child.start()
        child.join()
        return child.exitcode
    if how == "terminated":
        import multiprocessing, signal, time
        signal.signal(signal.SIGTERM, lambda *_: None)
        heard, says = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=lambda: (says.send(1), time.sleep(600)))
        child.start()
        heard.recv()
        child.terminate()
        child.join(60)
        return -child.exitcode
    pid = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else "child"

how = sys.argv[1]
print(_guarded("it", twice), flush=True)
"""


@pytest.mark.parametrize(("how", "said"), [("fork", ["70"]), ("process", ["ran", "0"]), ("terminated", ["15"])])
def test_a_child_ends_where_it_would_come_back(how: str, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, how],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert done.stdout.split() == said
    assert ("returned from the code that forked it" in done.stderr) is (how == "fork")
