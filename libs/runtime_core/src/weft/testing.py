"""Run an app in one process, without a server, for its tests."""

from __future__ import annotations

from runtime_core.host.local import LocalApp

__all__ = ["LocalApp"]
