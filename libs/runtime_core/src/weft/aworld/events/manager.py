"""The event manager, where AWorld has it."""

from __future__ import annotations

from runtime_core.integrations.aworld.events.manager import EventManager

__all__ = ["EventManager"]
