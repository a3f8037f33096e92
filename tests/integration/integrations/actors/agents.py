"""Messages and agents of the tests, in a module so that worker processes have the same classes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.runtime import AgentId, BaseAgent, DefaultTopicId, MessageContext, RoutedAgent, TopicId, message_handler

JSON = Any  # Any: states are the users' own JSON


@dataclass
class Ask:
    """A request whose text selects the action; see the agents."""

    text: str


@dataclass
class Answer:
    text: str
    by: str = ""


@dataclass
class Note:
    """A message to publish."""

    text: str


class OwnError(Exception):
    """An error class of the program's own."""


class Echo(RoutedAgent):
    """Answers with its request and counts requests."""

    def __init__(self) -> None:
        super().__init__("echoes")
        self.count = 0

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer | None:
        self.count += 1
        match message.text:
            case "nothing":
                return None
            case "silent error":
                raise OwnError
            case "error":
                raise OwnError("what went wrong")
        return Answer(message.text, by=str(self.id))

    async def save_state(self) -> Mapping[str, JSON]:
        return {"count": self.count}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.count = state["count"]


class Sink(RoutedAgent):
    """Collects published messages."""

    def __init__(self) -> None:
        super().__init__("keeps notes")
        self.notes: list[str] = []

    @message_handler
    async def on_note(self, message: Note, ctx: MessageContext) -> None:
        self.notes.append(message.text)

    async def save_state(self) -> Mapping[str, JSON]:
        return {"notes": self.notes}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.notes = list(state["notes"])


class Asker(RoutedAgent):
    """Calls `echo/<key>` for each word of the text at once, then publishes the number of answers."""

    def __init__(self) -> None:
        super().__init__("asks others")

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer:
        words = message.text.split()
        answers = await asyncio.gather(*(self.send_message(Ask(word), AgentId("echo", word)) for word in words))
        await self.publish_message(Note(f"{len(answers)} answers"), DefaultTopicId())
        return Answer(" ".join(answer.text for answer in answers), by=str(self.id))


class Ping(RoutedAgent):
    """Counts down with `pong`, which calls back into this agent."""

    def __init__(self, other: str) -> None:
        super().__init__("counts down")
        self.other = other
        self.seen: list[int] = []

    @message_handler
    async def on_number(self, message: int, ctx: MessageContext) -> int:
        self.seen.append(message)
        if message == 0:
            return 0
        below: int = await self.send_message(message - 1, AgentId(self.other, self.id.key))
        return below + message

    async def save_state(self) -> Mapping[str, JSON]:
        return {"seen": self.seen}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.seen = list(state["seen"])


class Gate(BaseAgent):
    """Signals when a handler is inside and holds it until released. For tests in one process."""

    def __init__(self) -> None:
        super().__init__("holds handlers")
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        self.inside = 0
        self.most_inside = 0
        self.handled: list[str] = []

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> Answer:  # Any: as the base class
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        try:
            await self.released.wait()
        finally:
            self.inside -= 1
        self.handled.append(message.text)
        return Answer(message.text)


DEFAULT = TopicId("default", "default")


class Slow(RoutedAgent):
    """Writes a file when entered, then waits for the file `go`; for tests across processes."""

    def __init__(self) -> None:
        super().__init__("waits for a file")
        self.folder = Path(os.environ["WEFT_TEST_FOLDER"])
        self.count = 0

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer:
        self.count += 1
        ctx.cancellation_token.add_callback(lambda: (self.folder / "cancelled").touch())
        (self.folder / f"entered-{os.getpid()}").touch()
        while not (self.folder / "go").exists():  # a process can learn of a file only by looking
            await asyncio.sleep(0.02)
        return Answer(message.text, by=str(os.getpid()))

    async def save_state(self) -> Mapping[str, JSON]:
        return {"count": self.count}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.count = state["count"]


class Teller(Slow):
    """Calls an echo, publishes, and then waits for the file."""

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer:
        answer: Answer = await self.send_message(message, AgentId("echo", "told"))
        await self.publish_message(Note(answer.text), TopicId("told", "all"))
        await self.send_message(Ask("again"), AgentId("echo", "told"))
        return await super().on_ask(message, ctx)


class Mortal(RoutedAgent):
    """Kills its process as often as the text says, then calls an echo."""

    def __init__(self) -> None:
        super().__init__("kills its process")

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer:
        deaths = Path(os.environ["WEFT_TEST_FOLDER"]) / "deaths"
        if not deaths.exists() or deaths.stat().st_size < int(message.text):
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        answer: Answer = await self.send_message(message, AgentId("echo", "asked by a mortal"))
        return answer


class Who(RoutedAgent):
    """Answers with the process that handled the message."""

    def __init__(self) -> None:
        super().__init__("names its process")

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Answer:
        return Answer(message.text, by=str(os.getpid()))


@dataclass
class Round:
    number: int


ROUNDS = 5


class Cascade(RoutedAgent):
    """Publishes the next round for each message of a round."""

    def __init__(self) -> None:
        super().__init__("goes round")
        self.count = 0

    @message_handler
    async def on_round(self, message: Round, ctx: MessageContext) -> None:
        self.count += 1
        if message.number + 1 < ROUNDS:
            await self.publish_message(Round(message.number + 1), DefaultTopicId())

    async def save_state(self) -> Mapping[str, JSON]:
        return {"count": self.count}

    async def load_state(self, state: Mapping[str, JSON]) -> None:
        self.count = state["count"]
