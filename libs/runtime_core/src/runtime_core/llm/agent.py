"""`LLMAgent`, an agent that a language model drives, and `ModelAgent`, its definition in an app."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard, Unpack, cast, get_args

import msgspec
from pydantic import PydanticUserError, TypeAdapter

from runtime_core.base.lazy import needs_extra
from runtime_core.declare.declaration import Place, RetryPolicy, one_line, shown
from runtime_core.declare.schema import Schema
from runtime_core.errors import ConfigurationError, InvalidInput, WeftError
from runtime_core.llm.input import SCHEMA, AgentInput, read
from runtime_core.llm.tokens import REMEMBERED, Price, Summarise, is_store
from runtime_core.llm.toolset import FINAL, Toolset, toolset_of
from runtime_core.runs.calls import checked_default
from runtime_core.runs.definition import AgentDefinition, AgentSettings, Coro
from runtime_core.runs.journal import from_json

if TYPE_CHECKING:
    from runtime_core.declare.manifest import Manifest
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.ports import Functions

log = logging.getLogger(__name__)

Arguments = Mapping[str, Any]  # Any: JSON
OutputMode = Literal["tool", "native", "text"]

OUTAGES = RetryPolicy(attempts=8, base_seconds=1.0, factor=2.0, max_seconds=60.0, jitter=0.5)
"""Retries of a call when the model is unreachable or the provider fails."""

TURN_SECONDS = 3600.0
"""The time limit for one turn: several long model calls may follow each other without a broker wait."""


class MatchedRule(msgspec.Struct, omit_defaults=True):
    """An approval rule that matches a call, as journaled with the model's answer."""

    over: float | None = None
    """Applies only if the task has cost more than this; None: always."""
    timeout_seconds: float | None = None
    """None: no limit."""
    default: bool | None = None
    """The answer at the limit; None: there is no default, and the call is refused."""


class Approve:
    """Requires a human's approval for calls of tools or agents whose name matches `pattern`.

    `when(arguments)` decides by the call's arguments, a dict; if it raises, the call needs approval. `cost_over`
    applies only if the task has cost more than that, in the currency of `prices`. After `timeout` (seconds or
    timedelta; None: no limit) the answer is `default`, True or False; without a default the call is refused. The
    human approves, denies or edits the arguments. The model learns of a denial, with its reason, and of an edit.
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
            raise ConfigurationError(
                f"Approve has pattern={pattern!r}: pass a tool's name or a pattern such as 'delete_*'"
            )
        if when is not None and not callable(when):
            raise ConfigurationError(f"Approve({pattern!r}) has when={when!r}: pass a function of the arguments")
        self.pattern = pattern
        self.when = when
        self.cost_over = None if cost_over is None else _as_number(pattern, "cost_over", cost_over)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.timeout_seconds = None if seconds is None else _as_number(pattern, "timeout", seconds)
        self.default = _default(pattern, default)

    def __repr__(self) -> str:
        return f"Approve({self.pattern!r})"

    def matches(self, name: str, arguments: Arguments) -> bool:
        """Return whether the rule matches a call, apart from its cost."""
        if not fnmatchcase(name, self.pattern):
            return False
        if self.when is None:
            return True
        try:
            return bool(self.when(arguments))
        except Exception:
            log.warning("%r: when() failed for a call of %s, so it needs approval", self, name, exc_info=True)
            return True


def matching_rules(rules: Sequence[Approve], name: str, arguments: Arguments) -> list[MatchedRule]:
    """Return the rules that match a call, up to the first that does not depend on the task's cost."""
    found: list[MatchedRule] = []
    for rule in rules:
        if rule.matches(name, arguments):
            found.append(MatchedRule(rule.cost_over, rule.timeout_seconds, rule.default))
            if rule.cost_over is None:
                break
    return found


def applicable_rule(rules: Sequence[MatchedRule], cost: float) -> MatchedRule | None:
    """Return the rule that requires approval at this cost of the task, or None."""
    return next((rule for rule in rules if rule.over is None or cost > rule.over), None)


def _as_number(pattern: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"Approve({pattern!r}) has {name}={value!r}: pass a number of at least 0")
    return float(value)


