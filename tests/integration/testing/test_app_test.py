"""The testing kit: time that tests move, fakes, assertions and kills."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import timedelta

import pytest

from runtime_core.bus.event_bus import EventBus
from weft import AgentContext, App, LLMAgent, ToolContext
from weft.errors import ConfigurationError, InvalidInput
from weft.testing import AppTest, ToolCall

app = App("kit")
sent: list[str] = []


@app.tool
async def send(ctx: ToolContext, text: str) -> str:
    sent.append(text)
    return f"sent {text}"


@app.agent("reminder")
async def reminder(ctx: AgentContext, text: str) -> str:
    await ctx.sleep(timedelta(days=1))
    await ctx.tool(send, text=f"first {text}")
    await ctx.sleep(timedelta(days=2))
    answer: str = await ctx.human("again?", timeout=3600, default="no")
    await ctx.emit(answer)
    return await ctx.tool(send, text=f"last {text}")


@app.agent("two_steps")
async def two_steps(ctx: AgentContext, text: str) -> list[str]:
    await ctx.emit("begin")
    first = await ctx.tool(send, text=text)
    noted = await ctx.step(lambda: "noted")
    return [first, noted, await ctx.agent("inner", text)]


@app.agent("inner")
async def inner(ctx: AgentContext, text: str) -> str:
    return text.upper()


@app.agent("asks")
async def asks(ctx: AgentContext) -> str:
    await ctx.sleep(timedelta(days=3))
    tone: str = await ctx.human("which tone?")
    approval = await ctx.approve("send?", data=tone, timeout=3600)
    return await ctx.tool(send, text=tone) if approval.approved else "denied"


@app.agent("naps")
async def naps(ctx: AgentContext) -> str:
    await ctx.sleep(0.01)
    return await ctx.tool(send, text="rested")


@app.agent("listens")
async def listens(ctx: AgentContext) -> str:
    heard: str = await ctx.receive("news")
    return heard


@app.agent("broken")
async def broken(ctx: AgentContext, text: str) -> str:
    raise ZeroDivisionError("by zero")


flips = itertools.cycle(["a", "b"])


@app.agent("moody")
async def moody(ctx: AgentContext, text: str) -> str:
    return await ctx.tool(send, text=next(flips))


app.add_agent("assistant", LLMAgent("openai-chat:none", tools=[send]))


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
    with pytest.raises(AssertionError, match=r"(?s)ZeroDivisionError: by zero.*test_app_test\.py"):
        await weft_app.assert_completed(task)


async def test_a_script_answers_for_the_model(weft_app: AppTest) -> None:
    fake = weft_app.override("send", lambda text: "ok")
    model = weft_app.script_model(ToolCall("send", text="hello"), "done")
    task = await weft_app.submit("assistant", "say hello")
    assert await weft_app.assert_completed(task) == "done"
    assert fake.calls == [{"text": "hello"}]
    assert len(model.requests) == 2


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


def test_the_plugin_names_what_a_test_lacks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_lacking="async def test_without_an_app(weft_app): ...",
        test_plain="from weft import App\napp = App('a')\ndef test_not_async(weft_app): ...",
        test_own="async def test_any_async_test_runs(tmp_path): assert tmp_path.is_dir()",
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*has no app to test: import it*", "*write it as `async def`*"], consecutive=False)


def test_the_ini_option_names_the_app(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nweft_app = desk:app\n")
    pytester.makepyfile(
        desk="from weft import App\napp = App('desk')\n@app.agent('echo')\nasync def echo(ctx, text: str): return text",
        test_desk="async def test_echo(weft_app):\n"
        "    assert await weft_app.assert_completed(await weft_app.submit('echo', 'x')) == 'x'",
    )
    pytester.runpytest_subprocess("-p", "no:asyncio").assert_outcomes(passed=1)


def test_a_failure_of_the_kit_shows_the_line_of_the_test_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from weft import App\napp = App('desk')\n"
        "@app.agent('asks')\nasync def asks(ctx): return await ctx.human('tone?')\n"
        "async def test_end(weft_app):\n    await weft_app.assert_completed(await weft_app.submit('asks'))\n"
        "async def test_kill(weft_app):\n    await weft_app.kill_and_recover('asks')\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*waits for an answer without a deadline*", "*waits for a person*"], consecutive=False)
    result.stdout.no_fnmatch_line("*app_test.py:*")
    result.stdout.no_fnmatch_line("*crashes.py:*")
