"""Kills at each commit of a task: its effects stay the same, or the difference is named."""

from __future__ import annotations

import asyncio
import time

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.integration.testing.kit import app as app
from weft.testing import AppTest


async def test_effects_are_the_same_wherever_the_process_dies(weft_app: AppTest) -> None:
    report = await weft_app.kill_and_recover("two_steps", "x")
    assert report.whole.output == ["sent x", "noted", "X"]
    assert len(report.killed) == 2 * len(report.whole.commits)
    assert len(report.repeated) == 1
    [(_, [(name, _)])] = report.repeated.items()
    assert name == "send"


async def test_a_timer_that_fires_by_itself_is_no_message_that_nobody_sends(
    weft_app: AppTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = EventBus.timers

    async def late(bus: EventBus) -> list[tuple[str, int]]:
        while await timers(bus):
            await asyncio.sleep(0)
        return []

    monkeypatch.setattr(EventBus, "timers", late)
    report = await weft_app.kill_and_recover("naps")
    assert (report.whole.output, len(report.killed)) == ("sent rested", 8)


async def test_a_kill_is_tested_with_sleeps_and_questions(weft_app: AppTest) -> None:
    report = await weft_app.kill_and_recover("asks", answer=lambda prompt: "plain" if "tone" in prompt else True)
    assert report.whole.output == "sent plain"
    assert len(report.killed) >= 6


@pytest.mark.parametrize(
    ("agent", "names"),
    [("asks", "asks 'which tone.' and waits for a person: .*answer="), ("listens", "waits for a message")],
)
async def test_a_kill_names_what_the_task_waits_for(weft_app: AppTest, agent: str, names: str) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=names):
        await weft_app.kill_and_recover(agent)
    assert time.monotonic() - began < 30


async def test_a_kill_finds_an_agent_that_is_not_deterministic(weft_app: AppTest) -> None:
    with pytest.raises(AssertionError, match="other effects after a kill"):
        await weft_app.kill_and_recover("moody", "x")
