"""What a provider may do instead of answering: what is retried, and what ends with one clear line."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx2
import pytest

from runtime_core.declare.declaration import RetryPolicy
from runtime_core.llm.model_call import ask_model
from runtime_core.llm.tokens import said
from runtime_core.runs import turn as turn_handler
from runtime_core.telemetry.spans import REQUEST_MODEL
from runtime_core.wire.step import Step
from tests.integration.llm.asking import QUICK, WAIT, app_of, asked, asker, failure, shown
from tests.openai_server.driver import OpenAIServer, Rule, answer, broken, cut, failing, gated, rate_limited
from weft import AgentContext, App, Client
from weft.testing import LocalApp

APIS = ("openai-chat:gpt-test", "openai-responses:gpt-test")

TRANSIENT = {
    "500": failing(500, times=2),
    "503 with retry-after": failing(503, after=0.01, times=2),
    "408": failing(408, times=2),
    "409": failing(409, times=2),
    "429 with seconds": rate_limited(after=1, times=1),
    "429 with milliseconds": rate_limited(after_ms=20, times=2),
    "429 with a date": rate_limited(after=1, date=True, times=1),
    "429 with nothing": rate_limited(times=1),
    "no headers": cut(answer("Wrong."), headers=False, times=2),
    "half an answer": cut(answer("Wrong, and never complete."), after=1, times=2),
    "no JSON": broken("{not JSON", times=2),
    "an empty body": broken("", times=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_transient_errors_are_retried(openai_server: OpenAIServer, api: str, stream: bool) -> None:
    async with LocalApp(app_of(asker(openai_server, api, stream=stream))) as client:
        for name, rule in TRANSIENT.items():
            openai_server.play(rule, answer("Right."))
            before = len(openai_server.ledger())
            answered = await asked(client, f"[{name}] Say something")
            assert answered["text"] == "Right.", name
            assert answered["usage"]["requests"] == 1, f"{name}: what was not answered is not counted"
            entries = openai_server.ledger()[before:]
            assert len(entries) == 1 + (rule.times or 0), name
            assert all(entry.retry in (None, "0") for entry in entries), "the client's library repeats nothing"
    assert openai_server.counts().repeated == 0


@pytest.mark.parametrize(
    ("rule", "seconds"),
    [(rate_limited(after=2, times=1), 2.0), (rate_limited(after_ms=1500, times=1), 1.5)],
    ids=["seconds", "milliseconds"],
)
async def test_the_provider_says_how_long_to_wait(openai_server: OpenAIServer, rule: Rule, seconds: float) -> None:
    openai_server.play(rule, answer("Right."))
    async with LocalApp(app_of(asker(openai_server))) as client:
        await asked(client)
    first, second = openai_server.ledger()
    assert first.ended is not None
    # The broker's clock has milliseconds.
    assert second.at - first.ended >= seconds - 0.002


async def test_a_waiting_call_holds_no_process(openai_server: OpenAIServer) -> None:
    """The run waits for a timer of the broker, as after `ctx.sleep`: the handler holds nothing."""
    openai_server.play(rate_limited(after=600))
    async with (local := LocalApp(app_of(asker(openai_server)))) as client:
        task = await client.submit("asker", "Say something")
        async with asyncio.timeout(WAIT):
            while (await task.show())["status"] != "waiting":
                await asyncio.sleep(0.01)
            assert local._host is not None
            # The task is seen to wait a moment before its turn has left the hands of its consumer.
            while any(consumer.held for consumer in local._host.consumers):
                await asyncio.sleep(0.01)
        await task.cancel()
        assert (await task.result(timeout=WAIT)).status == "cancelled"
    assert len(openai_server.ledger()) == 1


FINAL = [
    (failing(401), "WrongKey", "HTTP 401", "api_key="),
    (failing(403), "WrongKey", "HTTP 403", "api_key="),
    (failing(404), "UnknownModel", "HTTP 404", "model="),
    (failing(400, "the temperature is too hot"), "RequestRefused", "the temperature is", "settings="),
    (failing(429, code="insufficient_quota"), "QuotaUsedUp", "HTTP 429", "billing"),
    (failing(400, code="context_length_exceeded"), "ContextTooLong", "HTTP 400", "window="),
]


@pytest.mark.parametrize("api", APIS)
async def test_a_permanent_error_ends_the_task_at_once_with_one_line(openai_server: OpenAIServer, api: str) -> None:
    async with LocalApp(app_of(asker(openai_server, api))) as client:
        for asked_so_far, (rule, wanted, detail, remedy) in enumerate(FINAL, 1):
            openai_server.play(rule)
            kind, message = await failure(client)
            assert kind == wanted
            assert "\n" not in message
            for part in ("'gpt-test'", "openai", openai_server.url, detail, remedy):
                assert part in message
            assert openai_server.key not in message
            assert len(openai_server.ledger()) == asked_so_far


async def test_a_wrong_key_is_not_shown(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("Never."))
    async with LocalApp(app_of(asker(openai_server, api_key="sk-wrong-0123456789abcdef"))) as client:
        kind, message = await failure(client)
    assert kind == "WrongKey"
    assert "0123456789" not in message


async def test_an_outage_ends_after_the_attempts(openai_server: OpenAIServer) -> None:
    openai_server.play(failing(503, "down for the night"))
    async with LocalApp(app_of(asker(openai_server))) as client:
        kind, message = await failure(client)
    assert kind == "ModelOutage"
    assert "down for the night; tried 4 times" in message
    assert len(openai_server.ledger()) == QUICK.attempts


async def test_an_unreachable_url_ends_after_the_attempts(openai_server: OpenAIServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound and not listening: nobody else takes the port, and every connection is refused.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        async with LocalApp(app_of(asker(openai_server, base_url=url))) as client:
            kind, message = await failure(client)
    assert kind == "ModelUnreachable"
    for part in (url, "tried 4 times", "OPENAI_BASE_URL"):
        assert part in message


class Hurried(AgentContext):
    """The context of a task whose submit had a deadline in 100 seconds."""

    @property
    def deadline(self) -> float:
        return time.time() + 100


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_rate_limit_longer_than_anyone_waits_ends_at_once(openai_server: OpenAIServer, hurried: bool) -> None:
    openai_server.play(rate_limited(after=3000))
    agent = asker(openai_server) if hurried else asker(openai_server, rate_limit_patience_seconds=60)
    app = App("asking")

    @app.agent("asker")
    async def asks(ctx: AgentContext, prompt: str) -> str:
        context = Hurried(ctx._run) if hurried else ctx
        return (await ask_model(context, agent.model, [said(prompt)], name="asks")).text or ""

    async with LocalApp(app) as client:
        kind, message = await failure(client)
    assert kind == "RateLimited"
    assert ("the task's time limit is" if hurried else "rate_limit_patience_seconds=60") in message
    assert len(openai_server.ledger()) == 1


@pytest.mark.parametrize("api", APIS)
async def test_the_text_of_a_broken_stream_is_replaced(openai_server: OpenAIServer, api: str) -> None:
    openai_server.play(cut(answer("Wrong words. " * 60), after=40, times=2), answer("Right."))
    async with LocalApp(app_of(asker(openai_server, api))) as client:
        task = await client.submit("asker", "Say something")
        events = [event async for event in task.stream()]
        assert (await task.result(timeout=WAIT)).value() == "Right."
    assert any("Wrong" in event.text for event in events), "or this test says nothing"
    assert shown(events) == "Right."


@pytest.mark.parametrize("api", APIS)
async def test_a_stalled_stream_is_not_an_answer(openai_server: OpenAIServer, api: str) -> None:
    openai_server.play(gated(answer("Wrong words. " * 60), "for ever", after=6).but(times=1), answer("Right."))
    # Longer than a busy machine is silent by itself; where it is not, the call is only made once more.
    agent = asker(openai_server, api, silence_seconds=1.0, retry=RetryPolicy(attempts=50, base_seconds=0.01))
    async with LocalApp(app_of(agent)) as client:
        task = await client.submit("asker", "Say something")
        events = [event async for event in task.stream()]
        assert (await task.result(timeout=WAIT)).value() == "Right."
    assert shown(events) == "Right."
    assert openai_server.ledger()[0].left


async def test_a_call_that_takes_too_long_is_retried(openai_server: OpenAIServer) -> None:
    openai_server.play(gated(answer("Late."), "for ever", headers=False).but(times=1), answer("Right."))
    agent = asker(openai_server, stream=False, call_seconds=1.0, retry=RetryPolicy(attempts=50, base_seconds=0.01))
    async with LocalApp(app_of(agent)) as client:
        assert (await asked(client))["text"] == "Right."
    assert openai_server.ledger()[0].left


async def test_after_a_rate_limit_the_other_calls_wait(
    openai_server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty conversations run into a limit that the first of them has reported: one refusal in all."""
    rows: list[Step] = []
    monkeypatch.setattr(turn_handler, "count_model_calls", lambda _, found: rows.extend(found))
    openai_server.play(rate_limited(after=3, in_all=1), answer("Right."))
    async with LocalApp(app_of(asker(openai_server))) as client:
        first = await client.submit("asker", "[c-0] Say something")
        await openai_server.until(lambda entries: any(entry.status == 429 for entry in entries), "one is refused")
        async with asyncio.timeout(WAIT):
            while (await first.show())["status"] != "waiting":
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(asked(client, f"[c-{number}] Say something") for number in range(1, 20)))
        assert (await first.result(timeout=WAIT)).value() == "Right."
    assert {one["text"] for one in answers} == {"Right."}
    refused, *answered = openai_server.ledger()
    assert [entry.status for entry in answered] == [200] * 20
    assert refused.ended is not None
    assert min(entry.at for entry in answered) - refused.ended >= 2.99
    calls = [row for row in rows if row.kind == "model"]
    assert {row.attributes.get(REQUEST_MODEL) for row in calls} == {"gpt-test"}, "held back: of the same model"


