"""What a server answers, as the JSON value that the agent gets."""

from __future__ import annotations

from mcp_types import CallToolResult, TextContent


def value_of(result: CallToolResult) -> object:
    """Structured content where there is some; else the text; else each part of the content as typed JSON.

    A part is `{"type": "text" | "image" | "audio" | "resource" | "resource_link", …}`, as MCP writes it. No content
    at all is None.
    """
    if result.structured_content is not None:
        return result.structured_content
    if not result.content:
        return None
    if all(isinstance(part, TextContent) for part in result.content):
        return text_of(result)
    return [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in result.content]


def text_of(result: CallToolResult) -> str:
    """The parts that are text, one below the other."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))
