"""Limits of a task, the model's window, and what a crash may cost."""

from __future__ import annotations

import pytest

from runtime_core.llm.model_call import ask_model
from runtime_core.llm.tokens import KeepRecent, Message, Price, Summarise, estimate_tokens, said
from tests.integration.llm.asking import WAIT, app_of, asked, asker, failure
from tests.openai_server.driver import OpenAIServer, Usage, When, answer, failing, gated
from weft import AgentContext, App, SubmitOptions
from weft.testing import LocalApp

INPUT = estimate_tokens([said("Say something")])


async def test_a_limit_shortens_the_answer_and_ends_the_task_at_last(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("Cut off", finish_reason="length", usage=Usage(input=10, output=50)))
    async with LocalApp(app_of(asker(openai_server))) as client:
        answered = await asked(client, options=SubmitOptions(max_tokens=INPUT + 50))
        assert answered["text"] == "Cut off"
        assert openai_server.request(1)["max_completion_tokens"] == 50
        kind, message = await failure(client, options=SubmitOptions(max_tokens=INPUT + 15))
        assert kind == "LimitExceeded"
        assert "max_tokens" in message
        await asked(client)
    requests = [openai_server.request(entry.number) for entry in openai_server.ledger()]
    assert len(requests) == 2, "the one that could not fit was not made"
    assert "max_completion_tokens" not in requests[1], "without a limit the model decides"


async def test_a_cost_limit_shortens_the_answer_too(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("Short"))
    price = Price(input=1.0, output=1_000.0)
    async with LocalApp(app_of(asker(openai_server, prices={"gpt-test": price}))) as client:
        await asked(client, options=SubmitOptions(max_cost=price.cost(INPUT, 100)))
        kind, _ = await failure(client, options=SubmitOptions(max_cost=price.cost(INPUT, 10)))
    assert openai_server.request(1)["max_completion_tokens"] == pytest.approx(100, abs=1)
    assert kind == "LimitExceeded"


async def test_calls_that_exceed_the_limit_together_wait_for_each_other(openai_server: OpenAIServer) -> None:
    """Each may use most of the limit: the second is sent when the first has returned what it did not use."""
    first = answer("One", when=When(user="first"), usage=Usage(input=5, output=5))
    openai_server.play(gated(first, "one", headers=False), answer("Two"))
    app = App("asking")
    agent = asker(openai_server, settings={"max_tokens": 100})

    @app.agent("asker")
    async def asks(ctx: AgentContext) -> list[str]:
        async def ask(prompt: str) -> str:
            return (await ask_model(ctx, agent.model, [said(prompt)], name=prompt)).text or ""

        return list(await ctx.gather(ask("first"), ask("second")))

    async with LocalApp(app) as client:
        task = await client.submit("asker", None, options=SubmitOptions(max_tokens=INPUT + 105))
        await openai_server.waits("one")
        openai_server.release("one")
        assert (await task.result(timeout=WAIT)).value() == ["One", "Two"]
    one, two = openai_server.ledger()
    assert one.ended is not None
    assert two.at >= one.ended, "else both would have been under way at once"


async def test_a_request_that_is_too_long_is_shortened_once(openai_server: OpenAIServer) -> None:
    long = failing(400, code="context_length_exceeded", when=When(user_messages=6))
    openai_server.play(long, answer("Right."))
    conversation = _conversation(6)
    agent = asker(openai_server, window=KeepRecent(max_tokens=100_000, keep_first=0))
    async with LocalApp(app_of(agent)) as client:
        answered = await asked(client, {"history": conversation})
        assert answered["text"] == "Right."
        openai_server.play(failing(400, code="context_length_exceeded"))
        kind, _ = await failure(client, {"history": conversation})
    assert kind == "ContextTooLong"
    first, second, *rest = openai_server.ledger()
    assert second.messages < first.messages
    assert len(rest) == 2, "once, and no more"


async def test_a_summary_is_written_once_and_kept_for_later_tasks(openai_server: OpenAIServer) -> None:
    openai_server.play(
        answer("They spoke of Bern.", when=When(user="Summarise")),
        answer("As you said.", when=When(first_user="They spoke of Bern.")),
    )
    window = Summarise(max_tokens=300, keep_tokens=80)
    app = App("asking")

    @app.agent("asker")
    async def asks(ctx: AgentContext, turns: int) -> list[str | None]:
        model = asker(openai_server, window=window).model
        counts = (turns, turns + 1)
        return [(await ask_model(ctx, model, _conversation(count), name=f"{count}")).text for count in counts]

    async with LocalApp(app) as client:
        for turns in (8, 9):
            task = await client.submit("asker", turns, key="one")
            answers = (await task.result(timeout=WAIT)).value()
            assert answers == ["As you said."] * 2
    asked_for = [openai_server.request(entry.number)["messages"] for entry in openai_server.ledger()]
    summaries = [messages for messages in asked_for if "Summarise" in messages[-1]["content"]]
    assert len(summaries) == 1
    assert "user: question 0" in summaries[0][-1]["content"]
    assert all(len(messages) < 12 for messages in asked_for), "the whole of it has at least 15"


def _conversation(turns: int) -> list[Message]:
    messages: list[Message] = []
    for number in range(turns):
        messages.append(said(f"question {number} " + "about Bern " * 5))
        messages.append({"kind": "response", "parts": [{"part_kind": "text", "content": f"answer {number}"}]})
    return messages[:-1]
