"""What a handler says of itself on the broker: the names and schemas of its app; and the check of inputs by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.text import shortened

FORMAT = 1
"""Version of the manifest's own shape."""

Schema = dict[str, object]


class AgentEntry(msgspec.Struct, omit_defaults=True):
    """One agent."""

    input: Schema | None = None
    """JSON schema of the input; None: anything."""
    output: Schema | None = None
    """JSON schema of the output; None: not declared."""
    pool: str = ""
    description: str = ""
    interleave: bool = False
    """True: events of one instance are handled beside each other, not one at a time."""
    topics: list[str] = []
    """Topics that the agent has subscribed to; `…*` is a prefix."""
    internal: bool = False
    """True: only other agents may ask it, and no submit or schedule starts it."""


class ToolEntry(msgspec.Struct, omit_defaults=True):
    """One tool."""

    arguments: Schema | None = None
    """JSON schema of the arguments, an object; None: any object."""
    result: Schema | None = None
    """JSON schema of the result; None: not declared."""
    pool: str = ""
    description: str = ""
    repeatable: bool = True
    """False: an attempt whose end is unknown is not made again."""


class EngineFunctionEntry(msgspec.Struct, omit_defaults=True):
    """One engine function."""

    arguments: Schema | None = None
    result: Schema | None = None
    pool: str = ""
    description: str = ""
    version: str = ""
    """Also the end of its name, after `@`; empty: it has none."""
    kind: str = "function"
    """`function`, `spark_job` (beside the driver, with the session), or `batch_job` (gives a command)."""
    resources: dict[str, object] = {}
    """What one call takes of a cluster, where that was said."""
    actors: int = 0
    """How many long-lived workers are kept for it; 0: any worker runs it."""


class HookEntry(msgspec.Struct, omit_defaults=True):
    """One hook."""

    order: int = 0
    guard: bool = False
    always: bool = False
    description: str = ""


class Manifest(msgspec.Struct):
    """An app's names and schemas, as JSON on the broker. Fields of later formats are ignored when it is read."""

    app: str
    version: str
    format: int = FORMAT
    agents: dict[str, AgentEntry] = {}
    tools: dict[str, ToolEntry] = {}
    engine_functions: dict[str, EngineFunctionEntry] = {}
    hooks: dict[str, dict[str, HookEntry]] = {}
    """Point → name → hook."""

    def to_json(self) -> bytes:
        """The same bytes for the same app, in any process."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Raises InvalidInput for bytes that are no manifest."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("manifest", f"cannot be read: {error}") from None


class SchemaCheck:
    """Checks values against one schema of a manifest. Made once, then kept by the caller."""

    __slots__ = ("_check", "_kind")

    def __init__(self, what: str, schema: Schema | None) -> None:
        """`what` it is the schema of, as in `input of agent 'writer'`. Raises ConfigurationError where it is none."""
        self._kind = "any" if not schema else _plain_kind(schema)
        self._check = None if schema is None or self._kind else _compiled(what, schema)

    def value(self, value: object, field: str = "data.input") -> None:
        """Raises InvalidInput that names the part, as in `data.input.topic`."""
        if self._check is not None:
            self._check(value, field)
        elif self._kind != "any" and not _is_kind(self._kind, value):
            raise InvalidInput(field, f"{_quoted(value)} is not of type {self._kind}")

    def json(self, data: bytes, field: str = "data.input") -> None:
        """The same for an input that is still JSON; it is decoded only where its schema asks for that."""
        if self._kind == "any" or (self._kind == "string" and data[:1] == b'"'):
            return
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise InvalidInput(field, f"cannot be read: {error}") from None
        self.value(value, field)


class InputCheck(SchemaCheck):
    """Checks inputs of one agent against its schema."""

    __slots__ = ()

    def __init__(self, name: str, agent: AgentEntry) -> None:
        """Raises ConfigurationError where the manifest's schema is none."""
        super().__init__(f"input of agent {name!r}", agent.input)


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})


def _plain_kind(schema: Schema) -> str:
    """The type's name where the schema asks for nothing but it; `any` where it asks for nothing; else ``."""
    asks = schema.keys() - _ANNOTATIONS
    if not asks:
        return "any"
    kind = schema.get("type")
    if asks == {"type"} and isinstance(kind, str) and kind in _KINDS:
        return kind
    # An object of any members, as `dict[str, object]` gives.
    if asks == {"type", "additionalProperties"} and kind == "object" and schema["additionalProperties"] is True:
        return "object"
    return ""


def _is_kind(kind: str, value: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _compiled(what: str, schema: Schema) -> Callable[[object, str], None]:
    # Imported here: it costs 50 ms, and only who admits inputs by a schema of some depth needs it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(
            f"the manifest's schema for the {what} is not valid, {_line(error.message)}: mend it where that is declared"
        ) from None
    # An empty registry: a reference to elsewhere is refused and never fetched.
    validator = Draft202012Validator(schema, registry=Registry())

    def check(value: object, field: str) -> None:
        try:
            error = best_match(validator.iter_errors(value))
        except Unresolvable as missing:
            raise ConfigurationError(
                f"the manifest's schema for the {what} refers to {_line(str(missing))}, which is "
                "not in it: put it under $defs"
            ) from None
        except RecursionError:
            raise InvalidInput(field, "is nested too deeply") from None
        if error is not None:
            where = ".".join((field, *_parts(error.absolute_path)))
            raise InvalidInput(where, _line(error.message))

    return check


def _parts(path: Iterable[object]) -> list[str]:
    return [str(part) for part in path]


def _line(text: str, limit: int = 200) -> str:
    return shortened(" ".join(text.split()), limit)


def _quoted(value: object) -> str:
    return _line(repr(value), 60)
