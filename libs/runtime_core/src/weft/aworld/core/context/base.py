"""The context, where AWorld has it."""

from __future__ import annotations

from runtime_core.sharing.context import Context

__all__ = ["Context"]
