"""What is known of a declared agent: its limits, how its input is read, how a run of it is started."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, ClassVar, TypedDict, Unpack, cast

import msgspec

from runtime_core.declare.declaration import (
    NO_DEFAULT,
    Argument,
    Place,
    arguments_of,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_async,
    is_generator,
    resolved,
    unannotated,
)
from runtime_core.declare.manifest import AgentEntry
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.declare.schema import NoInput, Schema, Value, encode, result_schema, tagged_schema
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.ids import checked_topic
from runtime_core.runs.agent import Agent, Handler, check_constructor, handlers_of
from runtime_core.runs.run import Run

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

Coro = Coroutine[object, object, object]


class AgentSettings(TypedDict, total=False):
    """What may be said of an agent where it is declared."""

    retry: RetryPolicy | None
    pool: str
    """Of the handlers that run it; `` is the default one."""
    timeout_seconds: float
    """Limits the running time of one turn, not the waits between turns; 600 where nothing is said."""
    tools: Sequence[str | Callable[..., object]]
    """Those that it may offer to a model."""
    topics: Sequence[str]
    """Those that it has subscribed to, `…*` all that begin so."""
    interleave: bool
    """Events of one instance are handled beside each other; of two that change its state, the later commit counts."""
    internal: bool
    """Only other agents may ask it: submits and schedules that name it are rejected."""


class AgentDefinition(ABC):
    """An agent by its name, with its settings: see `AgentSettings`."""

    run_type: ClassVar[type[Run]] = Run
    """The class of its runs."""
    hooked: ClassVar[bool] = True
    """Whether the app's hooks run around it and its calls."""

    def __init__(
        self,
        name: str,
        source: object,
        place: Place,
        *,
        retry: RetryPolicy | None = None,
        pool: str = "",
        timeout_seconds: float = 600.0,
        tools: Sequence[str | Callable[..., object]] = (),
        topics: Sequence[str] = (),
        interleave: bool = False,
        internal: bool = False,
        description: str = "",
    ) -> None:
        self.name = checked_name("agent", name, None, place)
        self.what = f"agent {self.name!r}"
        self.source = source
        self.place = place
        self.retry = checked_retry(self.what, retry, place)
        self.pool = checked_pool(self.what, pool, place)
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        if isinstance(tools, str):
            raise ConfigurationError(f"{self.what} ({place}) has tools={tools!r}: give a list of names")
        self.tools = tuple(tools)
        if isinstance(topics, str):
            raise ConfigurationError(f"{self.what} ({place}) has topics={topics!r}: give a list")
        self.topics = tuple(_checked(self.what, topic, place) for topic in topics)
        self.interleave = interleave
        self.internal = internal
        self.description = description

    @abstractmethod
    def decode_input(self, data: bytes) -> object:
        """The input in `data` (JSON), as `start` takes it. Raises InvalidInput that names the field."""

    @abstractmethod
    def start(self, ctx: AgentContext, value: object) -> Coro:
        """The coroutine of a run with this decoded input; nothing runs before it is awaited."""

    @abstractmethod
    def input_schema(self) -> Schema:
        """The JSON schema of the input."""

    @abstractmethod
    def output_schema(self) -> Schema | None:
        """The JSON schema of the output; None where it is not declared."""

    def encode_input(self, value: object) -> bytes:
        """An input as JSON, for an agent that is asked by another. Raises InvalidInput."""
        return encode(value, "input")

    def encode_output(self, value: object) -> bytes:
        """The output as JSON. Raises InvalidInput("output", …) that names the type that cannot be written."""
        return encode(value, "output")

    def entry(self) -> AgentEntry:
        """What the manifest says of it. Raises ConfigurationError as `check` does."""
        return AgentEntry(
            input=self.input_schema(),
            output=self.output_schema(),
            pool=self.pool,
            description=self.description,
            interleave=self.interleave,
            topics=list(self.topics),
            internal=self.internal,
        )

    def check(self) -> None:
        """Make all that the first run would make. Raises ConfigurationError."""
        self.input_schema()
        self.output_schema()


