"""The tools that a server offers: checks their schemas, and decodes the arguments of their calls."""

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
    """A schema that cannot be used for checks; the message says why."""


class ArgumentsCheck:
    """Decodes the arguments of one tool by JSON Schema Draft 2020-12, or the draft that the schema names."""

    __slots__ = ("_validator",)

    def __init__(self, schema: Schema) -> None:
        """Raises BadSchema."""
        if schema.get("type") != "object":
            raise BadSchema(f"its type is {schema.get('type')!r}, not 'object'")
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            where = ".".join(str(part) for part in error.absolute_path)
            raise BadSchema(f"{where + ': ' if where else ''}{_line(error.message)}") from None
        except RecursionError:
            raise BadSchema("it is nested too deeply") from None
        # An empty registry: external references are refused, never fetched.
        registry: Registry[Schema] = Registry()
        resolver = registry.resolver_with_root(DRAFT202012.create_resource(schema))
        # An `$id` changes the base of references: such schemas are checked when they are used.
        if "$id" not in set(_keys(schema)):
            for reference in _references(schema):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    raise BadSchema(f"it refers to {_line(reference)!r}, which is not in it") from None
        self._validator = kind(schema, registry=registry)

    def decode(self, data: bytes) -> dict[str, object]:
        """Decode and check arguments (a JSON object). Raises InvalidInput with the member, as in `arguments.path`."""
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
            # Members whose values look like schemas but are not.
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
    """A checked tool of a server's list."""

    name: str
    """The name in the app: `<prefix>.<tool>`."""
    own_name: str
    """The server's name for it."""
    description: str
    arguments: Schema
    result: Schema | None
    repeatable: bool
    check: ArgumentsCheck = field(compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools that a server offers now."""

    tools: dict[str, ListedTool]
    """Tools by their name in the app."""
    left_out: tuple[str, ...]
    """One line per unusable tool."""


def listing_of(declared: MCPServer, tools: Iterable[Tool], taken: Collection[str] = ()) -> Listing:
    """Check a server's list. `taken` are names of the app's own tools, which take precedence."""
    usable: dict[str, ListedTool] = {}
    left_out: list[str] = []
    for tool in tools:
        if not declared.takes(tool.name):
            continue
        name = f"{declared.prefix}.{tool.name}"
        try:
            if not NAME.fullmatch(name):
                raise BadSchema("its name may only have letters, digits, _ . and -, at most 128 with the prefix")
            if name in taken:
                raise BadSchema(f"the app itself declares a tool {name!r}")
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
    """Return whether an attempt with an unknown outcome may be repeated.

    The app's declaration counts first. Otherwise a tool is repeatable if its server calls it read-only or idempotent.
    Without annotations it is neither, as the protocol defines.
    """
    allowed = declared.may_repeat(tool)
    if allowed is not None:
        return allowed
    return annotations is not None and bool(annotations.read_only_hint or annotations.idempotent_hint)
