"""What one replica of the gateway accepts at once, and how often."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime_core.gateway.problems import OVERLOADED, RATE, RETRY_SECONDS, STREAMS, Problem

BODIES_MAX_BYTES = 64 * 1024 * 1024
"""Bodies that are in memory at once."""
CALLERS_MAX = 10_000
"""Callers whose rate is remembered."""
BURST_SECONDS = 1.0
"""A caller may send the requests of this time at once."""


class Limits:
    """Counts the bodies in memory, the open streams, and the requests of each caller."""

    def __init__(self, rate: float, streams_max: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`rate`: requests per second of one caller; 0: no limit."""
        self._rate = rate
        self._streams_max = streams_max
        self._monotonic = monotonic
        self._bodies = 0
        self.open_streams = 0
        self._spent: OrderedDict[str, float] = OrderedDict()
        """Caller → when its last request will be paid for; the longest silent first."""

    def count_request(self, caller: str, requests: int = 1) -> None:
        """Count requests of a caller. Raises Problem if they come too fast."""
        if not self._rate:
            return
        now = self._monotonic()
        due = max(self._spent.get(caller, 0.0), now)
        wait = due - now - BURST_SECONDS
        if wait > 0:
            raise Problem(RATE, f"the limit is {self._rate:g} requests per second", "", wait)
        self._spent[caller] = due + requests / self._rate
        self._spent.move_to_end(caller)
        if len(self._spent) > CALLERS_MAX:
            self._spent.popitem(last=False)

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count a body: call the function with the size of each part. It raises Problem if memory is short."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self._bodies + size > BODIES_MAX_BYTES:
                raise Problem(OVERLOADED, "too many bodies are being read", "", RETRY_SECONDS)
            self._bodies += size
            counted += size

        try:
            yield count
        finally:
            self._bodies -= counted

    def open_stream(self) -> None:
        """Count a stream until `close_stream`. Raises Problem if too many are open."""
        if self.open_streams >= self._streams_max:
            raise Problem(STREAMS, f"this replica has {self._streams_max} open streams", "", RETRY_SECONDS)
        self.open_streams += 1

    def close_stream(self) -> None:
        self.open_streams -= 1
