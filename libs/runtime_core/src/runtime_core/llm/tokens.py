"""Tokens: estimate them, price them, and keep a request within the model's window.

A window strategy is any object with the method `fit` of `Window`. It must return the same at each replay, so it may use
only the messages and its `context`, whose model calls are journaled steps; it must not read clocks or keep other state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from runtime_core.errors import ConfigurationError
from runtime_core.wire.codec import encode
from runtime_core.wire.ids import fingerprint

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

_MILLION = 1_000_000
Message = dict[str, Any]  # Any: the JSON of one message, as pydantic-ai writes it

BYTES_PER_TOKEN = 3
"""English has about four bytes per token, code about three; most other scripts have three per character, one token."""
MESSAGE_TOKENS = 4
"""The tokens of a message in addition to its content."""
MEDIA_TOKENS = 1600
"""The tokens of an image or other media, whose size in bytes does not indicate its tokens."""

_CONTENT = ("content", "args", "tool_name", "instructions", "tool_call_id")
"""The members of messages and parts that reach the model; all others are metadata."""

LARGE_TOKENS = 256
"""The estimate, in tokens, from which a count measures a relative error; below it, a count measures a constant."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in the same currency as `max_cost`.

    `cached_input` is for input in the provider's cache; None for the price of any input. Reasoning tokens are output.
    """

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if name == "cached_input" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigurationError(f"Price.{name} is {value!r}: pass the price of a million tokens, at least 0")

    def cost(self, input_tokens: float, output_tokens: float, cached_tokens: float = 0) -> float:
        """Return the cost of these tokens; `input_tokens` include `cached_tokens`."""
        cached = min(cached_tokens, input_tokens)
        cached_price = self.input if self.cached_input is None else self.cached_input
        return ((input_tokens - cached) * self.input + cached * cached_price + output_tokens * self.output) / _MILLION


def price_of(prices: Mapping[str, Any], *names: str) -> Price | None:  # Any: Price, checked below
    """Return the price of the first of a model's names that the table contains; None if it contains none.

    An exact name takes precedence over a pattern (`gpt-*`), and a longer pattern over a shorter one. Names match with
    their provider (`openai:gpt-x`) and without it.
    """
    known = [known for name in names if name for known in (name, name.partition(":")[2]) if known]
    for name in known:
        if name in prices:
            return _checked(name, prices[name])
    for pattern in sorted(prices, key=len, reverse=True):
        if any(fnmatchcase(name, pattern) for name in known):
            return _checked(pattern, prices[pattern])
    return None


def _checked(name: str, price: object) -> Price:
    if not isinstance(price, Price):
        raise ConfigurationError(f"prices[{name!r}] is {price!r}: pass a Price(input=…, output=…)")
    return price


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate tokens from the bytes that reach the model."""
    total = 0
    for message in messages:
        parts = message.get("parts") or ()
        total += MESSAGE_TOKENS + _tokens(_size(message.get("instructions")))
        for part in parts:
            total += MESSAGE_TOKENS + sum(_content(part.get(member)) for member in _CONTENT)
    return total


def tokens_of_json(values: Iterable[object]) -> int:
    """Estimate the tokens of tools and schemas, which are sent as JSON."""
    return sum(_tokens(len(encode(value))) for value in values)


def _content(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_content, value))
    if isinstance(value, Mapping) and ("media_type" in value or str(value.get("kind", "")).endswith("-url")):
        return MEDIA_TOKENS
    return _tokens(_size(value))


def _size(value: object) -> int:
    if value is None or value == "":
        return 0
    return len(value.encode(errors="replace")) if isinstance(value, str) else len(encode(value))


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


@dataclass(slots=True)
class _EstimateError:
    added: float = 0.0
    """The most tokens by which the count of a small request exceeded its estimate."""
    times: float = 1.0
    """The highest ratio of a large request's count to its estimate."""

    def note(self, estimated: float, counted: float) -> None:
        if estimated < LARGE_TOKENS:
            self.added = max(self.added, counted - estimated)
        else:
            self.times = max(self.times, counted / estimated)


