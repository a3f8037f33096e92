"""Names of agents and topics: which are valid, and that each has one form on the broker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.declare.declaration import NAME, POOL
from runtime_core.integrations.actors.identity import agent_name, instance_key, key_of, pool_of, type_of
from runtime_core.integrations.actors.message import MessageHandlerContext
from runtime_core.wire.ids import MAX_NAME_CHARACTERS, has_control
from weft.errors import InvalidInput
from weft.runtime import AgentId, AgentType, DefaultTopicId, TopicId

TYPES = st.from_regex(r"[\w\-.]{1,12}", fullmatch=True)
KEYS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(TYPES)
def test_every_type_is_found_by_its_name(type: str) -> None:
    name = agent_name(type)
    assert NAME.fullmatch(name)
    assert POOL.fullmatch(pool_of(name))
    assert type_of(name) == type


@given(KEYS)
def test_every_key_is_written_without_control_characters_and_comes_back(key: str) -> None:
    written = instance_key(key)
    assert written
    assert not has_control(written)
    assert not written.startswith("~")
    assert key_of(written) == key


@given(st.lists(TYPES, unique=True, min_size=2, max_size=2), st.lists(KEYS, unique=True, min_size=2, max_size=2))
def test_no_two_share_a_name(types: list[str], keys: list[str]) -> None:
    assert agent_name(types[0]) != agent_name(types[1])
    assert instance_key(keys[0]) != instance_key(keys[1])


def test_plain_types_and_keys_are_written_as_they_are() -> None:
    assert (agent_name("writer_2"), instance_key("a b/c")) == ("writer_2", "a b/c")
    assert agent_name("2nd writer".replace(" ", "-")) == "x--2nd-writer"
    assert instance_key("") == "%-"


def test_two_long_names_have_two_pools() -> None:
    assert pool_of("a" * 100) != pool_of("a" * 101)


@pytest.mark.parametrize("type", ["", "with space", "slash/", "new\nline", "trailing\n"])
def test_a_wrong_type_is_refused_and_named(type: str) -> None:
    with pytest.raises(ValueError, match="type"):
        AgentId(type, "key")
    with pytest.raises(InvalidInput):
        TopicId(type, "source")


def test_long_names_and_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        agent_name("ü" * 40)
    with pytest.raises(ValueError, match=str(MAX_NAME_CHARACTERS)):
        instance_key("k" * (MAX_NAME_CHARACTERS + 1))


def test_ids_are_texts_and_back() -> None:
    id = AgentId(AgentType("writer"), "a/b")
    assert str(id) == "writer/a/b"
    assert AgentId.from_str("writer/a/b") == id
    assert TopicId.from_str("news:sport/one") == TopicId("news:sport", "one")
    assert len({id, AgentId("writer", "a/b")}) == 1
    with pytest.raises(ValueError, match="no slash"):
        AgentId.from_str("writer")


def test_the_default_topic_is_that_of_the_handlers_agent() -> None:
    assert DefaultTopicId().source == "default"
    with MessageHandlerContext.populate_context(AgentId("writer", "mine")):
        assert (DefaultTopicId().type, DefaultTopicId().source) == ("default", "mine")
    assert DefaultTopicId("other", "x").source == "x"
