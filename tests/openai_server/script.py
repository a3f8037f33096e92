"""A script: rules in order, and the choice of the rule that answers a request."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Self

import msgspec

from tests.openai_server.asked import Asked


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Conditions on a request. A field that is not set matches anything."""

    api: str | None = None
    """`chat` or `responses`."""
    model: str | None = None
    """A pattern, as in `gpt-*`."""
    stream: bool | None = None
    conversation: str | None = None
    """A pattern, as in `c-1*`."""
    system: str | None = None
    """A text that the system's messages, or the instructions, hold."""
    user: str | None = None
    """A text that the last user message holds."""
    first_user: str | None = None
    result: str | None = None
    """A text that the last tool result holds."""
    after: str | None = None
    """The tool whose result is the last message."""
    tool: str | None = None
    """A tool that the request offers."""
    messages: int | None = None
    user_messages: int | None = None
    model_messages: int | None = None
    """How many messages of the model the request holds."""
    turn: int | None = None
    """How many messages of the model stand behind the last user message."""
    tool_results: int | None = None
    """How many tool results the request holds in all."""

    def matches(self, asked: Asked) -> bool:
        last = asked.results[-1] if asked.results else None
        patterns = ((self.model, asked.model), (self.conversation, asked.conversation))
        texts = (
            (self.system, asked.system),
            (self.user, asked.users[-1] if asked.users else ""),
            (self.first_user, asked.users[0] if asked.users else ""),
            (self.result, last.text if last else ""),
        )
        equals: tuple[tuple[object, object], ...] = (
            (self.api, asked.api),
            (self.stream, asked.stream),
            (self.after, last.tool if last and asked.ends_in_result else ""),
            (self.messages, asked.messages),
            (self.user_messages, len(asked.users)),
            (self.model_messages, asked.model_messages),
            (self.turn, asked.turn),
            (self.tool_results, len(asked.results)),
        )
        return (
            all(wanted is None or wanted == found for wanted, found in equals)
            and all(wanted is None or fnmatchcase(found, wanted) for wanted, found in patterns)
            and all(wanted is None or wanted in found for wanted, found in texts)
            and (self.tool is None or self.tool in asked.tools)
        )


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool call. Arguments given as text are sent unchanged, JSON or not."""

    name: str
    arguments: Any = msgspec.field(default_factory=dict)
    id: str | None = None
    """Else one that follows from the request."""


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tokens. `cached` is a part of `input`, `reasoning` a part of `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The model's message."""

    text: str | None = None
    calls: tuple[Call, ...] = ()
    output: Any = None
    """Structured output: as the response format asks, else as a call of `output_tool`."""
    output_tool: str = "final_result"
    refusal: str | None = None
    reasoning: str | None = None
    """A summary of what it thought; responses only."""
    finish_reason: str | None = None
    """As chat completions name it; else what follows from the answer."""
    usage: Usage | None = None


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A response in place of an answer."""

    status: int = 200
    message: str | None = None
    code: str | None = None
    type: str | None = None
    body: str | None = None
    """Sent as it is, in place of an error's JSON."""
    retry_after: float | None = None
    """Seconds."""
    date: bool = False
    """Whether `retry-after` is an HTTP date, which knows whole seconds only."""
    retry_after_ms: float | None = None


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The connection ends before the answer does."""

    after: int = 0
    """Pieces that are sent before; fewer where the answer has fewer, so that it is never whole."""
    headers: bool = True
    """Whether the headers are sent before."""
    error: str | None = None
    """What a stream says in place of the rest, as an event of its own."""


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Each piece waits until the test releases it."""

    name: str
    after: int = 0
    """Pieces that go out before, without waiting."""
    headers: bool = True
    """Whether the headers go out before."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An answer or a fault, and for which requests and how often it applies."""

    answer: Answer | None = None
    fault: Fault | None = None
    name: str | None = None
    """What the ledger calls it; else its number in the script."""
    when: When = When()
    times: int | None = None
    """How often it answers in each conversation; then the rules behind it do."""
    in_all: int | None = None
    """How often it answers in all."""
    seconds: float | None = None
    """How long it answers, from its first answer on."""
    until: str | None = None
    """It answers until this gate is open."""
    probability: float | None = None
    """With which it answers; the same requests in each run with the same seed."""
    seed: int = 0
    delay: float = 0.0
    """Seconds before the headers are sent."""
    pieces: int = 4
    """Into how many deltas a streamed text is cut."""
    piece_delay: float = 0.0
    """Seconds before each piece."""
    cut: Cut | None = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.fault is None):
            raise ValueError("a rule has an answer or a fault: give one of the two")

    def but(self, **changes: Any) -> Self:
        """The same rule, but for these fields."""
        return msgspec.structs.replace(self, **changes)


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The script that a test gives the server."""

    rules: tuple[Rule, ...] = ()
    models: tuple[str, ...] = ()
    """The models that are known; none named: all are."""
    more: bool = False
    """Whether the rules stand before those that the server has, in place of replacing them."""


class Chooser:
    """Chooses a rule for each request, and counts the choices."""

    def __init__(self, rules: tuple[Rule, ...], is_open: Callable[[str], bool]) -> None:
        self._rules = rules
        self._is_open = is_open
        self._chosen: Counter[tuple[int, str]] = Counter()
        self._in_all: Counter[int] = Counter()
        self._asked: Counter[str] = Counter()
        self._first: dict[int, float] = {}

    def choose(self, asked: Asked) -> tuple[str, Rule] | None:
        """Return the rule that answers and its name; None if none does."""
        self._asked[asked.digest] += 1
        for number, rule in enumerate(self._rules):
            if rule.when.matches(asked) and self._answers(number, rule, asked):
                self._chosen[number, asked.conversation] += 1
                self._in_all[number] += 1
                return rule.name or str(number), rule
        return None

    def _answers(self, number: int, rule: Rule, asked: Asked) -> bool:
        if rule.until is not None and self._is_open(rule.until):
            return False
        if rule.times is not None and self._chosen[number, asked.conversation] >= rule.times:
            return False
        if rule.in_all is not None and self._in_all[number] >= rule.in_all:
            return False
        if rule.probability is not None:
            chance = random.Random(f"{rule.seed} {number} {asked.digest} {self._asked[asked.digest]}")
            if chance.random() >= rule.probability:
                return False
        if rule.seconds is not None:
            first = self._first.setdefault(number, time.monotonic())
            return time.monotonic() < first + rule.seconds
        return True