class EstimateErrors:
    """The estimation errors of one process, by model. An unseen model inherits the worst observed error."""

    def __init__(self) -> None:
        self._of: dict[str, _EstimateError] = {}
        self._worst = _EstimateError()

    def note(self, model: str, estimated: float, counted: float) -> None:
        """Record the estimate of a call's input and the provider's count, both in tokens."""
        for error in (self._of.setdefault(model, _EstimateError()), self._worst):
            error.note(estimated, counted)

    def corrected(self, model: str, estimated: int) -> int:
        """Return the estimate, corrected by the observed errors."""
        error = self._of.get(model, self._worst)
        return max(int(estimated + error.added), int(estimated * error.times))


# ---- windows ------------------------------------------------------------------------------------------------


class WindowContext(Protocol):
    """What a window strategy may use."""

    @property
    def ctx(self) -> AgentContext:
        """The run's context."""
        ...

    @property
    def overhead_tokens(self) -> int:
        """The estimated tokens of the tools and the output schema."""
        ...

    @property
    def memory(self) -> dict[str, Any]:  # Any: JSON of the strategy's own
        """Storage in the instance's state: the same at each replay, and kept for later tasks."""
        ...

    def tokens(self, messages: Sequence[Message]) -> int:
        """Estimate the tokens of messages; the estimate errs on the high side."""
        ...

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        """Call a model as a separate step and return its text; None: the agent's model. Raises ModelFailed."""
        ...


class Window(Protocol):
    """Selects the messages of a request."""

    async def fit(self, context: WindowContext, messages: list[Message], *, shrink: bool) -> list[Message]:
        """Return the messages to send; the conversation itself stays whole.

        Keep the last message, and never send a tool's result without its call. With `shrink`, the model refused the
        request as too long: return fewer messages. If that is impossible, return the same ones, and the call fails
        with ContextTooLong.
        """
        ...


class ConversationStore(Protocol):
    """Keeps conversations outside the state of their instances. The methods may be async; each call is a step."""

    def load(self, key: str, /) -> object:
        """Return the messages that `save` got for this key, or None. `key` is `<agent>/<key of the instance>`."""
        ...

    def save(self, key: str, messages: list[Message], /) -> object:
        """Replace the messages of a key. A step that is interrupted calls it again with the same messages."""
        ...


def is_store(memory: object) -> TypeGuard[ConversationStore]:
    return callable(getattr(memory, "load", None)) and callable(getattr(memory, "save", None))


class KeepAll:
    """Sends everything. If that is too long for the model, the call fails."""

    async def fit(self, context: WindowContext, messages: list[Message], *, shrink: bool) -> list[Message]:
        return messages


@dataclass(frozen=True, slots=True)
class KeepRecent:
    """Sends the first `keep_first` messages, and as many of the latest as fit into `max_tokens` by estimate.

    It never separates a tool call from its result, and always sends the latest exchange, however long it is.
    Instructions are part of each request and are never lost.
    """

    max_tokens: int
    keep_first: int = 1

    def __post_init__(self) -> None:
        _check_tokens("KeepRecent.max_tokens", self.max_tokens)
        if isinstance(self.keep_first, bool) or not isinstance(self.keep_first, int) or self.keep_first < 0:
            raise ConfigurationError(f"KeepRecent.keep_first is {self.keep_first!r}: pass a whole number of at least 0")

    async def fit(self, context: WindowContext, messages: list[Message], *, shrink: bool) -> list[Message]:
        room = self.max_tokens - context.overhead_tokens
        if shrink:
            # The estimate was too low, or the model's window is smaller than `max_tokens`.
            room = min(room, context.tokens(messages)) // 2
        return recent(context, messages, room, self.keep_first)


