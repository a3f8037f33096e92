"""The list of tools of an MCP server: what is taken from it, and arguments that are checked by its schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp_types import ListToolsResult, Tool, ToolAnnotations

from runtime_core.calls.mcp import connection
from runtime_core.calls.mcp.connection import ArgumentsCheck, BadSchema, listing_of
from runtime_core.declare.declaration import Place
from runtime_core.declare.mcp_server import MCPServer
from runtime_core.errors import InvalidInput

PLACE = Place("app.py", 7)


OBJECT: dict[str, Any] = {"type": "object"}


def server(name: str = "files", **settings: Any) -> MCPServer:
    return MCPServer(name, PLACE, **({"command": ["serve"]} | settings))


@pytest.mark.parametrize(
    ("annotations", "said", "repeatable"),
    [
        (None, None, False),
        (ToolAnnotations(), None, False),
        (ToolAnnotations(destructive_hint=False), None, False),
        (ToolAnnotations(read_only_hint=True), None, True),
        (ToolAnnotations(read_only_hint=True, idempotent_hint=False), None, True),
        (ToolAnnotations(idempotent_hint=True), None, True),
        (ToolAnnotations(idempotent_hint=True), False, False),
        (ToolAnnotations(idempotent_hint=True), {"write": False}, False),
        (None, True, True),
        (None, {"write": True}, True),
        (None, {"other": True}, False),
    ],
)
def test_a_tool_is_repeated_only_where_the_app_or_its_server_says_so(
    annotations: ToolAnnotations | None, said: Any, repeatable: bool
) -> None:
    tool = Tool(name="write", input_schema=OBJECT, annotations=annotations)
    listing = listing_of(server(repeatable=said), [tool])
    assert listing.tools["files.write"].repeatable is repeatable


def test_only_tools_that_the_app_wants_and_can_name_are_taken() -> None:
    names = ["read_file", "read file", "write_file", "read_" + "x" * 130, "read_file", "read_own"]
    tools = [Tool(name=name, input_schema=OBJECT) for name in names]
    listing = listing_of(server(tools=["read*"]), tools, taken={"files.read_own"})
    assert list(listing.tools) == ["files.read_file"]
    assert [line.split("left out: ")[1] for line in listing.left_out] == [
        "its name may contain only letters, digits, _ . and -, at most 128 with the prefix",
        "its name may contain only letters, digits, _ . and -, at most 128 with the prefix",
        "the server lists it twice",
        "the app itself declares a tool 'files.read_own'",
    ]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({}, "its type is None"),
        ({"type": "array"}, "its type is 'array'"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "'/$defs/b' does not exist"),
        ({"type": "object", "$ref": "http://127.0.0.1:1/schema"}, "'http://127.0.0.1:1/schema' is not present"),
    ],
)
def test_an_unusable_schema_is_refused(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(BadSchema) as refused:
        ArgumentsCheck(schema)
    assert told in str(refused.value)


def test_arguments_are_read_by_the_schema_and_the_wrong_part_is_named() -> None:
    check = ArgumentsCheck(
        {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/place"}, "ref": {"enum": [{"$ref": "not a reference"}]}},
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
            "additionalProperties": False,
        }
    )
    assert check.decode(b'{"at": {"x": 1}}') == {"at": {"x": 1}}
    assert check.decode(b"") == {}
    for data, field in (
        (b'{"at": {"x": "1"}}', "arguments.at.x"),
        (b'{"at": {}}', "arguments.at.x"),
        (b'{"more": 1}', "arguments"),
        (b"[]", "arguments"),
        (b"{", "arguments"),
        (json.dumps({"at": {"x": "y" * 1000}}).encode(), "arguments.at.x"),
    ):
        with pytest.raises(InvalidInput) as refused:
            check.decode(data)
        assert refused.value.field == field
        assert len(str(refused.value)) < 300


MOST = 100_000


async def test_a_list_of_tools_whose_pages_never_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_LIST_BYTES", MOST)
    asked: list[str | None] = []

    class Endless:
        async def list_tools(self, cursor: str | None) -> ListToolsResult:
            asked.append(cursor)
            tool = Tool(name="t", description="x" * (MOST // 10), input_schema={"type": "object"})
            return ListToolsResult(tools=[tool], next_cursor="more")

    session = object.__new__(connection.MCPSession)
    monkeypatch.setattr(session, "_client", Endless(), raising=False)
    with pytest.raises(RuntimeError, match=f"its list of tools is larger than {MOST} bytes"):
        await session.tools()
    assert len(asked) == 10


async def test_a_list_of_too_many_tools_is_refused_before_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 tools without descriptions are few bytes, but each is compiled and announced."""

    class Many:
        async def list_tools(self, cursor: str | None) -> ListToolsResult:
            tool = Tool(name="t", input_schema={"type": "object"})
            return ListToolsResult(tools=[tool] * (connection.MAX_TOOLS // 2 + 1), next_cursor="more")

    session = object.__new__(connection.MCPSession)
    monkeypatch.setattr(session, "_client", Many(), raising=False)
    with pytest.raises(RuntimeError, match="it lists more than 1000 tools"):
        await session.tools()