class FunctionAgent(AgentDefinition):
    """An async function `(ctx)` or `(ctx, input)`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Coro],
        place: Place,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        super().__init__(
            name,
            function,
            place,
            **settings,
            description=inspect.getdoc(function) or "",
        )
        if not callable(function) or inspect.isclass(function):
            raise ConfigurationError(
                f"{self.what} ({place}): {function!r} is not a function: use add_agent for a class"
            )
        if is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}) is a generator: stream with await ctx.emit(…)")
        if not is_async(function):
            raise ConfigurationError(f"{self.what} ({place}) is not async: write async def")
        self.function = function
        self._input = self._input_of(arguments_of(self.what, function, place))

    def _input_of(self, arguments: list[Argument]) -> Argument | None:
        shape = "write async def f(ctx: AgentContext) or f(ctx: AgentContext, input: T)"
        if not arguments or not _is_context(arguments[0]):
            raise ConfigurationError(f"{self.what} ({self.place}) does not take ctx: AgentContext first: {shape}")
        if len(arguments) > 2:
            raise ConfigurationError(
                f"{self.what} ({self.place}) takes {len(arguments) - 1} inputs: take one, such as a dataclass"
            )
        if len(arguments) == 1:
            return None
        if arguments[1].annotation is NO_DEFAULT:
            raise unannotated(self.what, arguments[1], self.place)
        return arguments[1]

    @functools.cached_property
    def input(self) -> Value | NoInput:
        """What reads the input. Made at the first use; raises ConfigurationError for types without JSON."""
        if self._input is None:
            return NoInput(self.what)
        name, annotation, default = self._input.name, self._input.annotation, self._input.default
        hint = resolved(self.what, name, annotation, self.function, self.place)
        return Value(f"{self.what}, input {name!r}", hint, self.place, default=default)

    def decode_input(self, data: bytes) -> object:
        return self.input.decode(data)

    def start(self, ctx: AgentContext, value: object) -> Coro:
        return self.function(ctx) if self._input is None else self.function(ctx, value)

    def input_schema(self) -> Schema:
        return self.input.schema()

    def output_schema(self) -> Schema | None:
        return result_schema(self.what, self.function, self.place)


class _Message:
    """A decoded message and the handler that it goes to."""

    __slots__ = ("handler", "value")

    def __init__(self, handler: Handler, value: object) -> None:
        self.handler = handler
        self.value = value


class _Tagged(msgspec.Struct, forbid_unknown_fields=True):
    """How a message says its type on the wire."""

    type: str
    data: msgspec.Raw


_TAGGED = msgspec.json.Decoder(_Tagged)


class ClassAgent(AgentDefinition):
    """A subclass of Agent: the handler is picked by the message's type.

    The input is `{"type": "ResearchFacts", "data": {…}}`, or with a single handler just the data.
    """

    def __init__(
        self,
        name: str,
        agent: type[Agent],
        place: Place,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        if not (inspect.isclass(agent) and issubclass(agent, Agent)):
            raise ConfigurationError(f"agent {name!r} ({place}): {agent!r} is not a subclass of Agent")
        super().__init__(
            name,
            agent,
            place,
            **settings,
            # A class without a docstring has its base's, which says nothing of it.
            description=inspect.cleandoc(agent.__doc__ or ""),
        )
        self.agent = agent
        check_constructor(self.what, agent, place)
        self.handlers = handlers_of(self.what, agent, place)
        self._only = next(iter(self.handlers.values())) if len(self.handlers) == 1 else None

    @functools.cached_property
    def inputs(self) -> dict[str, Value]:
        """What reads each message type's data, by name."""
        return {
            name: Value(f"{self.what}, message {name}", handler.message_type, self.place)
            for name, handler in self.handlers.items()
        }

    def decode_input(self, data: bytes) -> object:
        try:
            tagged = _TAGGED.decode(data)
        except msgspec.DecodeError:  # another shape, or no JSON at all: its own reader says which
            tagged = None
        if tagged is not None and tagged.type in self.handlers:
            return self._message(tagged.type, bytes(tagged.data), "input.data")
        if self._only is not None:
            return self._message(self._only.message, data, "input")
        known = ", ".join(self.handlers)
        if tagged is None:
            raise InvalidInput("input", f'{self.what} takes {{"type": …, "data": …}} with a type of {known}')
        raise InvalidInput("input.type", f"{self.what} handles no {tagged.type!r}: it handles {known}")

    def _message(self, name: str, data: bytes, field: str) -> _Message:
        return _Message(self.handlers[name], self.inputs[name].decode(data, field))

    def start(self, ctx: AgentContext, value: object) -> Coro:
        if not isinstance(value, _Message):
            raise TypeError(f"{self.what} starts with what decode_input gave, not with {type(value).__name__}")
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, message: _Message) -> object:
        for name, initial in self.agent.state.items():
            if name not in ctx.state:
                ctx.state[name] = copy.deepcopy(initial)
        instance = self.agent()
        # Found on the class as an async method with these arguments; attribute access cannot say so.
        method = cast("Callable[[object, AgentContext], Coro]", getattr(instance, message.handler.method))
        return await method(message.value, ctx)

    def input_schema(self) -> Schema:
        return tagged_schema({name: value.adapter for name, value in self.inputs.items()})

    def output_schema(self) -> Schema | None:
        if self._only is None:
            return None
        return result_schema(self.what, self._only.function, self.place)

    def encode_input(self, value: object) -> bytes:
        """A message with its type, where the value is an instance of one that is handled; else as it is."""
        name = type(value).__name__
        handler = self.handlers.get(name)
        if handler is not None and type(value) is handler.message_type:
            return encode({"type": name, "data": value}, "input")
        return encode(value, "input")


def _checked(what: str, topic: object, place: Place) -> str:
    try:
        return checked_topic(topic.removesuffix("*") if isinstance(topic, str) else topic) and str(topic)
    except InvalidInput as error:
        raise ConfigurationError(f"{what} ({place}): {error}") from None


def _is_context(argument: Argument) -> bool:
    """By name: the class may be imported for type checkers only, and then cannot be looked up."""
    annotation = argument.annotation
    if annotation is NO_DEFAULT:
        return argument.name in ("ctx", "context")
    if isinstance(annotation, str):
        return annotation.strip("'\" ").split(".")[-1] == "AgentContext"
    return isinstance(annotation, type) and any(base.__name__ == "AgentContext" for base in annotation.__mro__)