@dataclass(frozen=True, slots=True)
class Summarise:
    """Sends the latest messages, and a summary of the older ones that a separate model call writes.

    A new summary is written when the conversation outgrows `max_tokens`. It covers all but about `keep_tokens` of the
    latest messages. The call is a step like any other: replayed, and paid for once. `model` is a name; None: the
    agent's model.
    """

    max_tokens: int
    keep_tokens: int = 2_000
    model: str | None = None
    prompt: str = (
        "Summarise the conversation so far for the assistant who continues it: facts, decisions, open questions, and "
        "the findings of tools. Answer with the summary only."
    )

    def __post_init__(self) -> None:
        _check_tokens("Summarise.max_tokens", self.max_tokens)
        _check_tokens("Summarise.keep_tokens", self.keep_tokens)

    async def fit(self, context: WindowContext, messages: list[Message], *, shrink: bool) -> list[Message]:
        room = max(self.max_tokens - context.overhead_tokens, 0)
        covered, summary = _remembered(context.memory, messages)
        sent = _summed_up(messages, covered, summary)
        if not shrink and context.tokens(sent) <= room:
            return sent
        keep = min(self.keep_tokens, room)
        open_part = messages[covered:]
        kept = recent(context, open_part, keep // 2 if shrink else keep, 0)
        left_out = open_part[: len(open_part) - len(kept)]
        if not left_out:
            return sent
        older = f"{summary}\n{transcript(left_out)}" if covered else transcript(left_out)
        text = f"{self.prompt}\n\n{_end(older, room // 2 if shrink else room)}"
        summary = await context.ask([said(text)], model=self.model)
        covered += len(left_out)
        context.memory.update(covered=covered, summary=summary, last=_mark(messages[covered - 1]))
        return _summed_up(messages, covered, summary)


def recent(context: WindowContext, messages: list[Message], room: int, keep_first: int) -> list[Message]:
    """Return the first `keep_first` messages, and the latest that fit into `room`; always the last exchange."""
    if context.tokens(messages) <= room:
        return messages
    starts = cuts(messages)
    head = max(at for at in _closed(messages) if at <= keep_first)
    left = room - context.tokens(messages[:head])
    best = starts[-1] if starts else 0
    size = context.tokens(messages[best:])
    end = best
    for start in reversed(starts[:-1]):
        size += context.tokens(messages[start:end])
        if size > left:
            break
        best = end = start
    if best <= head:
        return messages
    return [*messages[:head], *messages[best:]]


def cuts(messages: Sequence[Message]) -> list[int]:
    """Return where a conversation may be cut: before requests without tool results."""
    return [
        at
        for at, message in enumerate(messages)
        if message.get("kind") == "request" and not any(_answers_call(part) for part in message.get("parts") or ())
    ]


def _closed(messages: Sequence[Message]) -> list[int]:
    """Return where a conversation may end: after messages whose calls all have their results."""
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
    """Return a conversation as plain text, one line for each part."""
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
    """Return a request with a user's text, without the current time, so that it is the same at each replay."""
    part = {"part_kind": "user-prompt", "content": text, "timestamp": "1970-01-01T00:00:00Z"}
    return {"kind": "request", "parts": [part]}


def _remembered(memory: Mapping[str, Any], messages: Sequence[Message]) -> tuple[int, str]:
    """Return how many messages the summary covers, and the summary; 0 if there is none of this conversation."""
    covered = memory.get("covered", 0)
    if not 0 < covered <= len(messages) or memory.get("last") != _mark(messages[covered - 1]):
        return 0, ""
    return covered, str(memory.get("summary", ""))


def _summed_up(messages: list[Message], covered: int, summary: str) -> list[Message]:
    if not covered:
        return messages
    first = said(f"Summary of the conversation until here:\n{summary}")
    # System prompts are not part of the summary: keep those of the messages that it covers.
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
    """Return the end of a text, as long as fits: the text to summarise must fit the window, too."""
    return text.encode(errors="replace")[-max(tokens, 1) * BYTES_PER_TOKEN :].decode(errors="ignore")


def _mark(message: Message) -> str:
    # Without instructions: a conversation that is kept for later tasks has none.
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
        raise ConfigurationError(f"{name} is {value!r}: pass a whole number of tokens, at least 1")


REMEMBERED = KeepRecent(max_tokens=50_000, keep_first=0)
"""What an agent with a key keeps of its conversation by default."""
