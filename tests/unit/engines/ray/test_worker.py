"""A worker of Ray ends itself only if a call continues after its interrupt."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SECONDS = 60.0

PROGRAM = """
import _thread, contextlib, functools, operator, os, queue, signal, threading, time
from runtime_core.engines.ray.worker import Interrupts

endings = queue.SimpleQueue()
late = threading.Event()


class Ending(threading.Timer):
    # It ends the process, or not, when the test says so.

    def start(self):
        super().start()
        endings.put(self)

    def run(self):
        late.wait()
        self.function(*self.args)


threading.Timer = Ending


def end_when_interrupted():
    with contextlib.suppress(KeyboardInterrupt):
        _thread.interrupt_main()  # as Ray does, from another thread
        while True:
            pass
"""

STUCK = """
import _thread, functools, operator, time

def hang():
    # As when Ray interrupts a call that is in C: the main thread notices nothing before the sleep has ended.
    list(map(operator.call, (_thread.interrupt_main, functools.partial(time.sleep, 600))))
"""
HANGS_IN_THE_CALL = (
    STUCK
    + """
from weft import App

app = App("stuck")
app.engine_function(hang)
"""
)
HANGS_IN_THE_IMPORT = STUCK + "hang()\n"
RUNS_A_JOB = """
import sys
from runtime_core.engines.protocol import Registered, Work
from runtime_core.engines.ray.worker import WorkerJob, run_job
from runtime_core.engines.results import Results

call = Registered("stuck_app:app", sys.argv[1], "hang", b"{}")
for message in run_job(WorkerJob(Work(call, "hang"), Results()).packed()):
    print(type(message).__name__, flush=True)
"""


def run(program: str) -> tuple[int, str]:
    """Return the status of a process that ran this, and what it printed."""
    text = PROGRAM + textwrap.dedent(program)
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def test_a_call_that_does_not_notice_its_interrupt_ends_with_its_process() -> None:
    program = """
    late.set()
    with Interrupts().watched():
        # One call of C after the other: the main thread notices nothing before both have ended.
        list(map(operator.call, (_thread.interrupt_main, functools.partial(time.sleep, 600))))
    """
    assert run(program) == (1, "")


def test_a_call_that_catches_its_interrupt_and_continues_ends_with_its_process() -> None:
    program = """
    with Interrupts().watched():
        end_when_interrupted()
        print("goes on", flush=True)
        late.set()
        while True:
            pass
    """
    assert run(program) == (1, "goes on\n")


def test_a_call_that_ends_after_its_interrupt_leaves_the_process_to_the_next_one() -> None:
    program = """
    watch = Interrupts()
    with watch.watched():
        end_when_interrupted()
    with watch.watched():
        late.set()
        endings.get().join()
        print("the next call", flush=True)
    assert signal.set_wakeup_fd(-1) == -1
    """
    assert run(program) == (0, "the next call\n")


def test_a_call_that_has_ended_leaves_its_process_idle() -> None:
    program = """
    with Interrupts().watched():
        end_when_interrupted()
    late.set()
    endings.get().join()
    print("idle", flush=True)
    """
    assert run(program) == (0, "idle\n")


def test_an_interrupt_that_is_read_late_does_not_end_the_next_call() -> None:
    program = """
    reads = threading.Event()


    class Late(Interrupts):
        def _listen(self):
            reads.wait()
            super()._listen()


    watch = Late()
    with watch.watched():
        end_when_interrupted()
    with watch.watched():
        reads.set()
        late.set()
        endings.get().join()
        print("the next call", flush=True)
    """
    assert run(program) == (0, "the next call\n")


def test_the_signals_of_a_forked_child_are_its_own() -> None:
    program = """
    watch = Interrupts()
    with watch.watched():
        if not (child := os.fork()):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        [listener] = [each for each in threading.enumerate() if each.name == "interrupts"]
        os.close(watch._signals)
        listener.join()
        assert endings.empty()
        print("the call", flush=True)
        signal.set_wakeup_fd(-1)
    """
    assert run(program) == (0, "the call\n")


@pytest.mark.parametrize(("app", "printed"), [(HANGS_IN_THE_CALL, "CallProcess\n"), (HANGS_IN_THE_IMPORT, "")])
def test_a_cancelled_call_that_hangs_ends_with_its_process(tmp_path: Path, app: str, printed: str) -> None:
    (tmp_path / "stuck_app.py").write_text(app)
    command = (sys.executable, "-c", RUNS_A_JOB, str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, printed, "")
