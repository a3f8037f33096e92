"""Weft's runtime as AutoGen's tests create it: without arguments that they do not know."""

from __future__ import annotations

import secrets
from typing import Any

from runtime_core.integrations.autogen import WeftAgentRuntime

__all__ = ["Shared", "WeftAgentRuntime"]

LEASE_SECONDS = 60.0
"""Of agents in other processes: one that a busy machine stops for a shorter lease would handle a message again, and
AutoGen's tests count what was handled."""


class Shared(WeftAgentRuntime):
    """On the broker of WEFT_REDIS_URL, in a namespace that other processes may share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(namespace=f"a{secrets.token_hex(6)}", services=False, **options)
        self._host._lease = LEASE_SECONDS
