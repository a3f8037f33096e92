"""What a model may call and by which names: tools, other agents, and handing the conversation over."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from runtime_core import codec
from runtime_core.declare.manifest import AgentEntry, Manifest, Schema, SchemaCheck
from runtime_core.errors import NotReady, WeftError
from runtime_core.llm.input import is_conversation
from runtime_core.tools.tool import StepTool

if TYPE_CHECKING:
    from runtime_core.runs.ports import Functions
    from runtime_core.tools.mcp.server import MCPServer


Kind = Literal["tool", "agent", "transfer", "output"]
Check = Callable[[Mapping[str, Any]], object]  # Any: JSON
"""Raises InvalidInput for arguments that the callee would refuse."""

EDGE_LENGTH = 64
CONTENT = "content"
"""The argument that an agent is asked with, where its input is no object of named members."""
MESSAGE = "message"
FINAL = "final_result"
"""What the tool, or the format, of the final answer is called."""
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")
_ANY_OBJECT: Schema = {"type": "object", "properties": {}}


class ToolsMissing(WeftError):
    """An agent names tools or agents that no app offers (any more, or yet): the attempt is made again."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it."""

    name: str
    """At the model's edge: letters, digits, _ and -, at most 64."""
    description: str
    arguments: Schema
    """JSON schema of the arguments, an object."""


@dataclass(frozen=True, slots=True)
class Offered:
    """One thing that the model may call."""

    kind: Kind
    name: str
    """In Weft: of the tool, or of the agent."""
    description: str
    arguments: Schema
    check: Check
    pool: str = ""
    wraps: bool = False
    """Whether an agent gets the argument `content` alone as its input, not the object of all arguments."""
    goes_on: bool = False
    """Whether an agent can go on with a conversation that is handed over."""

    @property
    def wanted(self) -> str:
        """Its name at the model's edge, as far as that is allowed and free."""
        return f"transfer_to_{self.name}" if self.kind == "transfer" else self.name


class Toolset:
    """All that a model may call, by its name at the model's edge. `output` is the name of the final answer's tool."""

    def __init__(self, offered: Sequence[Offered], output: str = "") -> None:
        self.output = output
        wanted = [(each.kind, each.wanted) for each in offered]
        names = edge_names([*wanted, ("output", output)] if output else wanted)
        self._by_edge = {names[each.kind, each.wanted]: each for each in offered}
        self.specs = [ToolSpec(edge, each.description, each.arguments) for edge, each in self._by_edge.items()]

    def find(self, edge: str) -> Offered | None:
        """What the model has called by this name."""
        return self._by_edge.get(edge)


