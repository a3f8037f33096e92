"""Agents with a policy: it turns observations into actions, until there is no action or another agent takes over."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, Unpack, cast

import msgspec

from runtime_core.declare.declaration import Place, RetryPolicy, needed_argument, one_line
from runtime_core.declare.schema import Schema
from runtime_core.declare.tool import StepTool
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput, LimitExceeded, StepError
from runtime_core.runs.definition import AgentDefinition, AgentSettings, Coro, FunctionAgent
from runtime_core.runs.journal import from_json
from runtime_core.wire.codec import encode as encode_plain

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


@dataclass
class ActionResult:
    """The result of one action. If `success` is False, `error` says why and `content` is None."""

    content: Any = None  # Any: the tool's or agent's own JSON
    success: bool = True
    error: str = ""
    tool_name: str = ""
    tool_call_id: str = ""


@dataclass
class Observation:
    """What an agent observes: `content` is any JSON value, `action_result` the results of its last actions."""

    content: Any = None  # Any: whatever JSON the task's input, or the agent before, is
    observer: str = ""
    images: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    action_result: list[ActionResult] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Whether it has only content."""
        return not (self.observer or self.images or self.info or self.action_result)

    def __str__(self) -> str:
        """Return the content as text, for a prompt or the next observation."""
        return str(self.content)

    @classmethod
    def of(cls, value: object) -> Observation:
        """Return an observation from itself, from its JSON object, or with any other value as its content."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and "content" in value and value.keys() <= _OBSERVED:
            given = {str(name): part for name, part in value.items()}
            given["action_result"] = [
                part if isinstance(part, ActionResult) else ActionResult(**part)
                for part in given.get("action_result", ())
            ]
            return cls(**given)
        return cls(content=value)


@dataclass
class ActionModel:
    """One action of an agent: a call of `tool_name` with `params`; without a name, the answer `policy_info`.

    `tool_name` may also name an agent to call. `agent_name` names an agent to hand off to.
    """

    tool_name: str = ""
    action_name: str = ""
    agent_name: str = ""
    params: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    policy_info: Any = None  # Any: JSON
    tool_call_id: str = ""


@dataclass
class Handoff:
    """An answer that hands over to agent `handoff` of the swarm, with the content for it."""

    handoff: str
    content: Any = None  # Any: JSON


_OBSERVED = {part.name for part in fields(Observation)}
_ACTION = {part.name for part in fields(ActionModel)}
_HANDOFF = {part.name for part in fields(Handoff)}


def handoff_in(output: object) -> Handoff | None:
    """Return the handoff in an agent's output (JSON), or None."""
    if isinstance(output, Handoff):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("handoff"), str) and output.keys() <= _HANDOFF:
        return Handoff(output["handoff"], output.get("content"))
    return None


def actions_in(output: object) -> list[ActionModel]:
    """Return the actions in an agent's output (JSON), which is a list of actions or `{"actions": [...]}`; else []."""
    if isinstance(output, Mapping) and output.keys() == {"actions"}:
        output = output["actions"]
    if not _is_list(output) or not output or not all(_is_action(part) for part in output):
        return []
    return [action_of(part, "actions") for part in output]


def action_of(value: object, field: str) -> ActionModel:
    """Return an action from itself or its JSON object. Raises InvalidInput, which names `field`."""
    if isinstance(value, ActionModel):
        return value
    if isinstance(value, Mapping) and value.keys() <= _ACTION:
        return ActionModel(**value)
    raise InvalidInput(field, f"{value!r} is not an ActionModel: set tool_name and params, or policy_info")


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _is_action(value: object) -> bool:
    if isinstance(value, ActionModel):
        return bool(value.tool_name)
    return isinstance(value, Mapping) and bool(value.get("tool_name")) and value.keys() <= _ACTION


MAX_HANDOFFS = 100
"""How often the peers of a team may hand off before one must answer."""


async def ask_among_peers(ctx: AgentContext, name: str, content: object, peers: Sequence[str]) -> object:
    """Return the answer of an agent, or of the peer that it hands over to."""
    asked = ""
    for _ in range(MAX_HANDOFFS):
        others = [peer for peer in peers if peer != name]
        shown: Any = content  # Any: JSON
        if takes_observation(ctx.functions.agent(name)):
            shown = with_info(Observation(content, asked), {"handoffs": others})
        output: object = await ctx.agent(name, shown)
        handoff = handoff_in(output)
        if handoff is None:
            return output
        if handoff.handoff not in others:
            raise AgentError(
                "UnknownHandoff",
                f"agent {name!r} hands over to {handoff.handoff!r}; it may hand over to {', '.join(others)}",
            )
        asked, name = name, handoff.handoff
        content = content if handoff.content is None else handoff.content
    raise AgentError(
        "LimitExceeded", f"peers {', '.join(peers)} have handed over {MAX_HANDOFFS} times without an answer"
    )


