"""Steps that nobody waits for.

Deltas, messages, notes, results of other steps; and the bound on what is under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import Publish, Send, Spend
from runtime_core.errors import LimitExceeded
from runtime_core.ids import task_of_message
from runtime_core.record.usage import Usage
from runtime_core.runs.step import Step, T

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


class Outgoing(Step[T]):
    """Done at once where the journal does not hold it; else nothing happens."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol
        self.run.flow.branch_here(self)
        self.perform()
        yield from room(self.run)
        return self.result()

    def result(self) -> T:
        """What the code gets: nothing, where there is nothing to say."""
        return None  # type: ignore[return-value]  # T is None but for steps that say otherwise

    def perform(self) -> None:
        if self.run.find(self) is None:
            self.run.flow.check_going()
            self.go()
            self.run.keep(self)

    def go(self) -> None:
        raise NotImplementedError


def room(run: Run) -> Generator[Any, None, None]:  # Any: asyncio's protocol
    """Wait until the broker has taken enough of what the run has emitted; mostly it has, and nothing is awaited."""
    waiting = run.port.room()
    if waiting is None:
        return
    try:
        yield from waiting.__await__()
    except LimitExceeded as error:
        raise run.flow.abort(error) from error
    run.flow.check_going()


class Emit(Outgoing[None]):
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


class SendStep(Outgoing[str]):
    """A message to an agent, sent by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, agent: str, key: str, data: bytes, digest: str = "") -> None:
        super().__init__(run, branch, "send", agent, key, data, digest)

    def result(self) -> str:
        """The id of the task that it starts."""
        return task_of_message(self.run.task_id, self.run.run_id, self.id)

    def go(self) -> None:
        self.run.sends.append(Send(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)


class PublishStep(Outgoing[None]):
    """A message to a topic, published by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, topic: str, source: str, data: bytes, digest: str = "") -> None:
        super().__init__(run, branch, "publish", topic, source, data, digest)

    def go(self) -> None:
        self.run.sends.append(Publish(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)


class Note(Outgoing[None]):
    """A row of kind `message` in the trajectory, written once."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, name: str, data: bytes) -> None:
        super().__init__(run, branch, "message", name, "", data)

    def go(self) -> None:
        try:
            self.run.port.note(self.id, self.digest, self.name)
        except Exception as error:
            raise self.run.flow.abandon(error) from error
        self.run.rows.add(self, input=self.data)


class SpendStep(Outgoing[None]):
    """A report of what was used, which the commit of this turn adds to the task's usage."""

    __slots__ = ("usage",)

    def __init__(self, run: Run, branch: Branch, usage: Usage) -> None:
        super().__init__(run, branch, "usage", next(iter(usage.models), "usage"), "", usage.to_json())
        self.usage = usage

    def go(self) -> None:
        self.run.spends.append(Spend(self.id, self.digest, self.usage))
        self.run.rows.add(self, usage=self.usage.amounts)


PIECE_BYTES = 1024
"""What a write costs besides its data: a task, its command and its reply."""
RUN_BYTES = 1024 * 1024
"""How much one run may have on its way before `ctx.emit` waits."""
RUN_MAX_BYTES = 8 * RUN_BYTES
"""How much one run may have on its way through calls that cannot wait, such as `ModelCall.stream`."""
PROCESS_BYTES = 32 * RUN_BYTES
"""How much all runs of a process may have on its way before `ctx.emit` waits."""


class Outflow:
    """Counts the bytes on their way, of a run or of the whole process, and lets writers wait. Belongs to one loop."""

    __slots__ = ("_limit", "_waiting", "bytes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes > self._limit

    def begin(self, size: int) -> None:
        self.bytes += size

    def end(self, size: int) -> None:
        self.bytes -= size
        while self._waiting and not self.full:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def room(self) -> None:
        """Wait until less than the limit is on its way."""
        while self.full:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