def edge_names(wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A name that models accept for each `(kind, name)`: letters, digits, _ and -, at most 64; no two are equal.

    A name keeps what it can. Where several would be the same, the one that needed no change has it, the first of them
    by kind (`output`, `tool`, then others); the others get a digest of their own behind it. So a name depends on those
    that it would be the same as, and on no order.
    """
    order = ("output", "tool", "agent", "transfer")
    groups: dict[str, list[tuple[str, str]]] = {}
    for each in wanted:
        groups.setdefault(_UNFIT.sub("_", each[1])[:EDGE_LENGTH], []).append(each)
    found: dict[tuple[str, str], str] = {}
    for cleaned, group in groups.items():
        literal = sorted((each for each in group if each[1] == cleaned), key=lambda each: order.index(each[0]))
        alone = group if len(group) == 1 and len(group[0][1]) <= EDGE_LENGTH else []
        for winner in (literal or alone)[:1]:
            found[winner] = cleaned
    taken = set(found.values())
    for each in sorted(set(wanted) - found.keys()):
        cleaned, digits = _UNFIT.sub("_", each[1]), 6
        digest = hashlib.blake2b(":".join(each).encode()).hexdigest()
        while (edge := f"{cleaned[: EDGE_LENGTH - digits - 1]}_{digest[:digits]}") in taken:
            digits += 1
        taken.add(edge)
        found[each] = edge
    return found


def toolset_of(
    what: str,
    named: Sequence[object],
    agents: Sequence[str],
    targets: Sequence[str],
    output: str,
    functions: Functions,
    manifests: Sequence[Manifest] | None,
) -> Toolset:
    """What an agent may call: `named` tools (functions, names, patterns), `agents` to ask, `targets` to hand over to.

    `output` is the name of the final answer's tool, which no other has; empty: there is none.
    `manifests` are all apps' on the broker; None: they cannot be asked, and what is missing is left out. Raises
    ToolsMissing that names what no app offers, NotReady where all that is missing belongs to an MCP server of this app
    that was never connected.
    """
    found: list[Offered] = []
    tools = _Tools(functions, manifests or ())
    absent = [each for each in named if not tools.take(each, found)]
    missing = [f"tool {str(each)!r}" for each in absent]
    for kind, names in (("agent", agents), ("transfer", targets)):
        for name in dict.fromkeys(names):
            offered = _agent(kind, name, functions, manifests or ())  # type: ignore[arg-type]  # literals of the line above
            if offered is None:
                missing.append(f"agent {name!r}")
            else:
                found.append(offered)
    if missing and manifests is not None:
        late = [tools.late(each) for each in absent]
        if len(late) == len(missing) and all(late):
            raise NotReady(f"{what} waits for {', '.join(sorted(set(late)))} to be connected for the first time")
        raise ToolsMissing(
            f"{what} names {', '.join(missing)}, which no app offers: start the service that has it, or correct the "
            "name"
        )
    return Toolset(found, output)


class _Tools:
    """Tools by name: this app's own, and those of all manifests."""

    def __init__(self, functions: Functions, manifests: Sequence[Manifest]) -> None:
        self._functions = functions
        self._manifests = manifests
        self._seen: set[str] = set()

    def take(self, named: object, into: list[Offered]) -> bool:
        """Add what a function, a name or a pattern stands for, once; False where it stands for nothing."""
        if isinstance(named, str) and any(char in named for char in "*?["):
            names: Iterable[str] = sorted(name for name in self._names() if fnmatchcase(name, named))
        else:
            known = self._functions.tool(named)
            names = [known.name if known is not None else str(named)]
        offered = [self._offered(name) for name in names]
        for each in offered:
            if each is not None and each.name not in self._seen:
                self._seen.add(each.name)
                into.append(each)
        return bool(offered) and None not in offered

    def late(self, named: object) -> str:
        """The MCP server of this app, not listed by anybody yet, whose tool this is; else empty."""
        find = getattr(self._functions, "mcp_server_of", None)
        server: MCPServer | None = find(named) if find is not None and isinstance(named, str) else None
        if server is None or server.when_down == "fail":
            return ""
        # As `mcp.servers` names what it publishes.
        listed = any(manifest.app.endswith(f"/mcp/{server.name}") for manifest in self._manifests)
        return "" if listed else server.what

    def _names(self) -> set[str]:
        own = getattr(getattr(self._functions, "tools", None), "view", {})
        return {*own, *(name for manifest in self._manifests for name in manifest.tools)}

    def _offered(self, name: str) -> Offered | None:
        known = self._functions.tool(name)
        if known is not None:
            return _own_tool(known)
        for manifest in self._manifests:
            entry = manifest.tools.get(name)
            if entry is not None:
                schema = entry.arguments or _ANY_OBJECT
                check = _Lazy(f"arguments of tool {name!r}", entry.arguments)
                return Offered("tool", name, entry.description, schema, check, entry.pool)
        return None


def _own_tool(tool: Any) -> Offered:  # Any: a Tool, of which the port's protocol shows the name alone
    schema, reader = tool.arguments.schema(), tool.arguments

    def check(arguments: Mapping[str, Any]) -> None:
        if not isinstance(tool, StepTool):  # which takes anything
            reader.decode(codec.encode(arguments))

    if isinstance(tool, StepTool):
        schema = _ANY_OBJECT
    return Offered("tool", tool.name, tool.description, schema, check, tool.pool)


def _agent(
    kind: Literal["agent", "transfer"], name: str, functions: Functions, manifests: Sequence[Manifest]
) -> Offered | None:
    known: Any = functions.agent(name)  # Any: a definition, of which the port's protocol shows the name alone
    entry: AgentEntry | None
    if known is not None:
        entry = known.entry()
    else:
        entry = next((manifest.agents[name] for manifest in manifests if name in manifest.agents), None)
    if entry is None:
        return None
    about = entry.description.strip()
    if kind == "transfer":
        said = f"Hand the conversation over to agent {name}, which answers in your place."
        schema: Schema = {
            "type": "object",
            "properties": {MESSAGE: {"type": "string", "description": "What the agent is to do or to know."}},
            "additionalProperties": False,
        }
        description = f"{said} {about}".strip()
        goes_on = is_conversation(entry.input)
        check = _Lazy(f"arguments of transfer_to_{name}", schema)
        return Offered("transfer", name, description, schema, check, entry.pool, goes_on=goes_on)
    description = about or f"Ask agent {name}."
    taken = entry.input or {}
    if taken.get("type") == "object" and taken.get("properties"):
        check = _Lazy(f"input of agent {name!r}", taken)
        return Offered("agent", name, description, taken, check, entry.pool)
    schema = _content_schema(taken)
    check = _Lazy(f"input of agent {name!r}", schema)
    return Offered("agent", name, description, schema, check, entry.pool, wraps=True)


def _content_schema(taken: Schema) -> Schema:
    content: Schema = {"type": "string", "description": "What the agent is asked."}
    definitions: Schema = {}
    if taken and not is_conversation(taken):
        content = {name: part for name, part in taken.items() if name != "$defs"}
        definitions = {"$defs": taken["$defs"]} if "$defs" in taken else {}
    return {
        "type": "object",
        "properties": {CONTENT: content},
        "required": [CONTENT],
        "additionalProperties": False,
        **definitions,
    }


class _Lazy:
    """A check that is made at its first use: most tools that a model is shown are not called."""

    __slots__ = ("_check", "_schema", "_what")

    def __init__(self, what: str, schema: Schema | None) -> None:
        self._what = what
        self._schema = schema
        self._check: SchemaCheck | None = None

    def __call__(self, arguments: Mapping[str, Any]) -> None:  # Any: JSON
        if self._check is None:
            self._check = SchemaCheck(self._what, self._schema)
        self._check.value(dict(arguments), "arguments")


def refusal(error: Exception) -> str:
    """What the model is told of arguments that do not fit."""
    return f"the call was not made: {error}; correct the arguments and call again"
