"""`LLMAgent`: an agent that a language model drives, how its model is called, and when a human is asked first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, Literal, TypedDict, TypeGuard, Unpack, get_args

import msgspec

from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.llm.budget import Price
from runtime_core.runs.calls import checked_default

log = logging.getLogger(__name__)

Arguments = Mapping[str, Any]  # Any: JSON


class Asking(msgspec.Struct, omit_defaults=True):
    """One rule that fits a call, as it is journaled with the model's answer."""

    over: float | None = None
    """Only where the task has cost more than this; None: always."""
    timeout_seconds: float | None = None
    """None: there is no limit."""
    default: bool | None = None
    """What holds at the limit; None: nothing was said, and the call is refused."""


class Approve:
    """A human is asked before a call of a tool (or of another agent) whose name fits `pattern`.

    `when(arguments)` looks at the call's arguments, a dict; what it raises counts as yes. `cost_over` asks only once
    the task has cost more than that, in the currency of `prices`. After `timeout` (seconds or timedelta; None: no
    limit) the answer is `default`, True or False; without a default the call is refused. The human approves, denies
    or edits the arguments; the model is told of a denial, with the reason, and of an edit.
    """

    __slots__ = ("cost_over", "default", "pattern", "timeout_seconds", "when")

    def __init__(
        self,
        pattern: str = "*",
        *,
        when: Callable[[Arguments], object] | None = None,
        cost_over: float | None = None,
        timeout: float | timedelta | None = None,
        default: object = ...,
    ) -> None:
        """Raises ConfigurationError that names the argument."""
        if not isinstance(pattern, str) or not pattern:
            raise ConfigurationError(f"Approve pattern={pattern!r}: give a tool's name or a pattern such as 'delete_*'")
        if when is not None and not callable(when):
            raise ConfigurationError(f"Approve({pattern!r}) has when={when!r}: give a function of the arguments")
        self.pattern = pattern
        self.when = when
        self.cost_over = None if cost_over is None else _as_number(pattern, "cost_over", cost_over)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.timeout_seconds = None if seconds is None else _as_number(pattern, "timeout", seconds)
        self.default = _default(pattern, default)

    def __repr__(self) -> str:
        return f"Approve({self.pattern!r})"

    def asks(self, name: str, arguments: Arguments) -> bool:
        """Whether a call fits, its cost aside."""
        if not fnmatchcase(name, self.pattern):
            return False
        if self.when is None:
            return True
        try:
            return bool(self.when(arguments))
        except Exception:
            log.warning("%r: when() has failed for a call of %s: a human is asked", self, name, exc_info=True)
            return True


def asking(rules: Sequence[Approve], name: str, arguments: Arguments) -> list[Asking]:
    """The rules that fit a call, up to the first that needs no look at what the task has cost."""
    found: list[Asking] = []
    for rule in rules:
        if rule.asks(name, arguments):
            found.append(Asking(rule.cost_over, rule.timeout_seconds, rule.default))
            if rule.cost_over is None:
                break
    return found


def asked_at(rules: Sequence[Asking], cost: float) -> Asking | None:
    """The rule by which a human is asked, where the task has cost this much; None: nobody is asked."""
    return next((rule for rule in rules if rule.over is None or cost > rule.over), None)


def _as_number(pattern: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"Approve({pattern!r}) has {name}={value!r}: give a number from 0 up")
    return float(value)


def _default(pattern: str, default: object) -> bool | None:
    if isinstance(default, EllipsisType):
        return None
    try:
        return checked_default(default, "default")
    except InvalidInput as error:
        raise ConfigurationError(f"Approve({pattern!r}): {error}") from None


OutputMode = Literal["tool", "native", "text"]