def _default(pattern: str, default: object) -> bool | None:
    if isinstance(default, EllipsisType):
        return None
    try:
        return checked_default(default, "default")
    except InvalidInput as error:
        raise ConfigurationError(f"Approve({pattern!r}): {error}") from None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model of an agent and how to call it. None of this is part of a step's digest."""

    model: Any  # Any: a name such as "openai-chat:gpt-x", a pydantic-ai Model, or a function that makes one
    """None: the model of a user's pydantic-ai agent, which opens it itself."""
    base_url: str | None = None
    """None: `OPENAI_BASE_URL`, read at the first call."""
    api_key: str | None = field(default=None, repr=False)
    """None: `OPENAI_API_KEY`, read at the first call."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: the provider's own JSON
    """Passed to the model, such as `temperature` and `max_tokens`."""
    prices: Mapping[str, Any] = field(default_factory=dict)  # Any: names to Price
    """Model name or pattern → `Price`."""
    window: Any = None  # Any: a window.Window
    """The strategy that keeps a request within the model's window; None sends everything."""
    estimate: Any = None  # Any: a function of messages
    """Estimates the tokens of messages, for windows and limits; None estimates from their bytes."""
    stream: bool = True
    """Whether to stream text to the client while the model writes it."""
    retry: RetryPolicy = OUTAGES
    """Retries after outages; a wait needs no process."""
    rate_limit_patience_seconds: float = 3600.0
    """The longest total delay of a call by rate limits."""
    connect_seconds: float = 10.0
    """The time limit for opening a connection."""
    call_seconds: float = 600.0
    """The time limit for one whole request."""
    silence_seconds: float = 60.0
    """The longest pause in a streamed answer."""


class CallOptions(TypedDict, total=False):
    """The arguments of an LLMAgent that set how its model is called. `LLMAgent` describes them."""

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


def check_options(given: CallOptions) -> None:
    """Raise ConfigurationError that names the first invalid argument."""
    unknown = given.keys() - CallOptions.__annotations__.keys()
    if unknown:
        raise ConfigurationError(
            f"LLMAgent has no argument {', '.join(sorted(unknown))}; for its calls it has "
            f"{', '.join(sorted(CallOptions.__annotations__))}"
        )
    for name, value in given.items():
        wanted = _expected(name, value)
        if wanted:
            # Keep the value of a key out of logs.
            shown = "a value that is not text" if name == "api_key" else repr(value)
            raise ConfigurationError(f"LLMAgent has {name}={shown}: pass {wanted}")


