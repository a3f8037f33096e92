"""What a server offers: its tools, each checked with its schemas, and how their arguments are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from mcp_types import Tool, ToolAnnotations
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from runtime_core.declare.declaration import NAME
from runtime_core.declare.manifest import Schema
from runtime_core.errors import InvalidInput
from runtime_core.telemetry.redaction import kept
from runtime_core.tools.mcp.server import MCPServer


class BadSchema(Exception):
    """A schema by which nothing can be checked; the text says why."""


class ArgumentsCheck:
    """Reads the arguments of one tool: JSON Schema Draft 2020-12, or the draft that the schema names."""

    __slots__ = ("_validator",)

    def __init__(self, schema: Schema) -> None:
        """Raises BadSchema."""
        if schema.get("type") != "object":
            raise BadSchema(f"its type is {schema.get('type')!r} and not 'object'")
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            where = ".".join(str(part) for part in error.absolute_path)
            raise BadSchema(f"{where + ': ' if where else ''}{_line(error.message)}") from None
        except RecursionError:
            raise BadSchema("it is nested too deeply") from None
        # An empty registry: a reference to elsewhere is refused and never fetched.
        registry: Registry[Schema] = Registry()
        resolver = registry.resolver_with_root(DRAFT202012.create_resource(schema))
        # An `$id` sets what references are relative to: such schemas are looked at when they are used.
        if "$id" not in set(_keys(schema)):
            for reference in _references(schema):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    raise BadSchema(f"it refers to {_line(reference)!r}, which is not in it") from None
        self._validator = kind(schema, registry=registry)

    def decode(self, data: bytes) -> dict[str, object]:
        """The arguments in `data` (a JSON object). Raises InvalidInput that names the part, as in `arguments.path`."""
        try:
            value = msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise InvalidInput("arguments", f"cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise InvalidInput("arguments", "must be an object")
        try:
            wrong = best_match(self._validator.iter_errors(value))
        except Unresolvable as missing:
            raise InvalidInput("arguments", f"cannot be checked: the schema lacks {_line(str(missing))}") from None
        except RecursionError:
            raise InvalidInput("arguments", "is nested too deeply") from None
        if wrong is not None:
            where = ".".join(("arguments", *(str(part) for part in wrong.absolute_path)))
            raise InvalidInput(where, _line(wrong.message))
        return value


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, part in schema.items():
            if name == "$ref" and isinstance(part, str):
                yield part
            # Values that only look like schemas.
            elif name not in ("const", "enum", "default", "examples"):
                yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _keys(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, part in schema.items():
            yield name
            yield from _keys(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _keys(part)


def _line(text: str, limit: int = 200) -> str:
    return kept(" ".join(text.split()), limit)


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
