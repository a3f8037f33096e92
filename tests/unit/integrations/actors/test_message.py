"""Messages and errors survive the transport; handlers are selected by type."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import pytest
from pydantic import BaseModel

from runtime_core.integrations.actors.errors import Failures, text_of
from runtime_core.integrations.actors.message import content_of, decode_response, encode_response, message_of
from runtime_core.integrations.actors.serialization import JsonSerializer, SerializationRegistry
from weft.errors import ConfigurationError
from weft.runtime import (
    AgentId,
    AgentInstantiationContext,
    CancellationToken,
    CantHandleException,
    ClosureAgent,
    MessageContext,
    RemoteError,
    RoutedAgent,
    SerializationError,
    UnknownPayload,
    event,
    message_handler,
    rpc,
)


@dataclass
class Inner:
    number: int


@dataclass
class Outer:
    inner: Inner
    more: list[Inner] = field(default_factory=list)
    raw: bytes = b""
    choice: Inner | str | None = None


class Model(BaseModel):
    inner: Inner
    name: str = ""


class Typed(TypedDict):
    a: int


@dataclass
class Left:
    number: int


@dataclass
class Right:
    number: int


@dataclass
class Either:
    side: Left | Right


@dataclass
class Tagged:
    number: int
    kind: Literal["tagged"] = "tagged"


@dataclass
class Loose:
    anything: Any


@dataclass
class Measure:
    value: float


@dataclass
class Deeper(Inner):
    extra: str = "kept?"


@pytest.mark.parametrize(
    "message",
    [
        Outer(Inner(1), [Inner(2), Inner(3)], b"\x00text", Inner(4)),
        Outer(Inner(1), choice="text"),
        Model(inner=Inner(5), name="ü\n"),
        Either(Left(1)),
        Loose({"plain": [1, None, "x"]}),
        "text",
        7,
        1.5,
        math.inf,
        True,
        b"\xff\x00",
        [1, "two", None],
        {"a": [1]},
    ],
)
def test_a_message_survives_a_round_trip(message: object) -> None:
    writer, reader = SerializationRegistry(), SerializationRegistry()
    back = message_of(content_of(message, writer), reader)
    assert back == message
    assert type(back) is type(message)


@pytest.mark.parametrize(
    "message", [Either(Right(1)), Loose(Inner(1)), Outer(Deeper(1)), Loose((1, 2)), Measure(math.nan)]
)
def test_a_message_that_would_change_its_type_is_refused(message: object) -> None:
    with pytest.raises(SerializationError, match=type(message).__name__):
        content_of(message, SerializationRegistry())


def test_a_class_without_a_serializer_is_named_with_the_remedy() -> None:
    with pytest.raises(SerializationError, match=r"object has no serializer: .*add_message_serializer"):
        content_of(object(), SerializationRegistry())


def test_classes_of_one_name_in_two_modules_do_not_mix() -> None:
    other = type("Inner", (Inner,), {"__module__": "elsewhere", "__qualname__": "Inner"})
    registry = SerializationRegistry()
    registry.add_class(Inner)
    registry.add_class(other)
    back = message_of(content_of(Inner(1), registry), registry)
    assert type(back) is Inner


def test_a_message_of_an_unknown_type_arrives_as_it_is() -> None:
    content = content_of(Inner(1), SerializationRegistry())
    content.message_type = "a.module.that.nobody.has"
    assert message_of(content, SerializationRegistry()) == UnknownPayload(
        "a.module.that.nobody.has", "application/json", b'{"number":1}'
    )


def test_no_module_is_imported_for_a_name_in_a_message() -> None:
    content = content_of(Inner(1), SerializationRegistry())
    content.message_type = "this.s"
    sys.modules.pop("this", None)
    assert isinstance(message_of(content, SerializationRegistry()), UnknownPayload)
    assert "this" not in sys.modules


class _Upper:
    """A custom serializer with its own content type."""

    data_content_type = "text/plain"
    type_name = f"{__name__}.Inner"

    def serialize(self, message: Inner) -> bytes:
        return f"number {message.number}".encode()

    def deserialize(self, payload: bytes) -> Inner:
        return Inner(int(payload.split()[1]))


def test_a_users_serializer_has_precedence() -> None:
    registry = SerializationRegistry()
    registry.add_serializer(_Upper())
    content = content_of(Inner(7), registry)
    assert content.content_type == "text/plain"
    assert message_of(content, registry) == Inner(7)
    content.payload_base64 = "bm8="
    with pytest.raises(SerializationError, match="Inner"):
        message_of(content, registry)


def test_no_response_is_null() -> None:
    assert encode_response(None, SerializationRegistry()) == b"null"
    assert decode_response(b"null", SerializationRegistry()) is None


def test_a_wrong_payload_names_the_type() -> None:
    with pytest.raises(SerializationError, match="Inner"):
        JsonSerializer(Inner).deserialize(b'{"number":"no"}')


# -- errors ----------------------------------------------------------------------------------------------------


class Awkward(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")


@pytest.mark.parametrize("error", [ValueError("text"), ValueError(), KeyError("k"), Awkward(3, why="so")])
def test_an_error_is_recreated_with_its_class(error: Exception) -> None:
    sent = Failures().name(error), text_of(error)
    back = Failures().error(*sent)
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_an_error_of_a_class_made_in_a_function_comes_back_where_it_was_seen() -> None:
    class Local(Exception):
        pass

    failures = Failures()
    assert type(failures.error(failures.name(Local("x")), "x")) is Local


@pytest.mark.parametrize("name", ["no.such.Error", "builtins.int", "int", "SystemExit", "os.system"])
def test_any_other_name_gives_an_error_that_keeps_it(name: str) -> None:
    error = Failures().error(name, "why")
    assert isinstance(error, RemoteError)
    assert (error.type, error.message) == (name, "why")


# -- handlers --------------------------------------------------------------------------------------------------


def context(*, is_rpc: bool = True) -> MessageContext:
    return MessageContext(None, None, is_rpc, CancellationToken(), "m")


class Routed(RoutedAgent):
    def __init__(self) -> None:
        super().__init__("routes")

    @message_handler(match=lambda message, ctx: message.number > 10)
    async def a_large(self, message: Left, ctx: MessageContext) -> str:
        return "large"

    @message_handler
    async def b_union(self, message: Left | Right, ctx: MessageContext) -> str:
        return "union"

    @event
    async def c_event(self, message: Inner, ctx: MessageContext) -> None:
        return None

    @rpc
    async def d_rpc(self, message: Inner, ctx: MessageContext) -> str:
        return "rpc"

    @rpc
    async def e_typed(self, message: Typed, ctx: MessageContext) -> str:
        return "typed"

    @rpc
    async def f_lies(self, message: str, ctx: MessageContext) -> int:
        return message  # type: ignore[return-value]  # the lie

    @message_handler(strict=False)
    async def g_lies_loosely(self, message: float, ctx: MessageContext) -> int:
        return message  # type: ignore[return-value]  # the lie


def routed() -> Routed:
    # Its runtime is not used by handlers that ask nobody.
    with AgentInstantiationContext.populate_context((None, AgentId("routed", "x"))):  # type: ignore[arg-type]
        return Routed()


@pytest.mark.parametrize(
    ("message", "is_rpc", "result"),
    [
        (Left(11), True, "large"),
        (Left(1), True, "union"),
        (Right(99), False, "union"),
        (Inner(1), True, "rpc"),
        (Inner(1), False, None),
        (Deeper(1), True, "rpc"),
        ({"a": 1}, True, "typed"),
        (b"nobody takes these", True, None),
        (1.5, True, 1.5),
    ],
)
async def test_the_handler_is_picked_by_type_kind_and_match(message: object, is_rpc: bool, result: object) -> None:
    assert await routed().on_message(message, context(is_rpc=is_rpc)) == result


async def test_a_result_of_another_type_than_annotated_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"f_lies returns int, not str"):
        await routed().on_message("text", context())


async def test_a_handler_called_with_another_type_refuses_it() -> None:
    with pytest.raises(CantHandleException, match="takes str, not int"):
        await routed().f_lies(5, context())  # type: ignore[arg-type]  # the mistake


def test_a_subclass_has_its_own_handlers_and_its_parents() -> None:
    class More(Routed):
        @message_handler
        async def on_bytes(self, message: bytes, ctx: MessageContext) -> None: ...

    assert set(More.handled_types()) == {*Routed.handled_types(), bytes}


async def _unannotated(self, message, ctx: MessageContext) -> None:  # type: ignore[no-untyped-def]
    ...


async def _two_arguments(self: object, message: int) -> None: ...


def _not_async(self: object, message: int, ctx: MessageContext) -> None: ...


@pytest.mark.parametrize("method", [_unannotated, _two_arguments, _not_async])
@pytest.mark.parametrize("decorate", [message_handler, event, rpc])
def test_a_handler_that_cannot_work_is_refused_where_it_is_declared(
    method: Callable[..., Any], decorate: Callable[[Any], Any]
) -> None:
    with pytest.raises(ConfigurationError, match=method.__name__):
        decorate(method)


def test_a_closure_agent_is_made_by_its_runtime_only() -> None:
    async def closure(agent: Any, message: int, ctx: MessageContext) -> None: ...

    with pytest.raises(RuntimeError, match="register_closure"):
        ClosureAgent("x", closure)
