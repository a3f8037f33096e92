"""What is asked of an engine that shall host an app's handlers."""

from __future__ import annotations

from msgspec import Struct

from runtime_core.aworld.sent import SentApp


class HostsWanted(Struct, frozen=True):
    """What is asked of an engine that shall host an app's handlers."""

    app: SentApp
    environ: dict[str, str]
    """The settings of the handlers, as variables."""
    number: int
    """How many processes host them; 0: as many as the engine has CPUs."""
    at_once: int
    """How many tasks are under way at once."""
    here_only: bool
    """Whether the broker answers on this machine only."""
