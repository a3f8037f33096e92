"""Declared functions: which callables they may be, and results of the declared type."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from runtime_core.errors import ConfigurationError, InvalidResult
from tests.unit.declare.calls import Call, declared


@dataclasses.dataclass
class Passage:
    title: str
    score: float = 0.0


async def test_methods_partials_wrappers_and_callable_objects_are_tools(call: Call) -> None:
    class Counter:
        async def add(self, n: int) -> int:
            return n + 1

        def __call__(self, n: int) -> int:
            return n + 2

    def add(n: int, m: int) -> int:
        return n + m

    async def plain(n: int) -> int:
        return n + 4

    @functools.wraps(plain)
    def wrapper(*args: int, **kwargs: int) -> object:
        return plain(*args, **kwargs)

    assert await call(Counter().add, n=1) == 2
    assert await call(Counter(), n=1) == 3
    assert await call(functools.partial(add, m=3), n=1) == 4
    assert await call(wrapper, n=1) == 5


class Price(TypedDict):
    item: str
    cents: int


@dataclasses.dataclass
class Line:
    item: str
    cents: int


class Narrow(BaseModel, extra="forbid"):
    at: int = Field(serialization_alias="where")


@dataclasses.dataclass
class Halved:
    whole: dataclasses.InitVar[int]
    half: int = 0

    def __post_init__(self, whole: int) -> None:
        self.half = whole // 2


@dataclasses.dataclass
class Picky:
    word: str

    def __post_init__(self) -> None:
        if not isinstance(self.word, str) or len(self.word) > 3:
            raise KeyError(self.word)  # not an error that pydantic reports as its own


class Shape(Enum):
    SQUARE = (1, 1)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("declared", "result", "message"),
    [
        (int, "x", "result: Input should be a valid integer"),
        (int, True, "result: Input should be a valid integer"),
        (int, "3", "result: Input should be a valid integer"),
        (Price, {"item": "tea", "cent": 3}, "result.cents: is missing; there is 'cent'"),
        (list[Price], [{"item": "tea", "cents": "x"}], "result.0.cents: "),
        (dict[str, int], {"a": None}, "result.a: "),
        (str | None, 3, "result: "),
        (Literal["a", "b"], "c", "result: "),
        (None, 3, "result: "),
        (list[Decimal], ["x"], "result.0: Input should be a valid decimal"),
        (Passage, {"other": "class"}, "result.title: is missing"),
        (Line, {"item": "tea", "cents": "x"}, "result.cents: "),
        (Line, Line("tea", "x"), "result.cents: "),  # type: ignore[arg-type]  # no dataclass checks its fields itself
        (list[Line], [Line("tea", 3), {"item": "tea"}], "result.1.cents: is missing"),
        (Narrow, Line("tea", 3), "result.at: is missing"),
        (Picky, {"word": "long"}, "result: its JSON cannot be read as the type, KeyError: 'long'"),
    ],
    ids=str,
)
async def test_a_result_has_the_declared_type(call: Call, declared: object, result: object, message: str) -> None:
    def it():  # type: ignore[no-untyped-def]  # its type is set below
        return result

    it.__annotations__["return"] = declared
    with pytest.raises(InvalidResult) as refused:
        await call(it)
    assert str(refused.value).startswith(message)
    assert "; it does not fit the return type of tool 'it': correct the result or the type" in str(refused.value)


@pytest.mark.parametrize(
    ("declared", "result"),
    [
        (int, 3),
        (float, 3),
        (Price, {"item": "tea", "cents": 3}),
        (list[str], ("a", "b")),
        (dict[str, object], {"a": object.__name__}),
        (str | None, None),
        (str, uuid.UUID(int=1)),
        (object, "x"),
        (list[Decimal], [Decimal("1.5")]),
        (Passage, {"title": "a dict that fits"}),
        (Line, Line("tea", 3)),
        (Line | None, None),
        (Narrow, Narrow(at=3)),
        (list[Narrow], [Narrow(at=3)]),  # it writes other JSON than it reads
        (dict[str, Narrow] | None, {"a": Narrow(at=3)}),
        (Halved, Halved(4)),
        (Shape, Shape.SQUARE),
        (list[Shape], [Shape.SQUARE]),
        (tuple[date, uuid.UUID], (date(2025, 1, 2), uuid.UUID(int=1))),
        (Opaque, "JSON cannot tell"),
    ],
    ids=str,
)
async def test_a_result_that_fits_is_kept(call: Call, declared: object, result: object) -> None:
    def it():  # type: ignore[no-untyped-def]  # its type is set below
        return result

    it.__annotations__["return"] = declared
    await call(it)


def _opaque(thing: Opaque) -> None: ...


def _field_default(limit: int = Field(3)) -> None: ...


def _unknown_type(thing: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # what is to be caught


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_opaque, r"tool 'it', argument 'thing' \(.*test_function\.py:\d+\): a value of type Opaque cannot be read"),
        (_field_default, r"argument 'limit' has Field\(…\) as its default"),
        (_unknown_type, r"the type of 'thing' cannot be evaluated, NameError: name 'Nowhere' is not defined"),
    ],
)
def test_types_that_json_cannot_give_are_refused_by_check(function: Callable[..., object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        declared(function)

    assert "\n" not in str(refused.value)