def takes_observation(known: object) -> bool:
    """Whether a declared agent takes an Observation instead of just its content."""
    if getattr(known, "sees_observations", False):
        return True
    if not isinstance(known, FunctionAgent):
        return False
    takes = list(inspect.signature(known.function).parameters.values())[1:2]
    return bool(takes) and (
        takes[0].annotation is Observation or str(takes[0].annotation).split(".")[-1] == "Observation"
    )


def with_info(seen: Observation, info: dict[str, Any]) -> Any:  # Any: JSON
    """Return the observation with this `info` as JSON; its content alone if it has nothing else."""
    whole = dataclasses.replace(seen, info=info)
    return whole.content if whole.plain else dataclasses.asdict(whole)


class ObservingAgent(AgentDefinition):
    """An agent whose input is an Observation, or just its content. It declares no output."""

    def decode_input(self, data: bytes) -> Observation:
        return Observation.of(from_json(data))

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, Observation)  # from decode_input
        return self.observe(ctx, value)

    @abstractmethod
    async def observe(self, ctx: AgentContext, observation: Observation) -> object:
        """Run the agent on this observation."""

    def input_schema(self) -> Schema:
        return {}

    def output_schema(self) -> Schema | None:
        return None


async def act(
    ctx: AgentContext, actions: Sequence[ActionModel], *, team: Sequence[str] = (), peers: Sequence[str] = ()
) -> list[ActionResult]:
    """Perform the actions concurrently and return their results in order. A failed action is a result, not an error.

    A `tool_name` means an agent if it is in `team`, or if it names an agent but no tool; otherwise a tool. Agents in
    `peers` may hand off to each other.
    """
    found = await ctx.gather(*(_step(ctx, action, team, peers) for action in actions), return_exceptions=True)
    return [_result(action, result) for action, result in zip(actions, found, strict=True)]


def _step(ctx: AgentContext, action: ActionModel, team: Sequence[str], peers: Sequence[str]) -> Awaitable[object]:
    functions, name = ctx.functions, action.tool_name
    if name in peers:
        return ask_among_peers(ctx, name, content_of(action), peers)
    if name in team or (functions.tool(name) is None and functions.agent(name) is not None):
        return ctx.agent(name, content_of(action))
    with_action = f"{name}__{action.action_name}"
    if action.action_name and functions.tool(with_action) is not None:
        name = with_action
    return call_tool(ctx, name, action.params)


def call_tool(ctx: AgentContext, name: str, args: Mapping[str, object]) -> Awaitable[Any]:  # Any: the tool's own JSON
    """Call a tool with `args` as named arguments, or as one argument if the tool is an object with `step`."""
    if isinstance(ctx.functions.tool(name), StepTool):
        return ctx.tool(name, **{StepTool.ARGUMENT: args})
    return ctx.tool(name, **args)


def content_of(action: ActionModel) -> object:
    """Return the part of an action that another agent gets."""
    if "content" in action.params:
        return action.params["content"]
    return action.params or action.policy_info


def _result(action: ActionModel, found: object) -> ActionResult:
    """Return the result of an action: its output, or its error."""
    if isinstance(found, StepError):
        return ActionResult(None, False, str(found), action.tool_name, action.tool_call_id)
    if isinstance(found, BaseException):
        raise found
    return ActionResult(found, True, "", action.tool_name, action.tool_call_id)


def observation_after(before: Observation, results: list[ActionResult]) -> Observation:
    """Return the observation after these actions: the content of the last one, and all results."""
    last = results[-1]
    content = last.content if last.success else last.error
    return Observation(content, before.observer, before.images, before.info, results)


MAX_POLICY_CALLS = 100


class _Decided(msgspec.Struct):
    """The recorded result of one call of the policy."""

    actions: list[Any]  # Any: JSON of actions
    answer: Any = None  # Any: JSON
    finished: bool = False
    attributes: dict[str, Any] = {}  # Any: JSON
    """The object's attributes that the call has changed."""


class HasAsyncPolicy(Protocol):
    """An object or class with `async def async_policy(self, observation, info=None)`."""

    @property
    def async_policy(self) -> Callable[..., Any]: ...  # Any: actions or an answer


class HasPolicy(Protocol):
    """An object or class with `def policy(self, observation, info=None)`, which runs in a thread."""

    @property
    def policy(self) -> Callable[..., Any]: ...  # Any: actions or an answer


def has_policy(agent: object) -> bool:
    """Whether this object or class has a policy."""
    return any(callable(getattr(agent, name, None)) for name in ("async_policy", "policy"))