OUTAGES = RetryPolicy(attempts=8, base_seconds=1.0, factor=2.0, max_seconds=60.0, jitter=0.5)
"""How often a model that cannot be reached, or fails by itself, is asked again."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is called and how. Made once for an agent; none of it counts in a step's digest."""

    model: Any  # Any: a name such as "openai-chat:gpt-x", a pydantic-ai Model, or a function that makes one
    """None: that of an agent of pydantic-ai, which opens it itself."""
    base_url: str | None = None
    """None: `OPENAI_BASE_URL`, read at the first call."""
    api_key: str | None = field(default=None, repr=False)
    """None: `OPENAI_API_KEY`, read at the first call."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: the provider's own JSON
    """Passed to the model, such as `temperature` and `max_tokens`."""
    prices: Mapping[str, Any] = field(default_factory=dict)  # Any: names to Price
    """Model name, or pattern, to `Price`."""
    window: Any = None  # Any: a window.Window
    """The strategy that keeps a request within the model's window; None: everything is sent."""
    estimate: Any = None  # Any: a function of messages
    """Messages to their number of tokens, for windows and limits; None: by their bytes."""
    stream: bool = True
    """Whether text goes to the task's stream while the model writes it."""
    retry: RetryPolicy = OUTAGES
    """For outages; a wait takes no process."""
    rate_limit_patience_seconds: float = 3600.0
    """How long a call may be put off by rate limits, in all."""
    connect_seconds: float = 10.0
    """Limit of the connection's making."""
    call_seconds: float = 600.0
    """Limit of one whole request."""
    silence_seconds: float = 60.0
    """Limit of the time without a piece while an answer is streamed."""


class Calling(TypedDict, total=False):
    """What an LLMAgent may say of its model's calls: the members of `ModelSettings`, where they have their meaning."""

    base_url: str | None
    api_key: str | None
    settings: Mapping[str, Any]  # Any: the provider's own JSON
    prices: Mapping[str, Any]  # Any: names to Price
    window: Any  # Any: a window.Window
    estimate: Any  # Any: a function of messages
    stream: bool
    retry: RetryPolicy
    rate_limit_patience_seconds: float
    connect_seconds: float
    call_seconds: float
    silence_seconds: float


def check_calling(given: Calling) -> None:
    """Raise ConfigurationError that names the first argument that cannot be."""
    unknown = given.keys() - Calling.__annotations__.keys()
    if unknown:
        raise ConfigurationError(
            f"LLMAgent has the unknown {', '.join(sorted(unknown))}; of its calls it may say "
            f"{', '.join(sorted(Calling.__annotations__))}"
        )
    for name, value in given.items():
        wanted = _wanted(name, value)
        if wanted:
            # The value of a key is no text for logs.
            shown = "what is no text" if name == "api_key" else repr(value)
            raise ConfigurationError(f"LLMAgent has {name}={shown}: give {wanted}")


