"""Agents as a program declares them: a function, or a class whose methods handle messages by type."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from runtime_core.declare.declaration import (
    NO_DEFAULT,
    Agent,
    Argument,
    Limit,
    Place,
    RetryPolicy,
    arguments_of,
    checked_limits,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_async,
    is_generator,
    needed_argument,
    resolved,
    unannotated,
)
from runtime_core.declare.function import ResultCheck, result_check
from runtime_core.declare.manifest import AgentEntry
from runtime_core.declare.schema import (
    NoInput,
    Reader,
    Schema,
    ValueReader,
    encode,
    result_reader,
    result_schema,
    tagged_schema,
)
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.run import Run
from runtime_core.wire.ids import checked_topic

if TYPE_CHECKING:
    from runtime_core.declare.tool import Tool
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.ports import Functions, RunHooks

Coro = Coroutine[object, object, object]
# A handler must be an async method; its types are the user's.
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, object]])
_MARK = "__weft_handles__"


@dataclass(frozen=True, slots=True)
class MessageMethod:
    """A method of an agent and the type of messages that it handles."""

    message: str
    """The type's name in `{"type": …, "data": …}`."""
    message_type: object
    method: str
    function: Callable[..., object]


def handles(message_type: object) -> Callable[[Method], Method]:
    """Mark an async method `(self, message, ctx)` of an Agent as the handler of messages of this type.

    `message_type` is a class (pydantic model, dataclass, TypedDict, `str` …). Its name is the message's type on the
    wire. Mark a method once for each type that it handles.
    """

    def mark(method: Method) -> Method:
        marked: tuple[object, ...] = getattr(method, _MARK, ())
        setattr(method, _MARK, (*marked, message_type))
        return method

    return mark


class AgentSettings(TypedDict, total=False):
    """The options of an agent. `App.agent` describes them."""

    retry: RetryPolicy | None
    pool: str
    timeout_seconds: float
    tools: Sequence[str | Callable[..., object]]
    topics: Sequence[str]
    interleave: bool
    internal: bool
    limit: Limit | Sequence[Limit] | None


class AgentDefinition(ABC):
    """A declared agent. `App.agent` describes its options."""

    run_type: ClassVar[type[Run]] = Run
    """The class of its runs."""
    hooked: ClassVar[bool] = True
    """Whether the app's hooks apply to it."""

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
        limit: Limit | Sequence[Limit] | None = None,
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
        self.own_tools: Sequence[object] = self.tools
        """The only tools that its runs may call, as names, patterns or declared functions; empty: all."""
        if isinstance(topics, str):
            raise ConfigurationError(f"{self.what} ({place}) has topics={topics!r}: give a list")
        self.topics = tuple(_checked(self.what, topic, place) for topic in topics)
        self.interleave = interleave
        self.internal = internal
        self.limits = checked_limits(self.what, limit, place, keyed=True, interleave=interleave)
        self.description = description

    @abstractmethod
    def decode_input(self, data: bytes) -> object:
        """Decode the input (JSON) for `start`. Raises InvalidInput, which names the field."""

    @abstractmethod
    def start(self, ctx: AgentContext, value: object) -> Coro:
        """Return the coroutine of a run with this decoded input. Nothing runs before it is awaited."""

    @abstractmethod
    def input_schema(self) -> Schema:
        """Return the JSON schema of the input."""

    @abstractmethod
    def output_schema(self) -> Schema | None:
        """Return the JSON schema of the output; None if the agent does not declare it."""

    @property
    def result_reader(self) -> Reader | None:
        """The reader of the results for a caller in this program; None if their JSON is enough."""
        return None

    def encode_input(self, value: object) -> bytes:
        """Return JSON of an input, for a call by another agent. Raises InvalidInput."""
        return encode(value, "input")

    def encode_output(self, value: object) -> bytes:
        """Return JSON of the output. Raises InvalidInput("output", …), which names a type without JSON."""
        return encode(value, "output")

    def entry(self) -> AgentEntry:
        """Return its entry in the manifest. Raises ConfigurationError as `check` does."""
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
        """Evaluate the annotations, as the first run would. Raises ConfigurationError."""
        self.input_schema()
        self.output_schema()


