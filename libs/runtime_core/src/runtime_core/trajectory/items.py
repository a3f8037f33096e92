"""Recorded steps as items for training, built by a strategy and scored by a reward function."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from runtime_core.errors import InvalidInput
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import decoded
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.model_call import (
    answer_of,
    content_of,
    is_model_call,
    logprobs_of,
    messages_of,
    tool_calls_of,
    usage_of,
)
from runtime_core.wire.step import Status, Step, TaskEnd, place

Score: TypeAlias = float | Mapping[str, Any] | None  # Any: the user's own JSON
_FOLLOWING = frozenset({"tool", "agent", "engine", "ray", "spark", "human"})
"""Kinds of steps that are calls."""


class ItemMeta(msgspec.Struct):
    """The origin and time of an item."""

    session_id: str
    task_id: str
    run_id: str
    agent: str
    step: int
    """The item's number in its task, starting at 1."""
    step_id: str
    """The step of the decision, as in `3.0.1`; empty if the item is the whole run."""
    execute_time: float
    """When the decision began, in epoch milliseconds."""
    pre_agent: str | None
    """The agent of the task's previous item; None for the first."""


class ItemState(msgspec.Struct):
    """What the agent knew when it decided: an item's state."""

    input: Any  # the user's own JSON
    """The run's input."""
    messages: list[Any] | None  # the user's own JSON
    """The messages given to the model; None if the step has none."""
    context: dict[str, Any]  # the user's own JSON
    """The instance's `key`, `attempt`, and members that a strategy adds."""


class ItemAction(msgspec.Struct):
    """What the agent did: an item's action."""

    content: Any  # the user's own JSON
    """The model's answer, or the run's output."""
    tool_calls: list[Any]  # the user's own JSON
    """The model's tool calls, or else the calls that followed: `{"id", "type", "name", "arguments"}`."""
    is_agent_finished: bool
    """Whether it was the run's last decision and the run completed."""
    usage: dict[str, float]
    """Tokens of the model call."""
    logprobs: Any = None  # as the model gives them
    ext_info: dict[str, Any] = {}  # `duration_ms`, `error` of a failure, and members that a strategy adds


class ItemReward(msgspec.Struct):
    """The outcome of an action: an item's reward."""

    tool_outputs: list[dict[str, Any]]  # the tools' own JSON
    """`{"id", "name", "status", "output", "error"}` of each call that followed, in program order."""
    status: str
    """The status of the item's step or run: `completed`, `failed` or `cancelled`."""
    score: float | None = None
    """The reward function's score; None without one."""
    details: dict[str, Any] = {}  # other members that the reward function returned


class TrajectoryItem(msgspec.Struct):
    """State, action and reward of one decision."""

    id: str
    """`task:run:step`: the same in each export."""
    meta: ItemMeta
    state: ItemState
    action: ItemAction
    reward: ItemReward


RewardFunction: TypeAlias = Callable[[TrajectoryItem, TaskEnd | None], Score | Awaitable[Score]]
"""Takes an item and the end of its task (None: it has not ended). Returns a number, an object with `score` and members
to keep in `details`, or None for no score. May be async."""


