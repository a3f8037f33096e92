"""Counts model calls by what their trajectory rows say: how many, how long, tokens, cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime_core.telemetry.attributes import PROVIDER, REQUEST_MODEL, TIME_TO_FIRST_CHUNK

if TYPE_CHECKING:
    from runtime_core.telemetry.metrics import Metrics
    from runtime_core.trajectory.steps import Step

ANSWERED = "answered"

_TOKEN_TYPES = {
    "input_tokens": "input",
    "output_tokens": "output",
    "cached_tokens": "cached",
    "reasoning_tokens": "reasoning",
}


def count_model_calls(metrics: Metrics, rows: Iterable[Step]) -> None:
    """Count those of these rows that are model calls; a call that was put off or has failed counts by its error."""
    for row in rows:
        if row.kind != "model":
            continue
        provider, model = str(row.attributes.get(PROVIDER, "")), str(row.attributes.get(REQUEST_MODEL, row.name))
        outcome = row.error.type if row.error is not None else ANSWERED
        metrics.model_calls[provider, model, outcome].inc()
        metrics.model_call_seconds[provider, model].observe(max(row.ended - row.started, 0.0) / 1000)
        if isinstance(first := row.attributes.get(TIME_TO_FIRST_CHUNK), int | float):
            metrics.model_first_chunk_seconds[provider, model].observe(first)
        for name, kind in _TOKEN_TYPES.items():
            if amount := row.usage.get(name):
                metrics.model_tokens[model, kind].inc(amount)
        if cost := row.usage.get("cost"):
            metrics.model_cost[model].inc(cost)
