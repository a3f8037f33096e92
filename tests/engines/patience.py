"""Waits for a cluster on a machine that may be busy, whatever time that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_SECONDS = 240.0


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait until it is true. Raises AssertionError if it never becomes true."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"it never came to it: {what}") from None
