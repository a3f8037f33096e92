"""What of a conversation is sent, so that it stays within the model's window. A strategy is given to the agent.

A strategy is any object with `fit`, as `Window` says. What it does must be the same at each replay: it may use the
messages and `asking` (whose model calls are journaled steps), and no clock and no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from runtime_core.codec import encode
from runtime_core.errors import ConfigurationError
from runtime_core.ids import fingerprint
from runtime_core.llm.budget import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

Message = dict[str, Any]  # Any: the JSON of one message, as pydantic-ai writes it


class Asking(Protocol):
    """What a strategy may use."""

    @property
    def ctx(self) -> AgentContext:
        """The run's context."""
        ...

    @property
    def overhead_tokens(self) -> int:
        """What tools and the output's schema take of the window, by estimate."""
        ...

    @property
    def memory(self) -> dict[str, Any]:  # Any: JSON of the strategy's own
        """What the strategy keeps, in the instance's state: the same at each replay, and there in later tasks."""
        ...

    def tokens(self, messages: Sequence[Message]) -> int:
        """The tokens of messages, by the agent's estimate: rather too many than too few."""
        ...

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        """Have a model answer with text, as a step of its own; None: the agent's model. Raises ModelFailed."""
        ...


class Window(Protocol):
    """Chooses what is sent."""

    async def fit(self, asking: Asking, messages: list[Message], *, shrink: bool) -> list[Message]:
        """The messages to send; the conversation itself stays whole.

        The last message stays, and a tool's result is never without its call. `shrink`: the model has refused them as
        too long, so give fewer; where that is impossible, give the same, and the call ends with ContextTooLong.
        """
        ...


class KeepAll:
    """Everything is sent. Where the model finds it too long, the call fails."""

    async def fit(self, asking: Asking, messages: list[Message], *, shrink: bool) -> list[Message]:
        return messages


@dataclass(frozen=True, slots=True)
class KeepRecent:
    """The first `keep_first` messages, and as many of the latest as fit into `max_tokens` by estimate.

    It cuts before a request that no earlier tool call waits for, so that a call and its result go together; the latest
    exchange stays, however long it is. Instructions belong to each request and are never lost.
    """

    max_tokens: int
    keep_first: int = 1

    def __post_init__(self) -> None:
        _check_tokens("KeepRecent.max_tokens", self.max_tokens)
        if isinstance(self.keep_first, bool) or not isinstance(self.keep_first, int) or self.keep_first < 0:
            raise ConfigurationError(f"KeepRecent.keep_first is {self.keep_first!r}: give a whole number from 0 on")

    async def fit(self, asking: Asking, messages: list[Message], *, shrink: bool) -> list[Message]:
        room = self.max_tokens - asking.overhead_tokens
        if shrink:
            # The estimate was too low, or the model's window is smaller than was said.
            room = min(room, asking.tokens(messages)) // 2
        return recent(asking, messages, room, self.keep_first)