async def score(item: TrajectoryItem, end: TaskEnd | None, reward: RewardFunction) -> None:
    """Set the item's score. Raises InvalidInput, with the item's id, if the reward function fails."""
    try:
        given = reward(item, end)
        if inspect.isawaitable(given):
            given = await given
    except Exception as error:
        raise InvalidInput("reward", f"failed for item {item.id}: {type(error).__name__}: {error}") from error
    if isinstance(given, Mapping):
        details = dict(given)
        given = details.pop("score", None)
        item.reward.details = details
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InvalidInput(
            "reward",
            f"{given!r} for item {item.id} is not a score: return a finite number, an object with `score`, or None",
        )
    item.reward.score = float(given)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of an agent: a model call with the calls that followed it, or a run without model calls."""

    trajectory: TaskTrajectory
    number: int
    """Its number in the task, starting at 1."""
    run: Step
    """The run's row; if that is not recorded yet, a row with only the run's id."""
    call: Step | None
    """The model call; None if the decision is the whole run."""
    after: list[Step]
    """All steps and runs until the next decision, in program order."""
    last: bool
    previous: TrajectoryItem | None
    """The previous item of the task."""

    @property
    def row(self) -> Step:
        return self.call if self.call is not None else self.run

    @property
    def following(self) -> list[Step]:
        """The calls of tools, agents, engines and humans until the next decision."""
        return [step for step in self.after if step.kind in _FOLLOWING]

    @property
    def usage(self) -> dict[str, float]:
        """Tokens of the model call, or else those that the run reported after it."""
        own = usage_of(self.row)
        if own:
            return own
        reported: Counter[str] = Counter()  # a Counter adds fractions too
        for step in self.after:
            if step.kind == "usage":
                reported.update(step.usage)
        return dict(reported)


class TrajectoryStrategy:
    """Builds one item per decision. Override `build_state`, `build_action` or `build_reward`; `keep` filters items."""

    def items(self, trajectory: TaskTrajectory) -> list[TrajectoryItem]:
        """Return the items of a task, in the order in which the decisions began."""
        made: list[TrajectoryItem] = []
        previous: TrajectoryItem | None = None
        for number, (run, call, after, last) in enumerate(_decisions(trajectory), 1):
            item = self.build(Decision(trajectory, number, run, call, after, last, previous))
            if self.keep(item):
                made.append(item)
            previous = item
        return made

    def keep(self, item: TrajectoryItem) -> bool:
        """Return whether to include an item."""
        return True

    def build(self, decision: Decision) -> TrajectoryItem:
        """Build the item of a decision from its three parts."""
        row, trajectory = decision.row, decision.trajectory
        agent = decision.run.name
        meta = ItemMeta(
            session_id=trajectory.end.session if trajectory.end is not None else "",
            task_id=trajectory.task,
            run_id=decision.run.run,
            agent=agent,
            step=decision.number,
            step_id=row.step,
            execute_time=row.started,
            pre_agent=decision.previous.meta.agent if decision.previous is not None else None,
        )
        return TrajectoryItem(
            id=f"{trajectory.task}:{decision.run.run}:{row.step}",
            meta=meta,
            state=self.build_state(decision),
            action=self.build_action(decision),
            reward=self.build_reward(decision),
        )

    def build_state(self, decision: Decision) -> ItemState:
        """Build the state: what the agent knew when it decided."""
        run = decision.run
        return ItemState(
            input=decoded(run.input),
            messages=messages_of(decision.row),
            context={"key": run.key, "attempt": run.attempt},
        )

    def build_action(self, decision: Decision) -> ItemAction:
        """Build the action: what the agent did."""
        row = decision.row
        ext_info: dict[str, Any] = {"duration_ms": row.ended - row.started}  # Any: see ItemAction
        if row.error is not None:
            ext_info["error"] = {"type": row.error.type, "message": row.error.message}
        if (answer := answer_of(row)) is not None:
            about = {"model": answer.model, "provider": answer.provider, "finish_reason": answer.finish_reason}
            ext_info |= {name: text for name, text in (*about.items(), ("thinking", answer.thinking)) if text}
        named = tool_calls_of(row) if decision.call is not None else None
        return ItemAction(
            content=content_of(row) if decision.call is not None else decoded(row.output),
            tool_calls=named if named is not None else [_call(step) for step in decision.following],
            is_agent_finished=decision.last and decision.run.status == Status.COMPLETED,
            usage=decision.usage,
            logprobs=logprobs_of(row),
            ext_info=ext_info,
        )

    def build_reward(self, decision: Decision) -> ItemReward:
        """Build the reward: the outcome. The reward function sets the score."""
        return ItemReward(tool_outputs=[_output(step) for step in decision.following], status=decision.row.status)


class DefaultTrajectoryStrategy(TrajectoryStrategy):
    """All decisions of all agents, as recorded."""


class FilteredTrajectoryStrategy(TrajectoryStrategy):
    """Filters the items of another strategy: by agent, by number or id of the step, or by a function."""

    def __init__(
        self,
        *,
        agents: Collection[str] | None = None,
        steps: Collection[int | str] | None = None,
        where: Callable[[TrajectoryItem], bool] | None = None,
        of: TrajectoryStrategy | None = None,
    ) -> None:
        self._agents = agents
        self._steps = steps
        self._where = where
        self._of = of if of is not None else DefaultTrajectoryStrategy()

    def items(self, trajectory: TaskTrajectory) -> list[TrajectoryItem]:
        """Return the items that pass, with their original numbers."""
        return [item for item in self._of.items(trajectory) if self.keep(item)]

    def keep(self, item: TrajectoryItem) -> bool:
        """Return whether an item passes all given filters."""
        meta = item.meta
        return (
            (self._agents is None or meta.agent in self._agents)
            and (self._steps is None or meta.step in self._steps or meta.step_id in self._steps)
            and (self._where is None or self._where(item))
        )


class MemoryTrajectoryStrategy(TrajectoryStrategy):
    """For agents whose steps have no messages: adds what the agent has received and said in the task so far.

    Messages are `{"role", "content"}` with the roles `user`, `assistant` and `tool`, per instance of an agent. Messages
    of a step stay.
    """

    def items(self, trajectory: TaskTrajectory) -> list[TrajectoryItem]:
        """Return the default strategy's items, with messages."""
        memories: dict[tuple[str, str], list[dict[str, Any]]] = {}  # Any: the user's own JSON
        heard: set[str] = set()
        made = super().items(trajectory)
        for item in made:
            key = str(item.state.context.get("key") or "")
            memory = memories.setdefault((item.meta.agent, key), [])
            if item.meta.run_id not in heard:
                heard.add(item.meta.run_id)
                memory.append({"role": "user", "content": item.state.input})
            if item.state.messages is None:
                item.state.messages = list(memory)
            message: dict[str, Any] = {"role": "assistant", "content": item.action.content}  # Any: the user's own JSON
            if item.action.tool_calls:
                message["tool_calls"] = item.action.tool_calls
            memory.append(message)
            memory += [
                {"role": "tool", "name": output["name"], "content": output["output"]}
                for output in item.reward.tool_outputs
            ]
        return made


