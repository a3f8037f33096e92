"""What an agent's code sees of its run."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.codec import quoted
from runtime_core.declare.hook_points import point_named
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput
from runtime_core.ids import checked_key, checked_topic, idempotency_key
from runtime_core.record.usage import Usage, total
from runtime_core.runs.branches import AtEnd, Gather, Job
from runtime_core.runs.calls import (
    Approval,
    ApprovalQuestion,
    Asked,
    Emit,
    Note,
    PublishStep,
    SendStep,
    SpendStep,
    call,
    checked_default,
    question,
    sleep,
)
from runtime_core.runs.engine_calls import Engine
from runtime_core.runs.local_steps import LocalStep, call_function
from runtime_core.runs.model_step import ModelStep, Reserve
from runtime_core.runs.scheduler import Branch
from runtime_core.runs.sharing import context_of
from runtime_core.runs.state import Session
from runtime_core.runs.step import Ready, from_json, name_and_pool
from runtime_core.wire.commands import ENGINES, MAX_SECONDS

if TYPE_CHECKING:
    from runtime_core.declare.manifest import Manifest
    from runtime_core.runs.ports import Functions
    from runtime_core.runs.run import Run
    from runtime_core.sharing.context import Context

# Scopes what `ctx.uuid()` derives; any fixed UUID will do, but it may never change.
_NAMESPACE = uuid.UUID("6f0cb1f3-5f0f-4f57-9d5a-0f6a3c1f7e42")


class AgentContext:
    """Durable steps of one run, and what it knows of its task.

    Most methods return a step to `await` (or to give to `gather`); what it gives is recorded, so that after a
    crash, or in another process, the function runs again from the top and gets the same results without
    doing the work again. Between steps the code must therefore do the same each time: clocks, random numbers
    and requests belong into steps. Plain `asyncio.sleep` and the like work, but start again with each replay,
    and while they run the turn goes on.

    Steps may be taken by the function itself and by coroutines that it gives to `gather`, not by other tasks.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    # ---- what is known -----------------------------------------------------------------------------------

    @property
    def task_id(self) -> str:
        return self._run.task_id

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def agent_name(self) -> str:
        """The name under which this agent is registered. (`ctx.agent` asks another agent.)"""
        return self._run.definition.name

    @property
    def key(self) -> str:
        """The key of this agent's instance, as in `writer/<key>`."""
        return self._run.key

    @property
    def attempt(self) -> int:
        """Starts at 1."""
        return self._run.attempt

    @property
    def session_id(self) -> str:
        return self._run.meta.get("session_id", "")

    @property
    def tenant(self) -> str:
        """On whose behalf the task runs: the tenant of the publisher that has submitted it. Empty: nobody has said."""
        return self._run.meta.get("tenant", "")

    @property
    def topic(self) -> str:
        """The topic on which this run's message was published; empty for one that was sent or asked."""
        return self._run.meta.get("topic", "")

    @property
    def sender(self) -> str:
        """Who published it, as `agent/key`; empty where that was no instance with a key."""
        return self._run.meta.get("sender", "")

    @property
    def metadata(self) -> Mapping[str, Any]:  # Any: the user's own JSON
        return self._run.meta.get("metadata", {})

    @property
    def deadline(self) -> float | None:
        """When the task must be done, in epoch seconds; None: no limit."""
        return self._run.meta.get("deadline")

    @property
    def cancelled(self) -> bool:
        """Whether the task was cancelled. A worker that only forgets a waiting run leaves it False."""
        return self._run.cancelled

    @property
    def functions(self) -> Functions:
        """What this app has declared, by name or by the declared object."""
        return self._run.functions

    @property
    def idempotency_key(self) -> str:
        """The same at each attempt and replay of this run, and of no other run."""
        return idempotency_key(self._run.task_id, self._run.run_id)

    @property
    def handlers(self) -> Mapping[str, type[Any]]:  # Any: `Handler` of event-driven runs
        """The app's handlers of messages, by category or name; see `weft.aworld`."""
        return self._run.functions.handlers

    @property
    def state(self) -> dict[str, Any]:  # Any: JSON values of the user's choice
        """The instance's durable state: JSON values, as they were when the run began.

        Changes are written by the commit that ends the run.
        """
        return self._run.state.value()

    @property
    def context(self) -> Context:
        """What the task's runs know together: see `weft.Context`.

        A run that is asked has a fork of the asking run's, and its changes are merged when its result is taken; each
        coroutine of a `gather` has a fork of its own, merged in the order of the parts. So ask for it in each coroutine
        again, and change it between steps only, not in the function of a `ctx.step`.
        """
        return context_of(*self._here("ctx.context"))

    def session(self) -> Session:
        """What all tasks of the session know together: `async with ctx.session() as session` gives its context.

        The changes of the block are merged when it ends without an error. InvalidInput where the task has no session.
        """
        return Session(self)

    # ---- asking others -----------------------------------------------------------------------------------

    def tool(self, tool: object, /, **arguments: object) -> Awaitable[Any]:  # Any: the tool's own JSON
        """Call a tool, by its function or name.

        Raises, when awaited, ToolError if it failed for good, and Denied if a hook refused it.
        """
        run, branch = self._here("ctx.tool")
        name, pool = name_and_pool(run, "tool", run.functions.tool(tool), tool)
        data = encode(arguments, f"arguments of tool {name!r}")
        if run.hooks is not None and (guarded := run.hooks.tool(branch, name, data, pool)) is not None:
            return guarded
        return call(run, branch, "tool", name, data=data, pool=pool)

    def agent(self, agent: object, input: object = None, /, *, key: str = "") -> Asked[Any]:  # Any: its own JSON
        """Ask an agent, by its function, class or name, and wait for its answer.

        `key` names the instance; empty: one of its own for this request. Raises AgentError.
        """
        run, branch = self._here("ctx.agent")
        known = run.functions.agent(agent)
        name, pool = name_and_pool(run, "agent", known, agent)
        data = encode(input, "input") if known is None else known.encode_input(input)
        return call(run, branch, "agent", name, data=data, key=checked_key("key of ctx.agent", key), pool=pool)

    def engine(self, engine: str | None = None) -> Engine:
        """Where compute steps run, as in `ctx.engine("ray").call(rank, passages=found)`.

        None: where the task's `conf.engine` says, or else `local`.
        """
        if engine is None:
            engine = self._run.meta.get("engine", "local")
        if engine not in ENGINES:
            raise InvalidInput("engine", f"{engine!r} is not an engine; there are {', '.join(ENGINES)}")
        return Engine(self._run, engine)

    def human(
        self,
        prompt: str,
        *,
        data: object = None,
        timeout: float | timedelta | None = None,
        default: object = ...,
    ) -> Awaitable[Any]:  # Any: the answer is whatever JSON was sent
        """Ask a human, or whoever answers with `weft.task.signal`.

        After `timeout` (seconds or timedelta; None: no limit) the answer is `default`; without a default,
        HumanTimeout is raised.
        """
        run, branch = self._here("ctx.human")
        prompt = _text(prompt, "prompt of ctx.human")
        shown = encode(data, "data of ctx.human")
        answer = None if isinstance(default, EllipsisType) else encode(default, "default of ctx.human")
        limit = None if timeout is None else _milliseconds(timeout, "timeout of ctx.human")
        if run.hooks is not None:
            guarded = run.hooks.human(branch, prompt, shown, limit, answer)
            if guarded is not None:
                return guarded
        return question(run, branch, prompt, data=shown, timeout_ms=limit, default=answer)

    def approve(
        self,
        what: str,
        *,
        data: object = None,
        timeout: float | timedelta | None = None,
        default: object = ...,
    ) -> Awaitable[Approval]:
        """Let a human approve, deny or edit `data`; the run waits on the broker for the verdict.

        After `timeout` (seconds or timedelta; None: no limit) the answer is `default`, True to approve or False to
        deny; without a default, HumanTimeout is raised. What else is sent as an answer is refused, and the question
        stays open.
        """
        run, branch = self._here("ctx.approve")
        what = _text(what, "prompt of ctx.approve")
        shown = encode(data, "data of ctx.approve")
        answer = checked_default(default, "default of ctx.approve")
        limit = None if timeout is None else _milliseconds(timeout, "timeout of ctx.approve")
        if run.hooks is not None:
            guarded = run.hooks.approve(branch, what, shown, limit, answer)
            if guarded is not None:
                return guarded
        return ApprovalQuestion(run, branch, what, data=shown, timeout_ms=limit, default=answer)

    def sleep(self, delay: float | timedelta) -> Asked[None]:
        """Wait for seconds or days without using a process. A delay below zero is none."""
        run, branch = self._here("ctx.sleep")
        return sleep(run, branch, _milliseconds(delay, "delay of ctx.sleep"))

    # ---- doing something here ----------------------------------------------------------------------------

    def step(self, fn: Callable[..., object], /, *args: object, name: str | None = None, **kwargs: object) -> LocalStep:
        """Do something once: call `fn`, sync (in a thread) or async, and record its result as JSON.

        What it raises becomes LocalStepError (and is recorded), but for Retry and Reject. Arguments that JSON
        cannot hold, such as a client, are given to `fn` all the same and do not count in the digest.
        """
        run, branch = self._here("ctx.step")
        label = name or _label(fn)
        try:
            data = encode({"args": args, **kwargs}, "arguments")
        except InvalidInput:
            data = b""
        body = partial(call_function, fn, args, kwargs)
        return LocalStep(run, branch, "step", label, body, data)

    def model(
        self,
        name: str,
        request: object,
        function: Callable[..., object],
        /,
        *,
        identity: object = None,
        reserve: Reserve | None = None,
    ) -> Awaitable[Any]:  # Any: the model's own JSON
        """Call a model: `function(request)` or `function(request, call)`, sync or async, once; its JSON is recorded.

        `call` is a ModelCall: the attempt, pieces of the answer for the client, what was used. `identity`, JSON, counts
        as what this step asks for in place of name and request, so that another version of the code finds the answer
        again. `reserve` names what the call may use of the task's limits, as `{"tokens": (least, most)}`: where that
        is more than is left, the task ends with LimitExceeded; where other calls of the task hold it just now,
        LocalStepError of type `Reserved` says so: sleep, and ask again.

        The hooks of `before_llm_call` may change or refuse the request, those of `after_llm_call` the result. What the
        function raises becomes LocalStepError.
        """
        run, branch = self._here("ctx.model")
        if run.hooks is not None:
            guarded = run.hooks.model(branch, name, request, function, identity, reserve)
            if guarded is not None:
                return guarded
        return ModelStep(run, branch, name, request, function, identity=identity, reserve=reserve)

    def hook(self, point: str, payload: object = None, /, *, name: str = "") -> Awaitable[Any]:  # Any: as the payload
        """Run the hooks of a point that only the agent's code knows, such as `before_context_compact`.

        Gives the payload as they leave it. Raises Denied. Without hooks it does nothing and takes no place.
        """
        run, branch = self._here("ctx.hook")
        known = point_named(point, "point")
        data = encode(payload, "payload of ctx.hook")
        return Ready(from_json(data)) if run.hooks is None else run.hooks.at(branch, known, name, data)

    def emit(self, value: object) -> Awaitable[None]:
        """Send a delta (text or any JSON value) to the client's stream, at once when awaited."""
        run, branch = self._here("ctx.emit")
        data = encode(value, "value of ctx.emit")
        if run.hooks is not None and (guarded := run.hooks.emit(branch, data)) is not None:
            return guarded
        return Emit(run, branch, data)

    def send(self, agent: object, input: object = None, /, *, key: str = "") -> SendStep:
        """Send a message to an agent without waiting for an answer. It leaves with this turn's commit.

        Awaited it gives the id of the task that the message starts, by which a client finds it.
        """
        run, branch = self._here("ctx.send")
        known = run.functions.agent(agent)
        name, _ = name_and_pool(run, "agent", known, agent)
        data = encode(input, "input") if known is None else known.encode_input(input)
        return SendStep(run, branch, name, checked_key("key of ctx.send", key), data)

    def publish(self, topic: str, data: object = None, /, *, source: str = "") -> PublishStep:
        """Publish a message to every agent that has subscribed to the topic. It leaves with this turn's commit.

        `source` names the instance of each agent that gets it; empty: one of its own for this message.
        """
        run, branch = self._here("ctx.publish")
        instance = checked_key("source of ctx.publish", source)
        return PublishStep(run, branch, checked_topic(topic), instance, encode(data, "data of ctx.publish"))

    def note(self, name: str, value: object) -> Note:
        """Keep a value in the task's trajectory, as a row of kind `message` with this name. Nobody is told of it."""
        run, branch = self._here("ctx.note")
        return Note(run, branch, name, encode(value, "value of ctx.note"))

    def spend(self, *, model: str = "", **amounts: float) -> SpendStep:
        """Report what was used, as in `await ctx.spend(tokens=812, requests=1, cost=0.004, model="…")`.

        It is added to the task's usage by this turn's commit, once, and counts against `max_tokens` and `max_cost`.
        Raises InvalidInput (`spend.…`) for what is no amount.
        """
        run, branch = self._here("ctx.spend")
        return SpendStep(run, branch, Usage.of(amounts, model))

    async def manifests(self) -> Sequence[Manifest] | None:
        """What all apps of the namespace offer, as it is now: no step, so nothing that follows may depend on it alone.

        None where a record is replayed, and nothing can be asked.
        """
        run, _ = self._here("ctx.manifests")
        return await run.of_port(run.port.manifests())

    async def usage(self) -> Usage:
        """What the whole task has used: all runs and calls that were committed, and this run until here.

        A step like others: a replay sees the sums that it saw the first time.
        """
        run, branch = self._here("ctx.usage")

        async def sums() -> object:
            committed = Usage.from_json(await run.port.usage())
            return msgspec.to_builtins(total([committed, *(spend.usage for spend in run.spends)]))

        return msgspec.convert(await LocalStep(run, branch, "step", "ctx.usage", sums, b""), Usage)

    def gather(self, *parts: Awaitable[Any], return_exceptions: bool = False) -> Gather:  # Any: see Gather
        """Do several things at once: steps, and coroutines that take steps themselves.

        Waits for all parts; then gives their results in order, or raises the first error in order.
        """
        try:
            run, branch = self._here("ctx.gather")
        except BaseException:
            for part in parts:
                if hasattr(part, "close"):  # a coroutine that will never be awaited
                    part.close()
            raise
        return Gather(run, branch, parts, return_exceptions)

    def background(self, part: Awaitable[Any], /, *, at_end: AtEnd = "join") -> Job:  # Any: the part's own result
        """Start a step, or a coroutine that takes steps, and go on; `await job` later gives its result.

        Where this function ends first, the run waits for the job, and fails where the job fails and nobody has awaited
        it. With `at_end="cancel"` it is stopped instead. Where this function fails, jobs are stopped. A message to an
        agent that shall outlive the run is a task of its own: `ctx.send`. `await job.cancel()` stops it now.

        What is asked of others leaves when all of this run waits: long work of its own belongs into a tool or an agent,
        or it holds up the rest.
        """
        try:
            run, branch = self._here("ctx.background")
        except BaseException:
            if hasattr(part, "close"):  # a coroutine that will never be awaited
                part.close()
            raise
        if at_end not in ("join", "cancel"):
            raise InvalidInput("at_end", f"{at_end!r} is neither join nor cancel")
        return Job(run, branch, part, at_end)

    # ---- values that are the same at each replay ---------------------------------------------------------

    def now(self) -> datetime:
        """The time (UTC) of the latest result that this branch has seen; at first, of the run's start."""
        _, branch = self._here("ctx.now")
        return datetime.fromtimestamp(branch.now_ms / 1000, UTC)

    def uuid(self) -> uuid.UUID:
        """A UUID derived from the run and the place in the program."""
        return uuid.uuid5(_NAMESPACE, self._place("uuid"))

    def random(self) -> float:
        """A number in [0, 1) derived from the run and the place in the program."""
        digest = hashlib.blake2b(self._place("random").encode(), digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) * 2.0**-53

    def _here(self, what: str) -> tuple[Run, Branch]:
        run = self._run
        return run, run.flow.branch_here(what)

    def _place(self, kind: str) -> str:
        run, branch = self._here(f"ctx.{kind}")
        step = run.take_id(branch)
        run.check_place(step, kind)
        return f"{run.task_id}/{run.run_id}/{step}"


def _milliseconds(delay: float | timedelta, field: str) -> int:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    try:
        milliseconds = max(0, round(seconds * 1000))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(field, f"{delay!r} is no number of seconds and no timedelta") from None
    if milliseconds > MAX_SECONDS * 1000:
        raise InvalidInput(field, f"{delay!r} is more than {MAX_SECONDS} seconds")
    return milliseconds


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(field, f"{quoted(value)} is no text: what is to be seen beside it is data=")
    return value


def _label(fn: Callable[..., object]) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__
