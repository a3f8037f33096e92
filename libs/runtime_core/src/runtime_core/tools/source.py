"""Where a call's tool comes from besides the app's own functions."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from runtime_core.policy import RetryPolicy
from runtime_core.tools.call import AbandonedThreads, ToolContext


class CallableTool(Protocol):
    """A tool, as far as a call of it is concerned."""

    @property
    def name(self) -> str: ...

    @property
    def repeatable(self) -> bool:
        """False: an attempt whose end is unknown is not made again."""
        ...

    @property
    def retry(self) -> RetryPolicy: ...

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call it with `arguments` (a JSON object); its result as JSON. Raises whatever ends the attempt."""
        ...


@dataclass(frozen=True, slots=True)
class Away:
    """The tools under a name cannot be asked now."""

    wait_seconds: float | None
    """After this long a call of them is looked at again, without counting; None: it fails."""
    message: str


class ToolSource(Protocol):
    """Tools that are not known before they are looked for, such as those of MCP servers."""

    def find(self, name: str, /) -> CallableTool | None: ...

    def away(self, name: str, /) -> Away | None: ...