def _expected(name: str, value: object) -> str:
    """Return a description of valid values if this value is invalid; otherwise an empty string."""
    if name == "rate_limit_patience_seconds":
        return "" if _number(value) and value >= 0 else "seconds, at least 0"
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
    """An agent that a model drives: `app.add_agent("researcher", LLMAgent("openai-chat:gpt-x", …))`.

    `model` is a model name of pydantic-ai (`openai-chat:…`, `anthropic:…`), a pydantic-ai Model, or a function that
    returns one. `instructions` is text, or a function of ctx, sync or async, whose steps are journaled.

    `tools` are declared functions, names, or patterns such as `files.*`, of any app. `handoffs` are agents that may
    take over the conversation; `members` are agents that the model calls as tools. `approval` lists the rules for
    calls that need a human's approval. `output` is the type of the answer (a pydantic model, dataclass, TypedDict,
    list …); None is text.

    `memory` is what an instance with a key keeps of its conversation for its next task: a window strategy, such as
    `KeepRecent(50_000, keep_first=0)`, the default, or `Summarise(…)`; an object with `load(key)` and
    `save(key, messages)`, which stores it elsewhere; None keeps nothing.

    `max_turns` limits the model calls of one run. `output_retries` and `tool_retries` (for each tool) limit the
    model's corrections. `name` is its name in swarms, `description` its description for other models.

    Options:
        base_url (str | None): The URL of an OpenAI-compatible server. Default: None, `OPENAI_BASE_URL`.
        api_key (str | None): Its key. Default: None, `OPENAI_API_KEY`. Each process reads both at its first call.
        settings (Mapping[str, Any]): Passed to the model, such as `temperature` and `max_tokens`. Default: {}.
        prices (Mapping[str, Price]): Prices by model name or pattern, from which `cost` is computed. Default: {}.
        window (Window | None): The strategy that keeps a request within the model's window: `KeepAll()`,
            `KeepRecent(…)`, `Summarise(…)`, or an object with `fit`. Default: None, which sends everything.
        estimate (Callable | None): A function that estimates the tokens of messages, for windows and limits. Default:
            None, an estimate from their bytes.
        stream (bool): Whether the client gets the text while the model writes it. Default: True.
        retry (RetryPolicy): Retries after outages. Waiting needs no process. Default: 8 attempts, with delays from
            1 to 60 seconds.
        rate_limit_patience_seconds (float): The longest total delay of a call by rate limits. Default: 3600.0.
        connect_seconds (float): The limit for opening a connection. Default: 10.0.
        call_seconds (float): The limit of one whole request. Default: 600.0.
        silence_seconds (float): The longest pause in a streamed answer. Default: 60.0.
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
        memory: object = REMEMBERED,
        max_turns: int = 50,
        output_retries: int = 2,
        tool_retries: int = 3,
        **options: Unpack[CallOptions],
    ) -> None:
        """Raises ConfigurationError that names the argument."""
        if not model or not (isinstance(model, str) or callable(model) or hasattr(model, "request")):
            raise ConfigurationError(
                f"LLMAgent has model={model!r}: pass a name such as 'openai-chat:gpt-x', a pydantic-ai Model, or a "
                "function that returns one"
            )
        if not (isinstance(instructions, str) or callable(instructions)):
            raise ConfigurationError(f"LLMAgent has instructions={instructions!r}: pass text, or a function of ctx")
        for argument, text in (("name", name), ("description", description)):
            if not isinstance(text, str):
                raise ConfigurationError(f"LLMAgent has {argument}={text!r}: pass text")
        if output_mode not in get_args(OutputMode):
            raise ConfigurationError(
                f"LLMAgent has output_mode={output_mode!r}: pass one of {', '.join(get_args(OutputMode))}"
            )
        for each in _list("approval", approval):
            if not isinstance(each, Approve):
                raise ConfigurationError(f"LLMAgent has {each!r} in approval: pass Approve('name or pattern', …)")
        self.name = name
        self.description = description
        self.instructions = instructions
        self.tools = _list("tools", tools)
        self.output = None if output is str else output
        self.output_mode: OutputMode = output_mode
        self.approval: tuple[Approve, ...] = tuple(approval)
        self.handoffs = _list("handoffs", handoffs)
        self.members = _list("members", members)
        check_memory("LLMAgent", memory)
        self.memory = memory
        self.max_turns = _count("max_turns", max_turns, 1)
        self.output_retries = _count("output_retries", output_retries, 0)
        self.tool_retries = _count("tool_retries", tool_retries, 0)
        check_options(options)
        self.model = ModelSettings(model=model, **options)

    def __repr__(self) -> str:
        return f"LLMAgent({self.model.model!r})"


def _list(name: str, given: object) -> tuple[Any, ...]:  # Any: checked where it is used
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigurationError(f"LLMAgent has {name}={given!r}: pass a list")
    return tuple(given)


def check_memory(what: str, memory: object, *, has_model: bool = True) -> None:
    """Raise ConfigurationError unless this can be the `memory` of an agent. `has_model`: it has a model's settings."""
    if memory is not None and not callable(getattr(memory, "fit", None)) and not is_store(memory):
        raise ConfigurationError(
            f"{what} has memory={memory!r}: pass KeepRecent(…), Summarise(…), KeepAll(), an object with fit, an object "
            "with load and save, or None to keep nothing"
        )
    if not has_model and isinstance(memory, Summarise) and memory.model is None:
        raise ConfigurationError(f"{what} has memory={memory!r}, which needs a model: pass Summarise(…, model=…)")


