"""What a driver process prints: records of its log, marked so that its gateway logs them too, among lines of others.

The engine's libraries, its workers and its JVM print as they like; that is for whoever looks closer.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import msgspec

MARK = "\x1e"
"""Begins a line that is a record: JSON, (level, logger, text)."""
CHATTY = ("ray", "pyspark", "py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers whose records are told like other lines that a library prints."""


class Teller(logging.Handler):
    """Writes records as marked lines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        level = logging.DEBUG if record.name.partition(".")[0] in CHATTY else record.levelno
        data = msgspec.json.encode((level, record.name, self.format(record)))
        try:
            self._stream.write(f"{MARK}{data.decode()}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return  # nobody listens any more


def tell_logs(level: int) -> None:
    """Let this process's log go to who started it."""
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(Teller(sys.stderr))
    root.setLevel(level)


def heard(line: str) -> tuple[int, str, str]:
    """(level, logger, text) of a line that was printed."""
    if line.startswith(MARK):
        try:
            level, name, text = msgspec.json.decode(line[1:], type=tuple[int, str, str])
        except msgspec.DecodeError:
            return logging.DEBUG, "", line[1:]
        return level, name, text
    return logging.DEBUG, "", line
