"""Runners, where the documents of AWorld have them."""

from __future__ import annotations

from runtime_core.integrations.aworld.runners import Runners

__all__ = ["Runners"]
