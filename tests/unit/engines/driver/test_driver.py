"""A driver's output in the gateway's log: an endless line takes bounded memory and shows no secret."""

from __future__ import annotations

import io
from collections import deque

import pytest

from runtime_core.base.text import LONGEST_MESSAGE
from runtime_core.engines.driver.driver import _listen
from runtime_core.telemetry.logs import LONGEST_LINE

KEY = "ghp" + "_0123456789abcdefghijABCDEFGHIJ012345"


class Endless(io.RawIOBase):
    """A line of 64 MiB without an end, which counts the bytes that are read at once."""

    def __init__(self) -> None:
        self.left = 64 * 1024 * 1024
        self.most = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        wanted = self.left if size is None or size < 0 else min(size, self.left)
        self.most = max(self.most, wanted)
        self.left -= wanted
        return b"x" * wanted


def test_a_printed_line_without_end_is_read_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    printed, said = Endless(), deque[str](maxlen=2)
    _listen(printed, said, "ray")  # type: ignore[arg-type]
    assert (printed.left, printed.most) == (0, LONGEST_LINE)
    assert [len(text) for text in said] == [LONGEST_MESSAGE] * 2


def test_the_last_lines_of_a_driver_are_redacted_before_they_are_shortened() -> None:
    said = deque[str]()
    half = KEY[: len(KEY) // 2]
    _listen(io.BytesIO(b"x" * (LONGEST_MESSAGE - len(half) - 1) + f" {KEY}\n".encode()), said, "ray")
    assert half not in said[0]
