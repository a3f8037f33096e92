"""Hooks of an app: the event that a hook gets, and what it may decide (the page "Hooks and callbacks")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.runs.hooks.declared import Allow, Ask, Change, Deny, HookEvent

__all__ = ["Allow", "Ask", "Change", "Deny", "HookEvent"]

_PLACES = {
    "Allow": "runtime_core.runs.hooks.declared",
    "Ask": "runtime_core.runs.hooks.declared",
    "Change": "runtime_core.runs.hooks.declared",
    "Deny": "runtime_core.runs.hooks.declared",
    "HookEvent": "runtime_core.runs.hooks.declared",
}

__getattr__ = loader(__name__, _PLACES)
