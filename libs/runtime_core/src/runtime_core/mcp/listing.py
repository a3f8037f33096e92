"""From a server's list of tools to those that may be called; what cannot be used is told and left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from mcp_types import Tool, ToolAnnotations

from runtime_core.declaration import NAME
from runtime_core.manifest import Schema
from runtime_core.mcp.arguments import ArgumentsCheck, BadSchema
from runtime_core.mcp.declared import MCPServer


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server lists it, checked."""

    name: str
    """In the app: `<prefix>.<tool>`."""
    own_name: str
    """The server's."""
    description: str
    arguments: Schema
    result: Schema | None
    repeatable: bool
    check: ArgumentsCheck = field(compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a server offers now."""

    tools: dict[str, ListedTool]
    """By the name in the app."""
    left_out: tuple[str, ...]
    """One line for each tool that cannot be used."""


def listing_of(declared: MCPServer, tools: Iterable[Tool], taken: Collection[str] = ()) -> Listing:
    """Check a server's list. `taken` are names that the app has declared for itself: those win."""
    usable: dict[str, ListedTool] = {}
    left_out: list[str] = []
    for tool in tools:
        if not declared.takes(tool.name):
            continue
        name = f"{declared.prefix}.{tool.name}"
        try:
            if not NAME.fullmatch(name):
                raise BadSchema("its name may hold letters, digits, _ . and - only, at most 128 with the prefix")
            if name in taken:
                raise BadSchema(f"the app declares a tool {name!r} itself")
            if name in usable:
                raise BadSchema("the server lists it twice")
            try:
                check = ArgumentsCheck(tool.input_schema)
            except BadSchema as error:
                raise BadSchema(f"its input schema is not valid, {error}") from None
        except BadSchema as error:
            left_out.append(f"{declared.what}: the tool {tool.name!r} is left out: {error}")
            continue
        usable[name] = ListedTool(
            name=name,
            own_name=tool.name,
            description=tool.description or tool.title or "",
            arguments=tool.input_schema,
            result=tool.output_schema,
            repeatable=may_repeat(declared, tool.name, tool.annotations),
            check=check,
        )
    return Listing(usable, tuple(left_out))


def may_repeat(declared: MCPServer, tool: str, annotations: ToolAnnotations | None) -> bool:
    """Whether an attempt whose end is unknown may be made again.

    The app's word counts first. Else a tool that only reads, or that its server calls idempotent, may be repeated; what
    says nothing is neither, as the protocol's defaults are.
    """
    said = declared.may_repeat(tool)
    if said is not None:
        return said
    return annotations is not None and bool(annotations.read_only_hint or annotations.idempotent_hint)
