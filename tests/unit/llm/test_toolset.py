"""The tools that a model may call, and the names that it sees."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from runtime_core.base.text import LONGEST_MESSAGE
from runtime_core.declare.manifest import AgentEntry, Manifest, ToolEntry
from runtime_core.errors import InvalidInput
from runtime_core.llm.toolset import FINAL, Toolset, ToolsMissing, edge_names, refusal, toolset_of
from weft import AgentContext, App, LLMAgent

EDGE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
OBJECT: dict[str, object] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def desk() -> App:
    app = App("desk")

    @app.tool
    def search(query: str, limit: int = 5) -> str:
        """Search the web."""
        return query

    @app.agent("writer")
    async def writer(ctx: AgentContext, draft: str) -> str:
        """Writes well."""
        return draft

    app.add_agent("critic", LLMAgent("openai-chat:m", description="Finds what is wrong."))
    return app


def elsewhere(*tools: str, pool: str = "") -> Manifest:
    entries = {name: ToolEntry(arguments=OBJECT, description=f"Does {name}.", pool=pool) for name in tools}
    asked: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return Manifest("other", "1", tools=entries, agents={"weather": AgentEntry(input=asked, pool="far")})


def toolset(
    app: App,
    *named: object,
    manifests: Sequence[Manifest] | None = (),
    agents: Sequence[str] = (),
    targets: Sequence[str] = (),
    output: str = "",
) -> Toolset:
    return toolset_of("agent 'a'", named, agents, targets, output, app.functions, manifests)


def names(found: Toolset) -> list[str]:
    return [spec.name for spec in found.specs]


def test_a_name_that_models_accept_stays_unchanged() -> None:
    assert edge_names([("tool", "search-web_2")]) == {("tool", "search-web_2"): "search-web_2"}


def test_characters_that_models_refuse_are_replaced() -> None:
    assert edge_names([("tool", "files.read_file")]) == {("tool", "files.read_file"): "files_read_file"}


def test_names_that_would_be_the_same_are_distinguished_the_same_way_in_any_order() -> None:
    wanted = [
        ("tool", "a.b"),
        ("tool", "a_b"),
        ("agent", "a_b"),
        ("tool", "a b"),
        ("tool", "x" * 70),
        ("tool", "x" * 64),
    ]
    found = edge_names(wanted)
    assert found["tool", "a_b"] == "a_b"
    assert found["tool", "x" * 64] == "x" * 64
    assert len(set(found.values())) == len(wanted)
    assert all(EDGE.fullmatch(edge) for edge in found.values())
    for seed in range(5):
        shuffled = random.Random(seed).sample(wanted, len(wanted))
        assert edge_names(shuffled) == found


def test_a_name_does_not_depend_on_dissimilar_names() -> None:
    alone = edge_names([("tool", "files.read")])
    among = edge_names([("tool", "files.read"), ("tool", "files.write"), ("tool", "search")])
    assert alone["tool", "files.read"] == among["tool", "files.read"]


def test_tools_are_given_by_function_by_name_and_by_pattern_and_each_is_shown_once() -> None:
    app = desk()
    search = app.tools["search"].function
    found = toolset(app, search, "search", "sea*", "files.*", manifests=[elsewhere("files.read", "files.write", "pay")])
    assert names(found) == ["search", "files_read", "files_write"]
    assert [spec.description for spec in found.specs] == ["Search the web.", "Does files.read.", "Does files.write."]


def test_a_tool_of_another_app_is_called_in_its_pool_and_checked_by_its_schema() -> None:
    offered = toolset(desk(), "files.read", manifests=[elsewhere("files.read", pool="gpu")]).find("files_read")
    assert offered is not None
    assert (offered.name, offered.pool) == ("files.read", "gpu")
    offered.check({"path": "a.txt"})
    with pytest.raises(InvalidInput, match="path"):
        offered.check({})


def test_arguments_of_an_own_tool_are_checked_by_its_types() -> None:
    offered = toolset(desk(), "search").find("search")
    assert offered is not None
    offered.check({"query": "a", "limit": 3})
    with pytest.raises(InvalidInput, match=r"arguments\.limit"):
        offered.check({"query": "a", "limit": "many"})
    with pytest.raises(InvalidInput, match=r"arguments\.page"):
        offered.check({"query": "a", "page": 1})


@pytest.mark.parametrize("named", ["publish", "files.*"])
def test_a_tool_that_no_app_offers_is_named(named: str) -> None:
    with pytest.raises(ToolsMissing, match=re.escape(f"agent 'a' names tool '{named}', which no app offers")):
        toolset(desk(), named)


def test_unavailable_tools_are_left_out_of_a_replay() -> None:
    assert names(toolset(desk(), "search", "publish", "files.*", manifests=None)) == ["search"]


def test_an_agent_is_asked_with_content_or_with_the_members_of_its_input() -> None:
    app = desk()
    found = toolset(app, agents=["critic", "writer", "weather"], manifests=[elsewhere()])
    critic, writer, weather = (found.find(name) for name in ("critic", "writer", "weather"))
    assert critic is not None
    assert writer is not None
    assert weather is not None
    assert [critic.wraps, writer.wraps, weather.wraps] == [True, True, False]
    assert critic.description == "Finds what is wrong."
    assert weather.pool == "far"
    writer.check({"content": "a draft"})
    with pytest.raises(InvalidInput):
        writer.check({"content": 1})
    with pytest.raises(InvalidInput):
        weather.check({"content": "Bern"})


def test_handing_off_and_asking_are_separate_tools() -> None:
    found = toolset(desk(), agents=["critic"], targets=["critic", "writer"])
    assert names(found) == ["critic", "transfer_to_critic", "transfer_to_writer"]
    critic, writer = found.find("transfer_to_critic"), found.find("transfer_to_writer")
    assert critic is not None
    assert writer is not None
    assert (critic.kind, critic.name, critic.goes_on) == ("transfer", "critic", True)
    assert not writer.goes_on, "a function cannot go on with a conversation"


def test_an_agent_that_no_app_has_is_named() -> None:
    with pytest.raises(ToolsMissing, match="agent 'editor'"):
        toolset(desk(), targets=["editor"])


def test_the_final_answer_keeps_its_name_and_is_not_among_the_tools() -> None:
    app = desk()

    @app.tool
    def final_result(answer: str) -> None:
        """A tool with exactly this name."""

    found = toolset(app, final_result, output=FINAL)
    [name] = names(found)
    assert name.startswith("final_result_")
    assert found.find(FINAL) is None
    offered = found.find(name)
    assert offered is not None
    assert offered.name == "final_result"


def test_the_model_reads_a_bounded_reason_for_a_refused_call() -> None:
    assert refusal(ValueError("no")) == "the call was not made: no; correct the arguments and call again"
    assert len(refusal(ValueError("x" * 1_000_000))) < 2 * LONGEST_MESSAGE
