"""Subscriptions: which topics they match, for whom, and which of them the broker can store."""

from __future__ import annotations

import pytest

from runtime_core.bus.topics import TopicSubscription
from runtime_core.integrations.actors.errors import CantHandleException
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId
from runtime_core.integrations.actors.protocol import (
    DefaultSubscription,
    TypePrefixSubscription,
    TypeSubscription,
    default_subscription,
    topic_reader,
    type_subscription,
)

NEWS = TopicId("news", "today")


def test_a_subscription_maps_the_source_of_a_topic_to_the_key() -> None:
    for subscription in (TypeSubscription("news", "reader"), TypePrefixSubscription("ne", AgentType("reader"))):
        assert subscription.map_to_agent(NEWS) == AgentId("reader", "today")
        with pytest.raises(CantHandleException, match=r"does not match the topic weather/today"):
            subscription.map_to_agent(TopicId("weather", "today"))
    assert not TypeSubscription("ne", "reader").is_match(NEWS)


def test_an_equal_subscription_has_the_same_id_in_every_process() -> None:
    assert TypeSubscription("news", "reader").id == TypeSubscription("news", AgentType("reader")).id
    ids = {
        each.id for each in (TypeSubscription("a", "b"), TypeSubscription("b", "a"), TypePrefixSubscription("a", "b"))
    }
    assert len(ids) == 3
    assert TypeSubscription("a", "b", id="own").id == "own"
    assert TypeSubscription("a", "b", id="own") == TypeSubscription("a", "b")
    assert TypeSubscription("a", "b") != TypePrefixSubscription("a", "b")


def test_a_default_subscription_needs_an_agent_type() -> None:
    assert DefaultSubscription(agent_type="reader") == TypeSubscription("default", "reader")
    with pytest.raises(CantHandleException, match="needs agent_type="):
        DefaultSubscription()


def test_each_class_has_its_own_subscriptions() -> None:
    class One:
        unbound_subscriptions: list[object] = []  # noqa: RUF012  # as the base class of agents makes it

    class Other:
        unbound_subscriptions: list[object] = []  # noqa: RUF012  # as above

    assert default_subscription(type_subscription("news")(One)) is One
    default_subscription()(Other)
    assert (len(One.unbound_subscriptions), len(Other.unbound_subscriptions)) == (2, 1)


def test_the_broker_stores_subscriptions_that_it_can_evaluate() -> None:
    class Own(TypeSubscription):
        def is_match(self, topic_id: TopicId) -> bool:
            return True

    class Named(TypeSubscription):
        pass

    topic_of = topic_reader(TypeSubscription, TypePrefixSubscription)
    exact = topic_of(Named("news", "reader"))
    assert isinstance(exact, TopicSubscription)
    assert (exact.topic, exact.prefix) == ("news", False)
    prefix = topic_of(TypePrefixSubscription("ne", "reader"))
    assert prefix is not None
    assert (prefix.topic, prefix.prefix, prefix.agent) == ("ne", True, exact.agent)
    assert topic_of(Own("news", "reader")) is None
    assert topic_of(object()) is None
