"""Steps that nobody waits for: deltas to the client, messages to other agents."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from runtime_core.agents.step import Step
from runtime_core.consumer.effects import Send

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.run import Run


class Outgoing(Step[None]):
    """Done at once where the journal does not hold it; else nothing happens."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:  # Any: asyncio's protocol; this one yields nothing
        self.run.flow.branch_here(self)
        self.perform()
        yield from ()

    def perform(self) -> None:
        if self.run.find(self) is None:
            self.run.flow.check_going()
            self.go()
            self.run.keep(self)

    def go(self) -> None:
        raise NotImplementedError


class Emit(Outgoing):
    """A delta (text or any JSON value) to the client."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, data: bytes) -> None:
        super().__init__(run, branch, "emit", "emit", "", data)

    def go(self) -> None:
        try:
            self.run.port.emit(self.id, self.digest, self.data)
        except Exception as error:
            raise self.run.flow.abandon(error) from error
        self.run.rows.add(self, output=self.data)


class SendStep(Outgoing):
    """A message to an agent, sent by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, agent: str, key: str, data: bytes) -> None:
        super().__init__(run, branch, "send", agent, key, data)

    def go(self) -> None:
        self.run.sends.append(Send(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)
