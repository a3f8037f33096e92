"""Hooks of an app: the event that a hook gets, and what it may decide (the page "Hooks and callbacks")."""

from __future__ import annotations

from runtime_core.runs.hooks.declared import Allow, Ask, Change, Deny, HookEvent

__all__ = ["Allow", "Ask", "Change", "Deny", "HookEvent"]
