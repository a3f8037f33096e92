"""The error for a server that this machine cannot have."""

from __future__ import annotations


class Unavailable(RuntimeError):
    """A server is unavailable here. The message says why and what would help."""
