"""Topics as agents and clients see them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from runtime_core.bus.topics import TopicSubscription
from runtime_core.host.local import LocalApp
from tests.fleet import until
from weft import Agent, AgentContext, App, handles
from weft.errors import ConfigurationError, InvalidInput


@dataclass
class Facts:
    topic: str
    facts: list[str]


class Writer(Agent):
    """Keeps the messages that it gets."""

    @handles(Facts)
    async def on_facts(self, message: Facts, ctx: AgentContext) -> str:
        heard: list[object] = ctx.state.setdefault("heard", [])
        heard.append([message.facts, ctx.topic, ctx.sender, ctx.session_id])
        return ""

    @handles(str)
    async def on_question(self, message: str, ctx: AgentContext) -> object:
        return ctx.state.get("heard", [])


def desk() -> App:
    app = App("desk")
    app.add_agent("writer", Writer, topics=["facts"])
    app.add_agent("archive", Writer, topics=["fa*"])

    @app.agent("researcher")
    async def researcher(ctx: AgentContext, topic: str) -> str:
        message = {"type": "Facts", "data": {"topic": topic, "facts": [f"about {topic}"]}}
        await ctx.publish("facts", message, source=topic)
        return "published"

    return app


async def test_a_message_reaches_every_subscribers_instance() -> None:
    async with LocalApp(desk()) as client:
        task = await client.submit("researcher", "streams", session_id="s-1", key="r-1")
        assert (await task.result(timeout=60)).value() == "published"
        await until(client.topics.idle, 60, "the message is handled")
        for name in ("writer", "archive"):
            found = await client.submit(name, {"type": "str", "data": "?"}, key="streams")
            heard = (await found.result(timeout=60)).value()
            assert heard == [[["about streams"], "facts", "researcher/r-1", "s-1"]]


async def test_a_client_publishes_and_a_repeat_is_received_once() -> None:
    async with LocalApp(desk()) as client:
        message = {"type": "Facts", "data": {"topic": "t", "facts": ["one"]}}
        assert await client.publish("facts", message, source="t", message_id="m-1") == 2
        assert await client.publish("facts", message, source="t", message_id="m-1") == 2
        await until(client.topics.idle, 60, "the message is handled")
        found = await client.submit("writer", {"type": "str", "data": "?"}, key="t")
        assert (await found.result(timeout=60)).value() == [[["one"], "facts", "", ""]]


async def test_subscriptions_come_and_go_while_the_app_runs() -> None:
    async with LocalApp(desk()) as client:
        wanted = TopicSubscription("other", "writer")
        assert await client.topics.subscribe(wanted)
        assert wanted in await client.topics.subscriptions()
        assert await client.publish("other", {"type": "str", "data": "x"}, source="t") == 1
        assert await client.topics.unsubscribe(wanted)
        assert await client.publish("other", {"type": "str", "data": "x"}, source="t") == 0


async def test_an_invalid_topic_is_refused() -> None:
    async with LocalApp(desk()) as client:
        with pytest.raises(InvalidInput, match="topic"):
            await client.publish("no spaces, please", 1)
        with pytest.raises(InvalidInput, match="topic"):
            await client.topics.subscribe(TopicSubscription("", "writer"))
    app = App("bad")
    with pytest.raises(ConfigurationError, match="topic"):
        app.add_agent("writer", Writer, topics=["no spaces"])
    with pytest.raises(ConfigurationError, match="give a list"):
        app.add_agent("writer", Writer, topics="facts")
