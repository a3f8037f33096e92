"""A transport without a broker: a function of the test answers each command."""

from __future__ import annotations

from collections.abc import Callable

from runtime_core.bus.connection import Argument, Reply

Answer = Callable[..., Reply]


class ScriptedTransport:
    """Keeps the commands in order. The test's function may raise the error of the server."""

    reconnects = 0

    def __init__(self, answer: Answer = lambda *args: None) -> None:
        self.answer = answer
        self.commands: list[tuple[Argument, ...]] = []

    async def call(self, *args: Argument) -> Reply:
        self.commands.append(args)
        return self.answer(*args)

    async def blocking(self, *args: Argument) -> Reply:
        return await self.call(*args)

    async def close(self) -> None: ...
