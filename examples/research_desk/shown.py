"""The output on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from weft import StreamEvent


class Screen:
    """Prints lines to standard output immediately."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._attempts: dict[str, int] = {}
        self._searched = 0
        self._shards = 0
        self._found = 0

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def step(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.line(f"{time.monotonic() - self._began:6.2f} s  {text}")

    def event(self, event: StreamEvent) -> None:
        """Print one event of the task: progress of the researcher, or a part of the report."""
        if event.type != "weft.output.delta":
            return
        run, attempt = event.data["run_id"], event.data["attempt"]
        if attempt > self._attempts.setdefault(run, attempt):
            self._attempts[run] = attempt
            self.step(f"(again from the start: attempt {attempt})")
        if event.data.get("progress"):
            self._of_engine(event.data["value"])
        elif "text" in event.data:
            sys.stdout.write(event.text)
            sys.stdout.flush()
        else:
            self._progress(event.data["value"])

    def _of_engine(self, value: dict[str, Any]) -> None:  # Any: what an engine reports of a step
        if "waiting" in value:
            self.step(f"waits for {value['waiting']}: {value['reason']}")
        elif "total" in value:
            self.step(f"{value['done']} of {value['total']} shards searched")

    def _progress(self, value: dict[str, Any]) -> None:  # Any: what app.py emits
        if "shards" in value:
            self._shards = value["shards"]
            rest = f"; {value['skipped']} binary or unreadable ones are skipped" if value["skipped"] else ""
            more = " (there are more: the first ones are searched)" if value["more"] else ""
            self.step(f"{value['documents']} documents in {value['shards']} shards{rest}{more}")
            return
        self._searched += 1
        self._found += value["matching"]
        self.step(
            f"shard {value['shard']} searched: {value['matching']} of {value['passages']} passages speak of it"
            f" ({self._searched}/{self._shards})"
        )
        if self._searched == self._shards:
            self.step(f"{self._found} passages found; ranking them, then writing")
            self.line()
