"""What a process does, as the service that runs it sees it."""

from __future__ import annotations

from typing import Protocol

from runtime_core.consumer.progress import Health


class Role(Protocol):
    """Work of a process. `stop` is called once, also after a start that failed or was interrupted."""

    async def start(self) -> None:
        """Connect, check, and return when `run` can begin. WeftError: one line, and exit status 1."""
        ...

    async def run(self) -> None:
        """Work until `stop` is called. Returning earlier ends the process, to be started again."""
        ...

    async def stop(self) -> None:
        """Stop reading, finish or hand back what is in hand, settle, leave. `run` returns then."""
        ...

    def ready(self) -> bool:
        """Whether it is reading now; False while the broker is away, for instance."""
        ...

    def progress(self) -> Health:
        """Whether it gets anywhere; must not wait."""
        ...