def _wanted(name: str, value: object) -> str:
    """What would do, where this value does not; else empty."""
    if name == "rate_limit_patience_seconds":
        return "" if _number(value) and value >= 0 else "seconds, from 0 on"
    if name in ("connect_seconds", "call_seconds", "silence_seconds"):
        return "" if _number(value) and 0 < value < math.inf else "seconds, more than 0"
    match name:
        case "base_url":
            url = value is None or (isinstance(value, str) and value.startswith(("http://", "https://")))
            return "" if url else "a URL that begins with http:// or https://"
        case "api_key":
            return "" if value is None or isinstance(value, str) else "text, or None for OPENAI_API_KEY"
        case "settings":
            known = isinstance(value, Mapping) and all(isinstance(setting, str) for setting in value)
            return "" if known else "a dict of the model's settings, such as max_tokens"
        case "prices":
            known = isinstance(value, Mapping) and all(
                isinstance(model, str) and isinstance(price, Price) for model, price in value.items()
            )
            return "" if known else "a dict of models' names and Price(input=…, output=…)"
        case "window":
            fits = value is None or callable(getattr(value, "fit", None))
            return "" if fits else "KeepAll(), KeepRecent(…), Summarise(…), or an object with fit"
        case "estimate":
            return "" if value is None or callable(value) else "a function of messages"
        case "stream":
            return "" if isinstance(value, bool) else "True or False"
    return "" if isinstance(value, RetryPolicy) else "a RetryPolicy"


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class LLMAgent:
    """What drives an agent: a model, instructions, tools. `app.add_agent("researcher", LLMAgent(model="…"))`.

    `model` is a name as pydantic-ai has them (`openai-chat:…`, `anthropic:…`), a pydantic-ai Model, or a function that
    makes one. `calling` is how it is called: `base_url`, `settings`, `prices`, `window`, `stream` … (`ModelSettings`).
    `instructions` is text, or a function of ctx, sync or async, whose steps are journaled.

    `tools` are declared functions, names, or patterns such as `files.*`, of this app or of any other. `handoffs` are
    agents that may take the conversation over, `members` those that are asked as tools. `approval` says which calls a
    human is asked about. `output` is the type of the answer (a pydantic model, dataclass, TypedDict, list …); None is
    text.

    `max_turns` bounds the model calls of one run, `output_retries` and `tool_retries` (for each tool) how often the
    model may correct itself. `name` is what swarms call it, `description` what other models are told of it.
    """

    def __init__(
        self,
        model: object,
        *,
        name: str = "",
        description: str = "",
        instructions: str | Callable[..., object] = "",
        tools: Sequence[str | Callable[..., object]] = (),
        output: object = None,
        output_mode: OutputMode = "tool",
        approval: Sequence[Approve] = (),
        handoffs: Sequence[object] = (),
        members: Sequence[object] = (),
        max_turns: int = 50,
        output_retries: int = 2,
        tool_retries: int = 3,
        **calling: Unpack[Calling],
    ) -> None:
        """Raises ConfigurationError that names the argument."""
        if not model or not (isinstance(model, str) or callable(model) or hasattr(model, "request")):
            raise ConfigurationError(
                f"LLMAgent has model={model!r}: give a name such as 'openai-chat:gpt-x', a pydantic-ai Model, or a "
                "function that makes one"
            )
        if not (isinstance(instructions, str) or callable(instructions)):
            raise ConfigurationError(f"LLMAgent has instructions={instructions!r}: give text, or a function of ctx")
        for argument, text in (("name", name), ("description", description)):
            if not isinstance(text, str):
                raise ConfigurationError(f"LLMAgent has {argument}={text!r}: give text")
        if output_mode not in get_args(OutputMode):
            raise ConfigurationError(
                f"LLMAgent has output_mode={output_mode!r}: give one of {', '.join(get_args(OutputMode))}"
            )
        for each in _list("approval", approval):
            if not isinstance(each, Approve):
                raise ConfigurationError(f"LLMAgent has {each!r} in approval: give Approve('name or pattern', …)")
        self.name = name
        self.description = description
        self.instructions = instructions
        self.tools = _list("tools", tools)
        self.output = None if output is str else output
        self.output_mode: OutputMode = output_mode
        self.approval: tuple[Approve, ...] = tuple(approval)
        self.handoffs = _list("handoffs", handoffs)
        self.members = _list("members", members)
        self.max_turns = _count("max_turns", max_turns, 1)
        self.output_retries = _count("output_retries", output_retries, 0)
        self.tool_retries = _count("tool_retries", tool_retries, 0)
        check_calling(calling)
        self.model = ModelSettings(model=model, **calling)

    def __repr__(self) -> str:
        return f"LLMAgent({self.model.model!r})"


def _list(name: str, given: object) -> tuple[Any, ...]:  # Any: what was given, checked where it is used
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigurationError(f"LLMAgent has {name}={given!r}: give a list")
    return tuple(given)


def _count(name: str, given: object, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigurationError(f"LLMAgent has {name}={given!r}: give a whole number from {least} up")
    return given