class FunctionAgent(AgentDefinition):
    """An agent from an async function `(ctx)` or `(ctx, input)`."""

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
            raise ConfigurationError(f"{self.what} ({place}) is a generator: use await ctx.emit(…) to stream")
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
    def input(self) -> ValueReader | NoInput:
        """The decoder of the input, created at its first use. Raises ConfigurationError for types without JSON."""
        if self._input is None:
            return NoInput(self.what)
        name, annotation, default = self._input.name, self._input.annotation, self._input.default
        hint = resolved(self.what, name, annotation, self.function, self.place)
        return ValueReader(f"{self.what}, input {name!r}", hint, self.place, default=default)

    def decode_input(self, data: bytes) -> object:
        return self.input.decode(data)

    def start(self, ctx: AgentContext, value: object) -> Coro:
        return self.function(ctx) if self._input is None else self.function(ctx, value)

    def input_schema(self) -> Schema:
        return self.input.schema()

    def encode_output(self, value: object) -> bytes:
        data = encode(value, "output")
        if (check := self._result_check) is not None and type(value) is not check.exact:
            check.check(value, data, "output")
        return data

    @functools.cached_property
    def _result_check(self) -> ResultCheck | None:
        return result_check(self.what, self.function, self.place)

    def output_schema(self) -> Schema | None:
        return result_schema(self.what, self.function, self.place)

    @functools.cached_property
    def result_reader(self) -> Reader | None:
        return result_reader(self.what, self.function, self.place)


class _Message:
    """A decoded message and its handler."""

    __slots__ = ("handler", "value")

    def __init__(self, handler: MessageMethod, value: object) -> None:
        self.handler = handler
        self.value = value


class _Tagged(msgspec.Struct, forbid_unknown_fields=True):
    """A message with its type, as it is on the wire."""

    type: str
    data: msgspec.Raw


_TAGGED = msgspec.json.Decoder(_Tagged)


class ClassAgent(AgentDefinition):
    """An agent from a subclass of `Agent`. The message's type selects the handler.

    The input is `{"type": "ResearchFacts", "data": {…}}`. With a single handler it may be the data alone.
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
            # Not `inspect.getdoc`: it would fall back to the docstring of the base class.
            description=inspect.cleandoc(agent.__doc__ or ""),
        )
        self.agent = agent
        check_constructor(self.what, agent, place)
        self.handlers = handlers_of(self.what, agent, place)
        self._only = next(iter(self.handlers.values())) if len(self.handlers) == 1 else None

    @functools.cached_property
    def inputs(self) -> dict[str, ValueReader]:
        """The decoder of each message type's data, by the type's name."""
        return {
            name: ValueReader(f"{self.what}, message {name}", handler.message_type, self.place)
            for name, handler in self.handlers.items()
        }

    def decode_input(self, data: bytes) -> object:
        try:
            tagged = _TAGGED.decode(data)
        except msgspec.DecodeError:  # another shape, or not JSON: the single handler's decoder reports it
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
            raise TypeError(f"{self.what} starts with a result of decode_input, not with {type(value).__name__}")
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, message: _Message) -> object:
        if self.agent.state:
            ctx._run.state.set_initial(self.agent.state)
        instance = self.agent()
        # `handlers_of` has checked that it is an async method with these arguments.
        method = cast("Callable[[object, AgentContext], Coro]", getattr(instance, message.handler.method))
        value = await method(message.value, ctx)
        check = self._result_checks[message.handler.message]
        if check is not None and type(value) is not check.exact:
            check.check(value, encode(value, "output"), "output")
        return value

    @functools.cached_property
    def _result_checks(self) -> dict[str, ResultCheck | None]:
        return {name: result_check(self.what, handler.function, self.place) for name, handler in self.handlers.items()}

    def input_schema(self) -> Schema:
        return tagged_schema({name: value.adapter for name, value in self.inputs.items()})

    def output_schema(self) -> Schema | None:
        if self._only is None:
            return None
        return result_schema(self.what, self._only.function, self.place)

    def encode_input(self, value: object) -> bytes:
        """Return JSON of the value, with its type if a handler handles that type."""
        name = type(value).__name__
        handler = self.handlers.get(name)
        if handler is not None and type(value) is handler.message_type:
            return encode({"type": name, "data": value}, "input")
        return encode(value, "input")


def handlers_of(what: str, agent: type[Agent], place: Place) -> dict[str, MessageMethod]:
    """Return the handlers of an agent's class by message name. Raises ConfigurationError for an invalid class."""
    found: dict[str, MessageMethod] = {}
    for name in dir(agent):
        function = inspect.getattr_static(agent, name)
        for message_type in getattr(function, _MARK, ()):
            handler = MessageMethod(_name_of(what, message_type, name, place), message_type, name, function)
            other = found.get(handler.message)
            if other is not None:
                raise ConfigurationError(
                    f"{what} ({place}): {other.method} and {name} both handle {handler.message}: keep one"
                )
            _check_handler(what, handler, place)
            found[handler.message] = handler
    if not found:
        raise ConfigurationError(
            f"{what} ({place}) handles nothing: mark an async method of {agent.__name__} with @handles(MessageType)"
        )
    return found


