"""Structured output: what the model is shown, and how its answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, Field

# pydantic reads the TypedDict of the standard library only from Python 3.12 on.
from typing_extensions import TypedDict

from runtime_core.declare.declaration import Place
from runtime_core.errors import ConfigurationError
from runtime_core.llm.output import Output, OutputInvalid

HERE = Place("here.py", 1)


class Report(BaseModel):
    """A report on a city."""

    city: str
    year: int = Field(ge=1900)
    written: date


@dataclass
class Point:
    x: int
    y: int = 0


class Row(TypedDict):
    name: str


def output(declared: object) -> Output:
    return Output("agent 'a'", declared, "tool", HERE)


@pytest.mark.parametrize(
    ("declared", "given", "read"),
    [
        (Report, {"city": "Bern", "year": 2024, "written": "2024-05-01"}, ...),
        (Point, {"x": 1}, {"x": 1, "y": 0}),
        (Row, {"name": "a"}, ...),
        (list[Row], {"response": [{"name": "a"}]}, [{"name": "a"}]),
        (list[int], [1, 2], [1, 2]),
        (int, {"response": 3}, 3),
        (str | None, {"response": None}, None),
        (dict[str, int], {"a": 1}, {"a": 1}),
    ],
)
def test_an_answer_is_read_by_its_type(declared: object, given: Any, read: Any) -> None:
    assert output(declared).read(given) == (given if read is ... else read)


@pytest.mark.parametrize("declared", [Report, Point, Row, list[Row], int, str | None])
def test_the_schema_is_always_that_of_an_object(declared: object) -> None:
    schema = output(declared).spec.schema
    assert schema["type"] == "object"
    assert "$defs" not in schema.get("properties", {}).get("response", {})  # type: ignore[attr-defined]  # JSON


def test_the_model_is_told_what_a_type_says_of_itself() -> None:
    assert output(Report).spec.description == "A report on a city."


def test_every_problem_is_named_with_its_place() -> None:
    with pytest.raises(OutputInvalid) as refused:
        output(Report).read({"city": "Bern", "year": 1000})
    problems = refused.value.problems
    assert problems[0] == "output.year: Input should be greater than or equal to 1900, got 1000"
    assert problems[1].startswith("output.written: ")


def test_an_answer_in_text_may_stand_in_a_fence() -> None:
    assert output(Point).read('{"x": 1, "y": 2}') == {"x": 1, "y": 2}
    assert output(Point).read('```json\n{"x": 1, "y": 2}\n```') == {"x": 1, "y": 2}


def test_text_that_is_no_json_is_a_problem() -> None:
    with pytest.raises(OutputInvalid, match="is not JSON"):
        output(Point).read("It is at 1, 2.")


def test_a_type_without_a_schema_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ConfigurationError, match=r"agent 'a' \(here\.py:1\) has output="):
        output(object())
