"""Waiting for what a cluster does on a machine that may be busy: the time decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_SECONDS = 240.0


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait until it is true. AssertionError where it never comes to it."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"it never came to it: {what}") from None