class PolicyDefinition(ObservingAgent):
    """An agent from an object or class with `async_policy` or `policy`."""

    sees_observations = True

    def __init__(
        self,
        name: str,
        agent: object,
        place: Place,
        *,
        max_steps: int = MAX_POLICY_CALLS,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """`max_steps` limits the calls of the policy in one run, unless the observation's `info` does.

        Raises ConfigurationError for an object without a policy, or a class that needs arguments.
        """
        # By default a failed policy fails the task, and the caller decides about a retry.
        settings["retry"] = settings.get("retry") or RetryPolicy(attempts=1)
        super().__init__(
            name,
            agent,
            place,
            **settings,
            description=inspect.getdoc(agent if isinstance(agent, type) else type(agent)) or "",
        )
        if not has_policy(agent):
            raise ConfigurationError(
                f"{self.what} ({place}): {agent!r} is not a subclass of Agent and has no async_policy(observation): "
                "use @app.agent for a function"
            )
        needed = needed_argument(agent) if isinstance(agent, type) else None
        if needed is not None:
            raise ConfigurationError(
                f"{self.what} ({place}): {cast(type, agent).__name__}() needs {needed!r}: give it a default, or "
                "pass an object, which each run copies"
            )
        self.agent = agent
        self.max_steps = max_steps
        named = getattr(agent, "tool_names", None) or ()
        if not isinstance(named, list | tuple) or not all(isinstance(each, str) for each in named):
            raise ConfigurationError(f"{self.what} ({place}) has tool_names={named!r}: give a list of tools' names")
        self.own_tools = self.tools = (*self.tools, *named)

    async def observe(self, ctx: AgentContext, observation: Observation) -> object:
        agent = self._instance()

        async def decide(seen: Observation) -> _Decided:
            return await _decide(self.what, agent, seen)

        info = observation.info
        max_steps = _max_steps(info, self.max_steps)
        for _ in range(max_steps):
            found: Mapping[str, Any] = await ctx.step(decide, observation, name="policy")  # Any: JSON of _Decided
            for name, value in found["attributes"].items():
                # Works for frozen classes, too.
                object.__setattr__(agent, name, value)
            actions = [ActionModel(**action) for action in found["actions"]]
            wanted = [action for action in actions if action.tool_name]
            handoff = _handoff(actions, observation)
            if handoff is not None:
                return handoff
            if found["finished"] or not wanted:
                return _answer(found["answer"], actions)
            observation = observation_after(
                observation, await act(ctx, wanted, team=info.get("team", ()), peers=info.get("peers", ()))
            )
        raise LimitExceeded(f"{self.what} has not finished after max_steps={max_steps} calls of its policy")

    def _instance(self) -> object:
        """Return a new object for one run, so that no task sees another's data."""
        if isinstance(self.agent, type):
            made: object = self.agent()
            return made
        try:
            return copy.deepcopy(self.agent)
        except Exception as error:  # copying runs the user's code
            raise ConfigurationError(
                f"{self.what} ({self.place}) cannot be copied for a run, {one_line(error)}: pass its class, "
                "or define __deepcopy__"
            ) from error


async def _decide(what: str, agent: object, observation: Observation) -> _Decided:
    before = _plain(agent)
    policy = getattr(agent, "async_policy", None)
    if policy is not None:
        made = await cast("Callable[..., Awaitable[object]]", policy)(observation, info=observation.info)
    else:
        made = await _in_thread(cast("Callable[..., object]", getattr(agent, "policy")), observation)  # noqa: B009
    decided = _Decided([], finished=getattr(agent, "finished", False) is True)
    if isinstance(made, ActionModel):
        made = [made]
    if isinstance(made, list) and all(isinstance(action, ActionModel | Mapping) for action in made):
        decided.actions = [vars(action_of(action, f"{what}: action {n}")) for n, action in enumerate(made)]
    else:
        decided.answer = made
    after = _plain(agent)
    decided.attributes = {name: from_json(value) for name, value in after.items() if before.get(name) != value}
    return decided


async def _in_thread(policy: Callable[..., object], observation: Observation) -> object:
    return await asyncio.to_thread(policy, observation, info=observation.info)


def _attributes(agent: object) -> dict[str, object]:
    found: dict[str, object] = dict(getattr(agent, "__dict__", {}))
    for base in type(agent).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(agent, name) and not name.startswith("__"):
                found[name] = getattr(agent, name)
    return found


def _plain(agent: object) -> dict[str, bytes]:
    """Return the attributes that survive a round trip through JSON, as JSON."""
    found = {}
    for name, value in _attributes(agent).items():
        try:
            data = encode_plain(value)
        except (InvalidInput, TypeError):
            continue
        if from_json(data) == value:
            found[name] = data
    return found


def _max_steps(info: Mapping[str, object], default: int) -> int:
    """Return the task's limit, or the default."""
    asked = info.get("max_steps")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else default


def _answer(answer: object, actions: list[ActionModel]) -> object:
    if not actions:
        return answer
    said = [action.policy_info for action in actions]
    return said[0] if len(said) == 1 else said


def _handoff(actions: list[ActionModel], observation: Observation) -> Handoff | None:
    """Return the handoff of the first action that names an allowed agent, or None."""
    allowed = observation.info.get("handoffs", ())
    for action in actions:
        target = action.agent_name or action.tool_name
        if target and target in allowed:
            return Handoff(target, content_of(action))
    return None