@dataclass(frozen=True, slots=True)
class Summarise:
    """As KeepRecent, with a summary in place of what is left out, made by a model call of its own.

    A summary is made when the conversation has outgrown `max_tokens`, and covers all but about `keep_tokens` of the
    latest messages. It is a step of the run: made once, replayed, and paid for like others. `model`: by name; None: the
    agent's own.
    """

    max_tokens: int
    keep_tokens: int = 2_000
    model: str | None = None
    prompt: str = (
        "Summarise the conversation so far for the assistant who goes on with it: facts, decisions, open questions, "
        "and what tools have found. Answer with the summary alone."
    )

    def __post_init__(self) -> None:
        _check_tokens("Summarise.max_tokens", self.max_tokens)
        _check_tokens("Summarise.keep_tokens", self.keep_tokens)

    async def fit(self, asking: Asking, messages: list[Message], *, shrink: bool) -> list[Message]:
        room = max(self.max_tokens - asking.overhead_tokens, 0)
        covered, summary = _remembered(asking.memory, messages)
        sent = _summed_up(messages, covered, summary)
        if not shrink and asking.tokens(sent) <= room:
            return sent
        keep = min(self.keep_tokens, room)
        open_part = messages[covered:]
        kept = recent(asking, open_part, keep // 2 if shrink else keep, 0)
        left_out = open_part[: len(open_part) - len(kept)]
        if not left_out:
            return sent
        told = f"{summary}\n{transcript(left_out)}" if covered else transcript(left_out)
        text = f"{self.prompt}\n\n{_end(told, room // 2 if shrink else room)}"
        summary = await asking.ask([said(text)], model=self.model)
        covered += len(left_out)
        asking.memory.update(covered=covered, summary=summary, last=_mark(messages[covered - 1]))
        return _summed_up(messages, covered, summary)


def recent(asking: Asking, messages: list[Message], room: int, keep_first: int) -> list[Message]:
    """The first `keep_first` messages, and the latest that fit into `room` with them; the last exchange always."""
    if asking.tokens(messages) <= room:
        return messages
    starts = cuts(messages)
    head = max(at for at in _closed(messages) if at <= keep_first)
    left = room - asking.tokens(messages[:head])
    best = starts[-1] if starts else 0
    size = asking.tokens(messages[best:])
    end = best
    for start in reversed(starts[:-1]):
        size += asking.tokens(messages[start:end])
        if size > left:
            break
        best = end = start
    if best <= head:
        return messages
    return [*messages[:head], *messages[best:]]


def cuts(messages: Sequence[Message]) -> list[int]:
    """Where a conversation may be cut: before requests that bring no tool's result."""
    return [
        at
        for at, message in enumerate(messages)
        if message.get("kind") == "request" and not any(_answers_call(part) for part in message.get("parts") or ())
    ]


def _closed(messages: Sequence[Message]) -> list[int]:
    """Where a conversation may end: behind messages whose calls all have their results."""
    ends, waiting = [0], set[object]()
    for at, message in enumerate(messages, 1):
        for part in message.get("parts") or ():
            if part.get("part_kind") == "tool-call":
                waiting.add(part.get("tool_call_id"))
            else:
                waiting.discard(part.get("tool_call_id"))
        if not waiting:
            ends.append(at)
    return ends


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as plain text, a line for each part."""
    lines = []
    for message in messages:
        for part in message.get("parts") or ():
            match part.get("part_kind"):
                case "user-prompt":
                    lines.append(f"user: {_plain(part.get('content'))}")
                case "text":
                    lines.append(f"assistant: {part.get('content')}")
                case "tool-call":
                    lines.append(f"assistant calls {part.get('tool_name')}: {_plain(part.get('args'))}")
                case "tool-return" | "retry-prompt" | "retry-feedback":
                    lines.append(f"{part.get('tool_name') or 'note'}: {_plain(part.get('content'))}")
    return "\n".join(lines)


def said(text: str) -> Message:
    """A request with a user's text. Without a time, so that it is the same at each replay."""
    part = {"part_kind": "user-prompt", "content": text, "timestamp": "1970-01-01T00:00:00Z"}
    return {"kind": "request", "parts": [part]}


def _remembered(memory: Mapping[str, Any], messages: Sequence[Message]) -> tuple[int, str]:
    """How many messages a summary covers, and the summary; 0 where there is none of this conversation."""
    covered = memory.get("covered", 0)
    if not 0 < covered <= len(messages) or memory.get("last") != _mark(messages[covered - 1]):
        return 0, ""
    return covered, str(memory.get("summary", ""))


def _summed_up(messages: list[Message], covered: int, summary: str) -> list[Message]:
    if not covered:
        return messages
    first = said(f"Summary of the conversation until here:\n{summary}")
    # What the system has said of the part left out is no part of its summary.
    system = [
        part
        for message in messages[:covered]
        for part in message.get("parts") or ()
        if part.get("part_kind") == "system-prompt"
    ]
    first["parts"] = [*system, *first["parts"]]
    instructions = [message["instructions"] for message in messages if message.get("instructions")]
    if instructions:
        first["instructions"] = instructions[-1]
    return [first, *messages[covered:]]


def _end(text: str, tokens: int) -> str:
    """As much of the end of a text as so many tokens hold: what is summed up must fit too."""
    return text.encode(errors="replace")[-max(tokens, 1) * BYTES_PER_TOKEN :].decode(errors="ignore")


def _mark(message: Message) -> str:
    # Instructions come and go: a conversation that is kept for later tasks is kept without them.
    kept = {name: value for name, value in message.items() if name != "instructions"}
    return fingerprint(encode(kept).decode())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else encode(value).decode()


def _answers_call(part: Message) -> bool:
    return part.get("part_kind") == "tool-return" or (
        part.get("part_kind") in ("retry-prompt", "retry-feedback") and bool(part.get("tool_name"))
    )


def _check_tokens(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}: give a whole number of tokens from 1 on")
