"""A model's agent as the runtime knows it: how its input is read, what it may call, how a run of it is started."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from pydantic import PydanticUserError, TypeAdapter

from runtime_core.declare.declaration import Place, one_line, shown
from runtime_core.declare.schema import Schema
from runtime_core.errors import ConfigurationError, InvalidInput, WeftError
from runtime_core.lazy import needs_extra
from runtime_core.llm.agent import LLMAgent
from runtime_core.llm.input import SCHEMA, Asked, read
from runtime_core.llm.toolset import FINAL, Toolset, toolset_of
from runtime_core.runs.definition import AgentDefinition, AgentSettings, Coro
from runtime_core.runs.step import from_json

if TYPE_CHECKING:
    from runtime_core.declare.manifest import Manifest
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.ports import Functions

TURN_SECONDS = 3600.0
"""The limit for one turn, in seconds: several long model calls may follow each other without a broker wait."""


class ModelAgent(AgentDefinition):
    """An LLMAgent under a name. Its input is text, content parts, a conversation, an Observation, or any data."""

    sees_observations = True
    """A swarm passes the whole observation, so that the agent knows its team and its handoff targets."""

    def __init__(self, name: str, agent: LLMAgent, place: Place, **settings: Unpack[AgentSettings]) -> None:
        """Raise ConfigurationError for errors that show without the other declarations."""
        settings.setdefault("timeout_seconds", TURN_SECONDS)
        more = settings.get("tools", ())
        # Only the agent's own tool objects: names may belong to another app. The app checks that it declares them.
        settings["tools"] = more if isinstance(more, str) else [*_objects(agent.tools), *more]
        super().__init__(name, agent, place, **settings, description=agent.description)
        self.agent = agent
        self._tools = [*agent.tools, *more]
        # Any: the user's type, known at run time only
        self._output: TypeAdapter[Any] = TypeAdapter(str)
        self._output_schema: Schema = {"type": "string"}
        if agent.output is not None:
            try:
                self._output = TypeAdapter(agent.output)  # type: ignore[arg-type]  # any type of the user's
                self._output.json_schema()
                self._output_schema = self._output.json_schema(mode="serialization")
            except (PydanticUserError, TypeError, NameError) as error:
                raise ConfigurationError(
                    f"{self.what} ({place}) has output={agent.output!r}, of which no JSON schema can be made, "
                    f"{one_line(error, 160)}: give a pydantic model, dataclass, TypedDict or plain type"
                ) from error
        # Any: Conversation and pydantic-ai's Agent, which are imported later.
        self._built: tuple[object, Any, Any] | None = None
        self._toolset: tuple[object, Toolset] | None = None

    def decode_input(self, data: bytes) -> Asked:
        try:
            given = from_json(data)
        except WeftError as error:
            raise InvalidInput("input", str(error)) from None
        return read(given)

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, Asked)  # the result of decode_input
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, asked: Asked) -> object:
        models = ctx.functions.models
        if self._built is None or self._built[0] is not models:
            try:
                # In a thread: the import takes seconds, and the loop must send heartbeats.
                loaded = await asyncio.to_thread(importlib.import_module, "runtime_core.llm.conversation")
            except ModuleNotFoundError as error:
                raise ConfigurationError(str(needs_extra(self.what, "llm", error))) from error
            self._built = (models, loaded.Conversation, loaded.agent_of(self, models))
        _, conversation, agent = self._built
        return cast(object, await conversation(ctx, self, asked).run(agent))

    def input_schema(self) -> Schema:
        return SCHEMA

    def output_schema(self) -> Schema | None:
        if self.agent.handoffs:
            return None  # another agent may answer
        return self._output_schema

    def dump(self, output: object) -> object:
        """Return a final answer as JSON."""
        return cast(object, self._output.dump_python(output, mode="json"))

    def toolset(self, functions: Functions, manifests: Sequence[Manifest] | None, asked: Asked) -> Toolset:
        """Return the tools that the model may call for this input. Raises ToolsMissing, ConfigurationError."""
        members = [*self._named(functions, "members"), *asked.names("team")]
        targets = [*self._named(functions, "handoffs"), *asked.names("handoffs")]
        # The manifests stay the same object until something changes.
        key = (id(manifests), members, targets)
        if self._toolset is None or self._toolset[0] != (key, manifests):
            made = toolset_of(
                self.what,
                self._tools,
                members,
                targets,
                FINAL if self.agent.output is not None and self.agent.output_mode == "tool" else "",
                functions,
                manifests,
            )
            self._toolset = ((key, manifests), made)
        return self._toolset[1]

    def _named(self, functions: Functions, member: str) -> list[str]:
        found = []
        for named in getattr(self.agent, member):
            known = functions.agent(named)
            if known is None and not isinstance(named, str):
                raise ConfigurationError(
                    f"{self.what} ({self.place}) has {shown(named)} in {member}, which is no agent of this app: "
                    "declare it, or give a name"
                )
            found.append(named if known is None else known.name)
        return found


def _objects(tools: Sequence[str | Callable[..., object]]) -> list[Callable[..., object]]:
    return [tool for tool in tools if not isinstance(tool, str)]
