"""A server whose list has pages and unusable schemas: `python -m tests.mcp_servers.odd`."""

from __future__ import annotations

from typing import Any

import anyio
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

OBJECT: dict[str, Any] = {"type": "object"}
READS = ToolAnnotations(read_only_hint=True)
PAGES = [
    [
        Tool(name="picture", input_schema=OBJECT, annotations=READS),
        Tool(name="bad_type", input_schema={"type": "object", "properties": {"a": {"type": "strin"}}}),
        Tool(name="secret", input_schema=OBJECT),
    ],
    [
        Tool(name="bad_reference", input_schema={"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}),
        Tool(name="bad name", input_schema=OBJECT),
    ],
    [
        Tool(
            name="texts",
            description="Two texts.",
            annotations=READS,
            input_schema={
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"items": {"type": "array", "items": {"$ref": "#/definitions/item"}}},
                "required": ["items"],
                "definitions": {"item": {"type": "integer", "minimum": 1}},
            },
        ),
        Tool(name="promises", input_schema=OBJECT, output_schema={"type": "object", "required": ["kept"]}),
    ],
]


async def list_tools(ctx: ServerRequestContext[Any], params: PaginatedRequestParams | None) -> ListToolsResult:
    page = int(params.cursor) if params is not None and params.cursor else 0
    following = str(page + 1) if page + 1 < len(PAGES) else None
    return ListToolsResult(tools=PAGES[page], next_cursor=following)


async def call_tool(ctx: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
    if params.name == "picture":
        image = ImageContent(type="image", data="aGk=", mime_type="image/png")
        return CallToolResult(content=[TextContent(type="text", text="look"), image])
    if params.name == "promises":
        return CallToolResult(content=[], structured_content={"broken": True})
    return CallToolResult(content=[TextContent(type="text", text=text) for text in ("eins", "zwei")])


async def main() -> None:
    server: Server[Any] = Server("odd", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
