"""Which engine runs functions, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass

from runtime_core.errors import ConfigurationError

MODES = ("threads", "processes", "async")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of an engine. Raises ConfigurationError for one that cannot work."""

    name: str = "local"
    """`local`, `ray`, `spark`, or `package.module:Class` for an engine of one's own."""
    worker_num: int | None = None
    """How many calls run at once, from 1; None: as many as the engine has processors."""
    mode: str = "threads"
    """`threads`, `processes` (a call that dies or takes too long is ended), or `async` (coroutines on this loop)."""
    timeout_seconds: float | None = None
    """The limit of each call, from when it begins; None: no limit. A call may have its own."""

    address: str = ""
    """Where the engine `ray` or `spark` is; empty: as WEFT_RAY_ADDRESS or WEFT_SPARK_REMOTE says."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"RunConfig: name={self.name!r} names no engine: give 'local'")
        number = self.worker_num
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigurationError(f"RunConfig: worker_num={number!r} is not a whole number from 1")
        if self.mode not in MODES:
            raise ConfigurationError(f"RunConfig: mode={self.mode!r} is none; there are {', '.join(MODES)}")
        check_timeout("RunConfig", self.timeout_seconds)

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        return self.worker_num or os.cpu_count() or 1


def check_timeout(what: str, seconds: object) -> None:
    """Raises ConfigurationError for what is no limit in seconds."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigurationError(f"{what}: timeout_seconds={seconds!r} is not a number of seconds above 0")
