"""LLMAgent: an agent that a language model drives, as an app declares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack, get_args

from runtime_core.errors import ConfigurationError
from runtime_core.llm.approval import Approve
from runtime_core.llm.calling import check_calling
from runtime_core.llm.settings import Calling, ModelSettings, OutputMode


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
