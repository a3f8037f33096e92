"""The context, where AWorld has it."""

from __future__ import annotations

from runtime_core.runs.shared_context import Context

__all__ = ["Context"]
