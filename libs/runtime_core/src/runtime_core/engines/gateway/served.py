"""What a gateway knows of the engine that it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """One engine."""

    name: str
    """As agents name it; also its work stream."""
    title: str
    """As people write it."""
    in_flight: int
    """How many steps run at once, where the settings do not say."""
    redrives: int | None
    """How often a step is driven again that was lost with its engine; None: as often as its function is tried."""
    attaches: bool
    """Whether work outlives the gateway that began it, so that another one can attach to it by its key."""


RAY = Served("ray", "Ray", in_flight=64, redrives=None, attaches=True)
SPARK = Served("spark", "Spark", in_flight=8, redrives=1, attaches=False)
