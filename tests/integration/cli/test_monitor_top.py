"""`weft top`, and the counts of long commands on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path

from tests.integration.cli.desk import Desk, Weft, command, environment, shown_with, until


class Terminal:
    """A command whose output and errors are on a terminal."""

    def __init__(self, desk: Desk, *arguments: str, output: Path | None = None) -> None:
        self._main, other = pty.openpty()
        out = other if output is None else os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.process = subprocess.Popen(
            command(*arguments), cwd=desk.folder, env=environment(desk.folder), stdin=other, stdout=out, stderr=other
        )
        for file in {other, out}:
            os.close(file)
        self.shown = ""

    def until(self, text: str) -> None:
        """Read until the text is there. At the command's end, reading fails."""
        while text not in self.shown:
            self.shown += os.read(self._main, 65536).decode(errors="replace")

    def rest(self) -> str:
        try:
            while data := os.read(self._main, 65536):
                self.shown += data.decode(errors="replace")
        except OSError:  # the terminal's other side is closed
            pass
        os.close(self._main)
        return self.shown


def test_top_prints_once_without_a_terminal(weft: Weft, desk: Desk) -> None:
    weft("submit", "sleeper", "600", "--task-id", "top-1", "--no-wait")
    shown_with(weft, "top-1", lambda view: view["status"] == "waiting")
    found = weft("top", "--json").json
    assert found["open"] >= 1
    assert found["started"] >= found["open"]
    assert [view["status"] for view in found["tasks"] if view["task_id"] == "top-1"] == ["waiting"]
    assert {row["stream"] for row in found["streams"]} >= {"tasks", "agent", "tool"}
    text = weft("top").out
    assert "\x1b" not in text
    [line] = [line for line in text.splitlines() if line.startswith("top-1 ")]
    assert "sleeper" in line
    assert "sleeping for" in line
    assert "OLDEST OPEN TASKS" not in weft("top", "--tasks", "0").out
    weft("task", "cancel", "top-1")


def test_top_and_lag_show_what_waits_for_a_slot(weft: Weft) -> None:
    for task in ("slot-1", "slot-2"):
        weft("submit", "alone", "--task-id", task, "--no-wait")
        shown_with(weft, task, lambda view: view["questions"] or any("limit" in wait for wait in view["waits_for"]))
    for verb in ("lag", "top"):
        assert weft(verb, "--json").json["limits"] == {"agent:alone": {"held": 1, "waiting": 1}}
        lines = [line.split() for line in weft(verb).out.splitlines()]
        assert ["LIMITS", "OF", "SLOTS", "HELD", "WAITING"] in lines
        assert ["agent:alone", "1", "1"] in lines
    [line] = [line for line in weft("top", "--tasks", "100").out.splitlines() if line.startswith("slot-2 ")]
    assert "for a slot of its limit for all" in line
    for task in ("slot-1", "slot-2"):
        weft("task", "cancel", task)
    assert "LIMITS OF" not in weft("top").out


def test_top_redraws_on_a_terminal_and_leaves_it_as_it_was(desk: Desk) -> None:
    terminal = Terminal(desk, "top", "--every", "0.2")
    terminal.until("ended/s")  # the second picture has rates
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(60) == 130
    shown = terminal.rest()
    assert shown.startswith("\x1b[?1049h")
    assert "\x1b[?25h\x1b[?1049l" in shown
    assert "Traceback" not in shown


def test_an_export_and_a_check_show_their_progress_on_a_terminal(weft: Weft, desk: Desk, tmp_path: Path) -> None:
    assert weft("submit", "echo", "1", "--task-id", "progress-1").status == 0
    until(lambda: weft("trajectory", "show", "progress-1").status == 0)
    for arguments, said in (
        (("trajectory", "export", "--task", "progress-1", "--output", str(tmp_path / "steps")), "1 steps exported"),
        (("trajectory", "export", "--format", "sar", "--output", str(tmp_path / "items")), "items exported"),
        (("replay", "check", "--app", "desk:app", "--agent", "echo"), "1 tasks checked"),
    ):  # fmt: skip
        terminal = Terminal(desk, *arguments, output=tmp_path / "out")
        shown = terminal.rest()
        assert terminal.process.wait(60) == 0, shown
        assert said in shown
        assert shown.endswith("\r\x1b[K"), "the last count stays on the line"
        assert "exported" not in (tmp_path / "out").read_text()
    assert weft("trajectory", "export", "--task", "progress-1").err == ""
