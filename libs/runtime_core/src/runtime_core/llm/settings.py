"""How a model is called: which one, where, with what limits; and what it is shown beside the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from runtime_core.policy import RetryPolicy

if TYPE_CHECKING:
    from runtime_core.manifest import Schema

OutputMode = Literal["tool", "native", "text"]

Decide = Callable[[Any], object]  # Any: the Answer of call.py
"""Called inside the step with the finished answer, before it is journaled. What it gives (JSON) is journaled with the
answer, as member `decided`, and comes back as `Answer.decided`: so what was decided by tools, schemas and policies as
they were then stays as it was, whatever a later deploy changes."""

OUTAGES = RetryPolicy(attempts=8, base_seconds=1.0, factor=2.0, max_seconds=60.0, jitter=0.5)
"""How often a model that cannot be reached, or fails by itself, is asked again."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it."""

    name: str
    """At the model's edge: letters, digits, _ and -, at most 64."""
    description: str
    arguments: Schema
    """JSON schema of the arguments, an object."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The form in which the model gives its final answer."""

    name: str
    """Of the tool or the response format, as for a tool."""
    schema: Schema
    """JSON schema of the answer; of an object."""
    mode: OutputMode = "tool"
    """`tool`: the model calls the tool of this name with the answer; `native`: the provider's own JSON schema format;
    `text`: the answer is text (a reader elsewhere takes it apart)."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is called and how. Made once for an agent; none of it counts in a step's digest."""

    model: Any  # Any: a name such as "openai-chat:gpt-x", the client's own Model, or a function that makes one
    base_url: str | None = None
    """None: `OPENAI_BASE_URL`, read at the first call."""
    api_key: str | None = field(default=None, repr=False)
    """None: `OPENAI_API_KEY`, read at the first call."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: the provider's own JSON
    """Passed to the model, such as `temperature` and `max_tokens`."""
    prices: Mapping[str, Any] = field(default_factory=dict)  # Any: see prices.py
    """Model name, or pattern, to `Price`."""
    window: Any = None  # Any: see window.py
    """The strategy that keeps a request within the model's window; None: everything is sent."""
    estimate: Any = None  # Any: see estimate.py
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
    prices: Mapping[str, Any]  # Any: see prices.py
    window: Any  # Any: see window.py
    estimate: Any  # Any: see estimate.py
    stream: bool
    retry: RetryPolicy
    rate_limit_patience_seconds: float
    connect_seconds: float
    call_seconds: float
    silence_seconds: float
