"""The testing kit: time that tests move, fakes, assertions and kills."""

from __future__ import annotations

import time

import pytest

from tests.integration.testing.kit import app as app
from tests.integration.testing.kit import send, sent
from weft.errors import ConfigurationError, InvalidInput
from weft.testing import AppTest, ToolCall


async def test_advance_fires_timers_in_order_without_waiting(weft_app: AppTest) -> None:
    fake = weft_app.override(send, lambda text: f"fake {text}")
    began = time.monotonic()
    task = await weft_app.submit("reminder", "tea")
    await weft_app.clock.advance(hours=23)
    assert fake.calls == []
    await weft_app.clock.advance(hours=2)
    assert fake.calls == [{"text": "first tea"}]
    await weft_app.clock.advance(days=3)
    assert await weft_app.assert_completed(task) == "fake last tea"
    assert time.monotonic() - began < 20
    assert sent == []
    await weft_app.assert_deterministic(task)


async def test_a_task_that_waits_is_named_with_the_remedy(weft_app: AppTest) -> None:
    task = await weft_app.submit("reminder", "tea")
    with pytest.raises(AssertionError, match=r"clock\.advance\(seconds=86"):
        await weft_app.assert_completed(task)


async def test_a_failed_task_shows_its_error_and_its_line(weft_app: AppTest) -> None:
    task = await weft_app.submit("broken", "x")
    with pytest.raises(AssertionError, match=r"(?s)ZeroDivisionError: by zero.*kit\.py"):
        await weft_app.assert_completed(task)


async def test_a_script_answers_for_the_model(weft_app: AppTest) -> None:
    fake = weft_app.override("send", lambda text: "ok")
    model = weft_app.script_model(ToolCall("send", text="hello"), "done")
    task = await weft_app.submit("assistant", "say hello")
    assert await weft_app.assert_completed(task) == "done"
    assert fake.calls == [{"text": "hello"}]
    assert len(model.requests) == 2


async def test_a_test_answers_the_questions_of_a_task(weft_app: AppTest) -> None:
    task = await weft_app.submit("asks")
    with pytest.raises(AssertionError, match="has no open question"):
        await weft_app.answer(task, "plain")
    await weft_app.clock.advance(days=3)
    assert await weft_app.answer(task, "plain") == "which tone?"
    with pytest.raises(InvalidInput, match="verdict"):
        await weft_app.answer(task, "perhaps")
    assert await weft_app.answer(task, False) == "send?"
    assert await weft_app.assert_completed(task) == "denied"


async def test_code_that_is_not_deterministic_is_named(weft_app: AppTest) -> None:
    task = await weft_app.submit("moody", "x")
    await weft_app.assert_completed(task)
    with pytest.raises(AssertionError, match="not deterministic: step"):
        await weft_app.assert_deterministic(task)


async def test_mistakes_of_a_test_are_named(weft_app: AppTest) -> None:
    with pytest.raises(ConfigurationError, match="declares send"):
        weft_app.override("sned", lambda: None)
    with pytest.raises(ConfigurationError, match="declares no agent 'remind'"):
        await weft_app.kill_and_recover("remind")
    with pytest.raises(InvalidInput, match="cannot go back"):
        await weft_app.clock.advance(days=-1)
