"""An app in one process: see `runtime_core.host.local`. Tests import it from here, where it has always been."""

from __future__ import annotations

from runtime_core.host.local import NAMESPACE, THREADS, LocalApp

__all__ = ["NAMESPACE", "THREADS", "LocalApp"]