def _count(name: str, given: object, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigurationError(f"LLMAgent has {name}={given!r}: pass a whole number of at least {least}")
    return given


# ---- in an app ----------------------------------------------------------------------------------------------


class ModelAgent(AgentDefinition):
    """An LLMAgent under a name. Its input is text, content parts, a conversation, an Observation, or any data."""

    sees_observations = True
    """A swarm passes the whole observation, so that the agent knows its team and its handoff targets."""

    def __init__(self, name: str, agent: LLMAgent, place: Place, **settings: Unpack[AgentSettings]) -> None:
        """Raise ConfigurationError for errors that show without the other declarations."""
        settings.setdefault("timeout_seconds", TURN_SECONDS)
        more = settings.get("tools", ())
        # Only the agent's own tool objects: names may belong to another app. The app checks that it declares them.
        settings["tools"] = more if isinstance(more, str) else [*_objects(agent.tools), *more]
        super().__init__(name, agent, place, **settings, description=agent.description)
        self.agent = agent
        self._tools = [*agent.tools, *more]
        # The model is only offered its own tools, and a function of the instructions may use others.
        self.own_tools = ()
        # Any: the user's type, known at run time only
        self._output: TypeAdapter[Any] = TypeAdapter(str)
        self._output_schema: Schema = {"type": "string"}
        if agent.output is not None:
            try:
                self._output = TypeAdapter(agent.output)  # type: ignore[arg-type]  # any type of the user's
                self._output.json_schema()
                self._output_schema = self._output.json_schema(mode="serialization")
            except (PydanticUserError, TypeError, NameError) as error:
                raise ConfigurationError(
                    f"{self.what} ({place}) has output={agent.output!r}, a type without a JSON schema, "
                    f"{one_line(error, 160)}: use a pydantic model, dataclass, TypedDict or plain type"
                ) from error
        # Any: Conversation and pydantic-ai's Agent, which are imported later.
        self._built: tuple[object, Any, Any] | None = None
        self._toolset: tuple[object, Toolset] | None = None

    def decode_input(self, data: bytes) -> AgentInput:
        try:
            given = from_json(data)
        except WeftError as error:
            raise InvalidInput("input", str(error)) from None
        return read(given)

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, AgentInput)  # the result of decode_input
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, asked: AgentInput) -> object:
        models = ctx.functions.models
        if self._built is None or self._built[0] is not models:
            try:
                # In a thread: the import takes seconds, and the loop must send heartbeats.
                loaded = await asyncio.to_thread(importlib.import_module, "runtime_core.llm.conversation")
            except ModuleNotFoundError as error:
                raise ConfigurationError(str(needs_extra(self.what, "llm", error))) from error
            self._built = (models, loaded.Conversation, loaded.agent_of(self, models))
        _, conversation, agent = self._built
        return cast(object, await conversation(ctx, self, asked).run(agent))

    def input_schema(self) -> Schema:
        return SCHEMA

    def output_schema(self) -> Schema | None:
        if self.agent.handoffs:
            return None  # another agent may answer
        return self._output_schema

    def dump(self, output: object) -> object:
        """Return a final answer as JSON."""
        return cast(object, self._output.dump_python(output, mode="json"))

    def toolset(
        self,
        functions: Functions,
        manifests: Sequence[Manifest] | None,
        asked: AgentInput,
        limits: Sequence[Sequence[str]] = (),
    ) -> Toolset:
        """Return the tools that the model may call for this input, within the `limits` of the task.

        Raises ToolsMissing, ConfigurationError.
        """
        members = [*self._named(functions, "members"), *asked.names("team")]
        targets = [*self._named(functions, "handoffs"), *asked.names("handoffs")]
        # The manifests stay the same object until something changes.
        key = (id(manifests), members, targets, limits)
        if self._toolset is None or self._toolset[0] != (key, manifests):
            made = toolset_of(
                self.what,
                self._tools,
                members,
                targets,
                FINAL if self.agent.output is not None and self.agent.output_mode == "tool" else "",
                functions,
                manifests,
            )
            self._toolset = ((key, manifests), made.within(limits) if limits else made)
        return self._toolset[1]

    def _named(self, functions: Functions, member: str) -> list[str]:
        found = []
        for named in getattr(self.agent, member):
            known = functions.agent(named)
            if known is None and not isinstance(named, str):
                raise ConfigurationError(
                    f"{self.what} ({self.place}) has {shown(named)} in {member}, which is not an agent of this app: "
                    "declare it, or pass a name"
                )
            found.append(named if known is None else known.name)
        return found


def _objects(tools: Sequence[str | Callable[..., object]]) -> list[Callable[..., object]]:
    return [tool for tool in tools if not isinstance(tool, str)]
