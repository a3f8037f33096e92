"""What all apps of the namespace offer, as their handlers have said on the broker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus

FRESH_SECONDS = 2.0
"""How long what was read counts; who offers something new is seen that much later."""


class Offers:
    """The manifests of one partition's broker, read when they are asked for and kept for some seconds."""

    __slots__ = ("_bus", "_manifests", "_raw", "_read_at")

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._raw: list[bytes] = []
        self._manifests: Sequence[Manifest] = ()
        self._read_at = -FRESH_SECONDS

    async def manifests(self) -> Sequence[Manifest]:
        """One for each app, by its name; the same object while nothing has changed. Raises BusError."""
        if time.monotonic() - self._read_at < FRESH_SECONDS:
            return self._manifests
        raw = sorted(cast(list[bytes], await self._bus.transport.call("HVALS", self._bus.keys.manifests)))
        self._read_at = time.monotonic()
        if raw != self._raw:
            self._raw = raw
            self._manifests = tuple(sorted(_read(raw), key=lambda manifest: manifest.app))
        return self._manifests


def _read(raw: Sequence[bytes]) -> list[Manifest]:
    found = []
    for data in raw:
        try:
            found.append(Manifest.from_json(data))
        except InvalidInput:
            continue  # a newer release's; its own handlers read it
    return found
