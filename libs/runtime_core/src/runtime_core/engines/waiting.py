"""How long a step waits for an engine that is away."""

from __future__ import annotations

import msgspec

ENGINE_WAIT_SECONDS = 60.0
"""Where the task's conf says nothing else; the bus's functions have the same."""
UNAVAILABLE = "EngineUnavailable"
"""The type of the error with which a step ends that has waited too long."""


class _Wait(msgspec.Struct):
    engine_until: float | None = None
    engine_wait_seconds: float = ENGINE_WAIT_SECONDS


_EXACT = msgspec.json.Decoder(_Wait)


def wait_until(context: bytes, away_since: float) -> float:
    """Until when a step waits, in seconds since 1970; `context` is what came with its call.

    It waits from when it was asked for; where the engine was lost later, from then (`away_since`) on: a step that has
    run for an hour is not given up when its gateway is started again.
    """
    known = _EXACT.decode(context) if context else _Wait()
    until = away_since + known.engine_wait_seconds
    return until if known.engine_until is None else max(until, known.engine_until)