@pytest.mark.parametrize(
    ("model", "more", "told"),
    [
        ("gpt-test", {}, "Unknown model"),
        ("nobody:gpt-test", {}, "Unknown model"),
        ("openai-chat:gpt-test", {"base_url": None, "api_key": None}, "OPENAI_API_KEY"),
        (lambda: "no model", {}, "it must return a Model"),
        ("groq:llama", {}, "groq"),
    ],
    ids=["no provider", "unknown provider", "no key", "a function that makes none", "a library that is not there"],
)
async def test_settings_that_cannot_work_are_named(
    openai_server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, model: object, more: dict[str, None], told: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    async with LocalApp(app_of(asker(openai_server, model, **more))) as client:
        kind, message = await failure(client)
    assert kind == "WrongModelSettings"
    assert told in message
    assert "\n" not in message


async def test_the_environment_says_where_the_model_is(
    openai_server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in openai_server.environ.items():
        monkeypatch.setenv(name, value)
    openai_server.play(answer("Right."))
    app = app_of(asker(openai_server, base_url=None, api_key=None))
    async with LocalApp(app) as client:
        assert (await asked(client))["text"] == "Right."


async def test_connections_are_shared_and_closed_at_the_end(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("Right."))
    app = app_of(asker(openai_server))

    async def several(client: Client) -> None:
        await asyncio.gather(*(asked(client, f"[c-{number}] Hello") for number in range(5)))

    async with LocalApp(app) as client:
        await several(client)
        model = await app.functions.models.open(asker(openai_server).model)
        assert await app.functions.models.open(asker(openai_server).model) is model
        assert model._http is not None
        assert not model._http.is_closed
    assert model._http.is_closed
    async with LocalApp(app) as client:
        await several(client)


@pytest.mark.parametrize(
    ("api", "path", "body", "kept"),
    [
        (APIS[0], "chat/completions", {"messages": [{"role": "user", "content": "Say something"}]}, 4),
        (APIS[1], "responses", {"input": "Say something"}, 6),
    ],
)
async def test_a_stream_that_ends_too_early_is_not_an_answer(
    openai_server: OpenAIServer, api: str, path: str, body: dict[str, object], kept: int
) -> None:
    """A proxy that has lost the provider answers like this: the transport sees a complete response."""
    openai_server.play(answer("Wrong words. " * 60))
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {openai_server.key}"}) as http:
        whole = await http.post(f"{openai_server.url}/{path}", json={**body, "model": "gpt-test", "stream": True})
    events = whole.text.split("\n\n")
    # The opening and some text.
    openai_server.play(broken("\n\n".join([*events[:kept], ""]), times=2), answer("Right."))
    async with LocalApp(app_of(asker(openai_server, api))) as client:
        task = await client.submit("asker", "Say something")
        shown_events = [event async for event in task.stream()]
        assert (await task.result(timeout=WAIT)).value() == "Right."
    assert any("Wrong" in event.text for event in shown_events), "or this test says nothing"
    assert shown(shown_events) == "Right."
