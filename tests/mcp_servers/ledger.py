"""What servers have received, as lines of JSON in a file that survives them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "MCP_TEST_LEDGER"


def note(**seen: object) -> None:
    """Append a line in one write."""
    with open(os.environ[VARIABLE], "ab", buffering=0) as file:
        file.write(json.dumps({"pid": os.getpid(), **seen}).encode() + b"\n")


class Ledger:
    """The file as a test reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {VARIABLE: str(path)}

    def lines(self, event: str | None = None, **wanted: object) -> list[dict[str, Any]]:
        """All lines with this event and these values."""
        if not self.path.exists():
            return []
        whole = [text for text in self.path.read_text().split("\n") if text]
        found = [json.loads(text) for text in whole]
        if event is not None:
            wanted["event"] = event
        return [line for line in found if all(line.get(name) == value for name, value in wanted.items())]
