"""The tools of a model, by the names that it sees: tools, other agents, and handoffs of the conversation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from runtime_core.base.text import LONGEST_MESSAGE, shortened, text_of_error
from runtime_core.declare.manifest import AgentEntry, Manifest, Schema
from runtime_core.declare.tool import StepTool, is_allowed, is_pattern
from runtime_core.errors import NotReady, WeftError
from runtime_core.llm.input import is_conversation
from runtime_core.state_manager.admission import SchemaCheck
from runtime_core.wire import codec

if TYPE_CHECKING:
    from runtime_core.declare.mcp_server import MCPServer
    from runtime_core.runs.ports import Functions


Kind = Literal["tool", "agent", "transfer", "output"]
Check = Callable[[Mapping[str, Any]], object]  # Any: JSON
"""Raises InvalidInput for arguments that the called tool or agent would refuse."""

EDGE_LENGTH = 64
CONTENT = "content"
"""The argument for an agent whose input is not an object with named members."""
MESSAGE = "message"
FINAL = "final_result"
"""The name of the tool, or of the format, of the final answer."""
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")
_ANY_OBJECT: Schema = {"type": "object", "properties": {}}


class ToolsMissing(WeftError):
    """An agent names tools or agents that no app offers, or none yet. The attempt is retried."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it."""

    name: str
    """The model's name for it: letters, digits, _ and -, at most 64."""
    description: str
    arguments: Schema
    """JSON schema of the arguments, an object."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool, agent or handoff that the model may call."""

    kind: Kind
    name: str
    """The name of the tool or agent in Weft."""
    description: str
    arguments: Schema
    check: Check
    pool: str = ""
    wraps: bool = False
    """Whether an agent's input is only the argument `content`, not the object of all arguments."""
    goes_on: bool = False
    """Whether an agent can continue a conversation that it gets by a handoff."""

    @property
    def wanted(self) -> str:
        """The preferred name for the model, if that is allowed and free."""
        return f"transfer_to_{self.name}" if self.kind == "transfer" else self.name


class Toolset:
    """The tools of a model, by the names that it sees. `output` is the name of the final answer's tool."""

    def __init__(self, offered: Sequence[Offered], output: str = "") -> None:
        self.output = output
        self._offered = offered
        wanted = [(each.kind, each.wanted) for each in offered]
        names = edge_names([*wanted, ("output", output)] if output else wanted)
        self._by_edge = {names[each.kind, each.wanted]: each for each in offered}
        self.specs = [ToolSpec(edge, each.description, each.arguments) for edge, each in self._by_edge.items()]

    def within(self, limits: Sequence[Sequence[str]]) -> Toolset:
        """Return the toolset without the tools that these lists do not allow."""
        return Toolset(
            [each for each in self._offered if each.kind != "tool" or is_allowed(limits, each.name)], self.output
        )

    def find(self, edge: str) -> Offered | None:
        """Return what the model called by this name, or None."""
        return self._by_edge.get(edge)


