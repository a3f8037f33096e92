"""Erases blobs whose retention has ended: large results of engine functions, on behalf of the whole namespace."""

from __future__ import annotations

import asyncio
import logging
import time

from runtime_core.blobs.store import open_blobs
from runtime_core.config.settings import Settings

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 600.0


class BlobSweeper:
    """The blob store's only housekeeping; the leader of the first partition runs it."""

    def __init__(self, settings: Settings, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._settings = settings
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Sweep until cancelled; an unreachable store is logged and retried."""
        if self._settings.blob_url is None:
            return
        while True:
            try:
                # In a thread: what lists files waits for a disk, or for a network.
                erased = await asyncio.to_thread(self.sweep)
            except Exception as error:  # whatever the place of the blobs raises
                logger.warning("the blob store %s was not swept: %s", self._settings.blob_url, error)
            else:
                if erased:
                    logger.info("%d large results were erased, since their retention has ended", erased)
            await asyncio.sleep(self._interval_seconds)

    def sweep(self) -> int:
        """Erase old blobs and return their number."""
        assert self._settings.blob_url is not None  # `run` has looked
        before = time.time() - self._settings.blob_retention_seconds
        return open_blobs(self._settings.blob_url).sweep(self._settings.namespace, before)
