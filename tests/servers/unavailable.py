"""Why a server cannot be had on this machine."""

from __future__ import annotations


class Unavailable(RuntimeError):
    """A server cannot be had here; the message says why and what would help."""