def _decisions(trajectory: TaskTrajectory) -> Iterator[tuple[Step, Step | None, list[Step], bool]]:
    """Yield (run, model call, following steps, whether it is the run's last), by start time."""
    # Keep the last row of each step.
    rows = {(step.run, step.step): step for step in trajectory.steps}
    runs: dict[str, Step] = {}
    parts: dict[str, list[tuple[str, Step]]] = {}
    for (run, path), row in rows.items():
        if path:
            parts.setdefault(run, []).append((path, row))
            continue
        if row.kind == "agent":
            runs[run] = row
        parent, _, started_by = run.rpartition("/")
        if parent:
            parts.setdefault(parent, []).append((started_by, row))
    # A run that still runs, or whose row was lost, has decided too.
    for run in parts:
        if run not in runs:
            name = trajectory.end.agent if trajectory.end is not None and run == ROOT_RUN else ""
            runs[run] = Step(run=run, kind="agent", name=name, status="", started=0.0, ended=0.0)
    made: list[tuple[Step, Step | None, list[Step], bool]] = []
    for run, row in runs.items():
        inside = [part for _, part in sorted(parts.get(run, ()), key=lambda part: place("", part[0]))]
        made += _decisions_of(row, inside)
    made.sort(key=lambda each: ((each[1] or each[0]).started, place(each[0].run, each[1].step if each[1] else "")))
    return iter(made)


def _decisions_of(run: Step, inside: list[Step]) -> list[tuple[Step, Step | None, list[Step], bool]]:
    calls = [at for at, step in enumerate(inside) if is_model_call(step)]
    if not calls:
        return [(run, None, inside, True)]
    ends = [*calls[1:], len(inside)]
    return [(run, inside[at], inside[at + 1 : end], end == len(inside)) for at, end in zip(calls, ends, strict=True)]


def _id(step: Step) -> str:
    return f"{step.run}:{step.step}" if step.step else step.run


def _call(step: Step) -> dict[str, Any]:  # Any: the tools' own JSON
    return {"id": _id(step), "type": step.kind, "name": step.name, "arguments": decoded(step.input)}


def _output(step: Step) -> dict[str, Any]:  # Any: the tools' own JSON
    error = msgspec.to_builtins(step.error) if step.error is not None else None
    return {
        "id": _id(step),
        "name": step.name,
        "status": step.status,
        "output": decoded(step.output),
        "error": {"type": error["type"], "message": error["message"]} if error is not None else None,
    }
