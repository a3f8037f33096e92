"""Spans whose ids are known before they are made, in an SDK that asks a generator for the ids of each span."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from runtime_core.telemetry.trace_context import Ids

WANTED: ContextVar[Ids | None] = ContextVar("weft_wanted_span_ids", default=None)
"""The ids of the span that is being made here; None: any."""


class KnownIds:
    """Stands before an SDK's own generator, which gives the ids of all other spans. Any: the SDK's."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def generate_span_id(self) -> int:
        ids = WANTED.get()
        return int(self._others.generate_span_id()) if ids is None else ids.span

    def generate_trace_id(self) -> int:
        ids = WANTED.get()
        return ids.trace if ids is not None and ids.trace else int(self._others.generate_trace_id())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def use_known_ids(tracer: Any) -> None:
    """Let a tracer make spans with ids that are known before, where its SDK (OpenTelemetry's own does) allows it."""
    generator = getattr(tracer, "id_generator", None)
    if hasattr(generator, "generate_span_id") and not isinstance(generator, KnownIds):
        tracer.id_generator = KnownIds(generator)
