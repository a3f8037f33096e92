"""Agents whose handlers are selected by the type of a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

from weft.errors import ConfigurationError
from weft.runtime import (
    AgentId,
    AgentInstantiationContext,
    CancellationToken,
    CantHandleException,
    ClosureAgent,
    MessageContext,
    RoutedAgent,
    event,
    message_handler,
    rpc,
)


class Typed(TypedDict):
    a: int


@dataclass
class Inner:
    number: int


@dataclass
class Left:
    number: int


@dataclass
class Right:
    number: int


@dataclass
class Deeper(Inner):
    extra: str = "kept?"


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