def edge_names(wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return a unique name that models accept for each `(kind, name)`: letters, digits, _ and -, at most 64.

    Other characters become `_`. If several names collide, one that needed no change keeps it, the first by kind
    (`output`, `tool`, then others); the others get a digest as a suffix. So a name depends only on the names that it
    collides with, not on their order.
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
    """Return the toolset of an agent: `named` tools (functions, names, patterns), `agents` to call, handoff `targets`.

    `output` is the reserved name of the final answer's tool, or empty. `manifests` are those of all apps on the broker;
    None: they are not available, and unknown tools are left out. Raises ToolsMissing that names the unknown tools, or
    NotReady if all of them belong to MCP servers of this app that have not connected yet.
    """
    found: list[Offered] = []
    tools = _Tools(functions, manifests or ())
    absent = [each for each in named if not tools.take(each, found)]
    missing = [f"tool {str(each)!r}" for each in absent]
    for kind, names in (("agent", agents), ("transfer", targets)):
        for name in dict.fromkeys(names):
            offered = _agent(kind, name, functions, manifests or ())  # type: ignore[arg-type]  # the literals above
            if offered is None:
                missing.append(f"agent {name!r}")
            else:
                found.append(offered)
    if missing and manifests is not None:
        late = [tools.late(each) for each in absent]
        if len(late) == len(missing) and all(late):
            raise NotReady(f"{what} is waiting for the first connection of {', '.join(sorted(set(late)))}")
        raise ToolsMissing(
            f"{what} names {', '.join(missing)}, which no app offers: start the service that declares it, or "
            "correct the name"
        )
    return Toolset(found, output)


class _Tools:
    """The tools of this app and of all manifests, by name."""

    def __init__(self, functions: Functions, manifests: Sequence[Manifest]) -> None:
        self._functions = functions
        self._manifests = manifests
        self._seen: set[str] = set()

    def take(self, named: object, into: list[Offered]) -> bool:
        """Add the tools of a function, name or pattern, once each. Return False if one is unknown."""
        if isinstance(named, str) and is_pattern(named):
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
        """Return this app's MCP server of a tool if no manifest lists the server yet; otherwise an empty string."""
        find = getattr(self._functions, "mcp_server_of", None)
        server: MCPServer | None = find(named) if find is not None and isinstance(named, str) else None
        if server is None or server.when_down == "fail":
            return ""
        # `mcp.servers` publishes manifests under this name.
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
                check = _LazyCheck(f"arguments of tool {name!r}", entry.arguments)
                return Offered("tool", name, entry.description, schema, check, entry.pool)
        return None


def _own_tool(tool: Any) -> Offered:  # Any: a Tool; the port's protocol has only its name
    schema, reader = tool.arguments.schema(), tool.arguments

    def check(arguments: Mapping[str, Any]) -> None:
        if not isinstance(tool, StepTool):  # a StepTool takes anything
            reader.decode(codec.encode(arguments))

    if isinstance(tool, StepTool):
        schema = _ANY_OBJECT
    return Offered("tool", tool.name, tool.description, schema, check, tool.pool)


def _agent(
    kind: Literal["agent", "transfer"], name: str, functions: Functions, manifests: Sequence[Manifest]
) -> Offered | None:
    known: Any = functions.agent(name)  # Any: a definition; the port's protocol has only its name
    entry: AgentEntry | None
    if known is not None:
        entry = known.entry()
    else:
        entry = next((manifest.agents[name] for manifest in manifests if name in manifest.agents), None)
    if entry is None:
        return None
    about = entry.description.strip()
    if kind == "transfer":
        said = f"Hand off the conversation to agent {name}, which then answers instead of you."
        schema: Schema = {
            "type": "object",
            "properties": {MESSAGE: {"type": "string", "description": "What the agent should do or know."}},
            "additionalProperties": False,
        }
        description = f"{said} {about}".strip()
        goes_on = is_conversation(entry.input)
        check = _LazyCheck(f"arguments of transfer_to_{name}", schema)
        return Offered("transfer", name, description, schema, check, entry.pool, goes_on=goes_on)
    description = about or f"Call agent {name}."
    taken = entry.input or {}
    if taken.get("type") == "object" and taken.get("properties"):
        check = _LazyCheck(f"input of agent {name!r}", taken)
        return Offered("agent", name, description, taken, check, entry.pool)
    schema = _content_schema(taken)
    check = _LazyCheck(f"input of agent {name!r}", schema)
    return Offered("agent", name, description, schema, check, entry.pool, wraps=True)


def _content_schema(taken: Schema) -> Schema:
    content: Schema = {"type": "string", "description": "The request to the agent."}
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


class _LazyCheck:
    """A check that is built at its first use: most tools that a model sees are never called."""

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
    """Return the message for the model about invalid arguments."""
    # A schema's error may quote all arguments, and the model would read them again with every later request.
    reason = shortened(text_of_error(error), LONGEST_MESSAGE)
    return f"the call was not made: {reason}; correct the arguments and call again"