def check_constructor(what: str, agent: type[Agent], place: Place) -> None:
    """Raise ConfigurationError if the class needs arguments, or its `state` is not a dict."""
    needed = needed_argument(agent)
    if needed is not None:
        raise ConfigurationError(
            f"{what} ({place}): {agent.__name__}() needs {needed!r}: each run creates an object without "
            "arguments, so give it a default"
        )
    if not isinstance(inspect.getattr_static(agent, "state"), dict):
        raise ConfigurationError(f"{what} ({place}): {agent.__name__}.state is not a dict: write state = {{…}}")


def _name_of(what: str, message_type: object, method: str, place: Place) -> str:
    name = getattr(message_type, "__name__", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{what} ({place}): {method} handles {message_type!r}, which has no name: give a class"
        )
    return name


def _check_handler(what: str, handler: MessageMethod, place: Place) -> None:
    where = f"{what}, method {handler.method!r}"
    if not is_async(handler.function):
        raise ConfigurationError(f"{where} ({place}) is not async: write async def {handler.method}")
    if len(arguments_of(where, handler.function, place)) != 3:
        raise ConfigurationError(
            f"{where} ({place}) has other arguments: write async def {handler.method}(self, message, ctx)"
        )


def _checked(what: str, topic: object, place: Place) -> str:
    try:
        return checked_topic(topic.removesuffix("*") if isinstance(topic, str) else topic) and str(topic)
    except InvalidInput as error:
        raise ConfigurationError(f"{what} ({place}): {error}") from None


def _is_context(argument: Argument) -> bool:
    """Compare by name: a class that is imported for type checkers only cannot be looked up."""
    annotation = argument.annotation
    if annotation is NO_DEFAULT:
        return argument.name in ("ctx", "context")
    if isinstance(annotation, str):
        return annotation.strip("'\" ").split(".")[-1] == "AgentContext"
    return isinstance(annotation, type) and any(base.__name__ == "AgentContext" for base in annotation.__mro__)


class AppHooks(Protocol):
    @property
    def everywhere(self) -> bool:
        """Whether a hook or callback runs without being named by the task."""
        ...

    def of_ends_agent(self, app: str, /) -> AgentDefinition:
        """Return the agent that runs the hooks of tasks that ended without completion."""
        ...

    def ended_task(self, input: bytes, /) -> str:
        """Return the id of the ended task in this input of that agent."""
        ...

    def of_run(
        self, run: Run, /, *, of_end: bool, retry: RetryPolicy, entry: Callable[[], str], failed: Callable[[str], None]
    ) -> RunHooks:
        """Return the hooks of one run; `of_end`: it is a run of the agent for ended tasks.

        `entry` returns the id of the current delivery. `failed` gets the point of each failed execution.
        """
        ...


NO_VERSION = "0"
"""The version of an app that gives none."""


class DeclaredApp(Protocol):
    """What turns need from an app."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def agents(self) -> Mapping[str, AgentDefinition]: ...

    @property
    def tools(self) -> Mapping[str, Tool]: ...

    @property
    def functions(self) -> Functions: ...

    @property
    def hooks(self) -> AppHooks: ...
