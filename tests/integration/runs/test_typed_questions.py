"""Questions with a type: what they show, which answers fit, and what the code gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput
from runtime_core.host.local import LocalApp
from runtime_core.runs.effects import Question
from tests.integration.runs.test_humans import asked
from tests.unit.runs.run_world import Program, World
from weft import AgentContext, App, RetryPolicy
from weft.hooks import Change, HookEvent


class Trip(BaseModel):
    """A pydantic model with a rule that no schema can have."""

    city: str
    days: int = Field(ge=1)

    @field_validator("city")
    @classmethod
    def is_capitalized(cls, city: str) -> str:
        if not city.istitle():
            raise ValueError("begin with a capital letter")
        return city


@dataclass
class Seat:
    row: int
    day: date


def asking(hint: object, **terms: Any) -> App:  # Any: terms of ctx.human
    app = App("typed")

    @app.agent("asks", retry=RetryPolicy(attempts=1))
    async def asks(ctx: AgentContext) -> list[str]:
        try:
            answer = await ctx.human("Where?", type=hint, **terms)
        except InvalidInput as error:
            return ["refused", str(error)]
        return [type(answer).__name__, repr(answer)]

    return app


@pytest.mark.parametrize(
    ("hint", "wrong", "field", "right", "output"),
    [
        (Trip, {"city": "Rome", "days": 0}, "value.days", {"city": "Rome", "days": 2}, "Trip(city='Rome', days=2)"),
        (
            Seat,
            {"row": "3"},
            "value.day",
            {"row": 3, "day": "2030-01-04"},
            "Seat(row=3, day=datetime.date(2030, 1, 4))",
        ),
        (list[Seat], [{"row": 1, "day": "soon"}], "value.0.day", [], "[]"),
        (int, True, "value", 7, "7"),
        (Literal["a", "b"], "c", "value", "b", "'b'"),
        (Annotated[int, Field(le=9)], 10, "value", 9, "9"),
        (Trip | None, 1, "value", None, "None"),
    ],
)
async def test_the_code_gets_the_type_and_other_answers_are_refused(
    hint: object, wrong: object, field: str, right: object, output: str
) -> None:
    async with LocalApp(asking(hint)) as client:
        task = await client.submit("asks")
        request = await asked(task)
        with pytest.raises(InvalidInput) as refused:
            await task.signal(request, wrong)
        assert refused.value.field == field
        await task.signal(request, right)
        assert (await task.result(timeout=60)).value()[1] == output


async def test_an_answer_that_only_the_code_can_refuse_reaches_the_code_as_an_error() -> None:
    async with LocalApp(asking(Trip)) as client:
        task = await client.submit("asks")
        await task.signal(await asked(task), {"city": "rome", "days": 2})
        said, problem = (await task.result(timeout=60)).value()
    assert said == "refused"
    assert problem.startswith("answer.city: ")
    assert "begin with a capital letter" in problem


async def test_a_hook_sees_json_and_what_it_changes_has_the_type_again() -> None:
    seen: list[object] = []
    app = asking(Seat)

    @app.hook("human_answered", always=True)
    def moves(event: HookEvent) -> Change:
        seen.append(event.payload)
        return Change({**event.payload, "row": 9})

    async with LocalApp(app) as client:
        task = await client.submit("asks")
        request = await asked(task)
        with pytest.raises(InvalidInput, match=r"value\.row"):
            await task.signal(request, {"row": None, "day": "2030-01-04"})
        await task.signal(request, {"row": 3, "day": "2030-01-04"})
        assert (await task.result(timeout=60)).value()[1] == "Seat(row=9, day=datetime.date(2030, 1, 4))"
    assert seen == [{"row": 3, "day": "2030-01-04"}]


async def test_at_the_deadline_the_default_has_the_type() -> None:
    default = Seat(1, date(2030, 1, 4))
    async with LocalApp(asking(Seat, default=default, timeout=timedelta(milliseconds=1))) as client:
        assert (await (await client.submit("asks")).result(timeout=60)).value()[1] == repr(default)


class Unreadable:
    """No JSON is read as this."""


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"type": Trip, "default": {"city": "Rome"}}, "default of ctx.human.days: is missing"),
        ({"type": Seat, "default": None}, "default of ctx.human: "),
        ({"type": Unreadable}, "a value of type Unreadable cannot be read from JSON"),
        ({"type": Callable[[], int]}, "have no JSON schema"),
    ],
)
async def test_a_question_that_no_answer_fits_fails_at_once(terms: dict[str, Any], message: str) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.human("Where?", **terms)

    ended = await World().turn(Program(code))
    assert message in str(ended)


def questions(turn: Any) -> list[Question]:  # Any: a turn's result
    return [each for each in turn.requests if isinstance(each, Question)]


@dataclass
class Said:
    """What the world of these runs answers."""

    of: str
    got: object


async def test_the_type_is_part_of_the_code_and_not_of_the_journal() -> None:
    """Code with another type, or without one, continues with the answer that the code before has asked for."""
    got: list[object] = []

    async def turn(world: World, **terms: Any) -> Any:  # Any: terms of ctx.human, and a suspended turn
        async def code(ctx: AgentContext, _: object) -> object:
            got.append(await ctx.human("Which row?", **terms))
            return await ctx.tool("books")

        result = await world.turn(Program(code))
        assert world.run is not None, result
        await world.run.aclose()
        world.run = None
        return result

    world = World()
    [plain] = questions(await turn(World()))
    [typed] = questions(await turn(world, type=Said))
    assert typed.digest == plain.digest
    assert (json.loads(typed.schema)["required"], plain.schema) == (["of", "got"], b"")
    world.answer_one()
    for terms in ({"type": Said}, {"type": dict[str, object]}, {}):
        result = await turn(World(journal=dict(world.journal)), **terms)
        assert [call.name for call in result.requests] == ["books"]
    given = {"of": "Which row?", "got": None}
    assert got == [Said("Which row?", None), given, given]


async def test_a_question_without_a_type_is_answered_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    original = EventBus.call

    async def noted(bus: EventBus, function: str, *arguments: Any) -> Any:  # Any: as EventBus.call
        if function == "signal":
            calls.append(arguments)
        return await original(bus, function, *arguments)

    monkeypatch.setattr(EventBus, "call", noted)
    for hint, count in ((None, 1), (int, 2)):
        calls.clear()
        async with LocalApp(asking(hint)) as client:
            task = await client.submit("asks")
            async for event in task.stream():
                if event.type == "weft.human.requested":
                    assert ("schema" in event.data) is (hint is not None)
                    await event.answer(5)
            assert (await task.result(timeout=60)).value() == ["int", "5"]
        assert len(calls) == count
        assert calls[0][2] == b"5"
