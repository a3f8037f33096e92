"""The context of a run, as the agent's code sees it: the methods that make steps, and facts about the task."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import msgspec

from runtime_core.declare.manifest import point_named
from runtime_core.declare.schema import encode
from runtime_core.engines.local import engine_name
from runtime_core.errors import InvalidInput
from runtime_core.runs.branches import CHANGED, AtEnd, Gather, Job, Released, limited
from runtime_core.runs.calls import (
    ApprovalQuestion,
    Emit,
    Note,
    PublishStep,
    QuestionStep,
    RequestStep,
    SendStep,
    Session,
    SpendStep,
    call,
    call_agent,
    check_awaitable,
    checked_conf,
    checked_default,
    checked_patch,
    checked_text,
    milliseconds,
    patched,
    receive,
    sleep,
)
from runtime_core.runs.effects import answer_type
from runtime_core.runs.engine_calls import Engine
from runtime_core.runs.journal import from_json
from runtime_core.runs.model_step import ModelStep
from runtime_core.runs.scheduler import Branch
from runtime_core.runs.step import CallTarget, LocalStep, Ready, call_function, label_of, name_and_pool, with_positions
from runtime_core.wire.commands import ENGINES
from runtime_core.wire.ids import checked_key, checked_message, checked_topic, idempotency_key, uuid_of_place
from runtime_core.wire.step import Usage, total_usage

if TYPE_CHECKING:
    from runtime_core.declare.declaration import Agent
    from runtime_core.declare.manifest import Manifest
    from runtime_core.declare.tool import ToolContext
    from runtime_core.engines.runtime_engine import RuntimeEngine
    from runtime_core.runs.effects import Approval
    from runtime_core.runs.execution import Execution
    from runtime_core.runs.ports import Functions, Reserve
    from runtime_core.runs.shared_context import Context
    from runtime_core.runs.step import DurableStep, HasStep, MaybeAsync, Plain

P = ParamSpec("P")
R = TypeVar("R")
Input = TypeVar("Input")


class AgentContext:
    """The durable steps of one run, and facts about its task.

    Most methods return a step to `await` (or to pass to `gather`). Its result is recorded. After a crash, or in another
    process, the function runs again from the top and gets the recorded results without repeating the work. So the code
    between steps must do the same each time: clocks, random numbers and requests belong in steps. `asyncio.sleep` works
    too, but each replay waits again, and the turn lasts as long as the wait.

    Only the function itself, and coroutines that it passes to `gather`, `background` or `wait_for`, may
    take steps: a replay cannot find the steps of an asyncio task again. So `asyncio.gather`, `asyncio.TaskGroup`,
    `asyncio.create_task`, `asyncio.wait_for` and `asyncio.timeout` around a step end the run with a WeftError that
    names the replacement.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Execution) -> None:
        self._run = run

    @property
    def task_id(self) -> str:
        """The id of the task, as `TaskHandle.task_id`."""
        return self._run.task_id

    @property
    def run_id(self) -> str:
        """`r` in the agent that the task started; in an agent that step 2 of it called, `r/2`."""
        return self._run.run_id

    @property
    def agent_name(self) -> str:
        """The name under which this agent is registered. (`ctx.agent` calls another agent.)"""
        return self._run.definition.name

    @property
    def key(self) -> str:
        """The key of this agent's instance, as in `writer/<key>`."""
        return self._run.key

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1.

        Where an earlier attempt has recorded the following steps, it is the number of that attempt: the code takes the
        same path in each replay.
        """
        return self._run.read_attempt()

    @property
    def session_id(self) -> str:
        """The session that the submit named; empty: none."""
        return self._run.meta.get("session_id", "")

    @property
    def tenant(self) -> str:
        """The tenant of the publisher that submitted the task; empty: none."""
        return self._run.meta.get("tenant", "")

    @property
    def topic(self) -> str:
        """The topic on which this run's message was published; empty for other messages."""
        return self._run.meta.get("topic", "")

    @property
    def sender(self) -> str:
        """The publisher of that message, as `agent/key`; empty if it was not an instance with a key."""
        return self._run.meta.get("sender", "")

    @property
    def metadata(self) -> Mapping[str, Any]:  # Any: the user's own JSON
        """What the submit gave as `SubmitOptions(metadata=…)`; empty if it gave none."""
        return self._run.meta.get("metadata", {})

    @property
    def deadline(self) -> float | None:
        """When the task must end, in epoch seconds; None: no limit."""
        return self._run.meta.get("deadline")

    @property
    def cancelled(self) -> bool:
        """Whether the task was cancelled. It stays False if the process only drops a waiting run from memory."""
        return self._run.cancelled

    @property
    def functions(self) -> Functions:
        """The declarations of this app, by name or by the declared object."""
        return self._run.functions

    @property
    def idempotency_key(self) -> str:
        """The same in each attempt and replay of this run, and different for every other run."""
        return idempotency_key(self._run.task_id, self._run.run_id)

    @property
    def handlers(self) -> Mapping[str, type[Any]]:  # Any: `Handler` of event-driven runs
        """The app's handlers of messages, by category or name; see `weft.aworld`."""
        return self._run.functions.handlers

    @property
    def state(self) -> dict[str, Any]:  # Any: JSON values of the user's choice
        """The instance's durable state: JSON values, as of the start of the run.

        The commit that ends the run writes the changes. A run without a key has no instance: its state ends with it.
        """
        if self._run.state.released:
            raise self._run.flow.misuse(CHANGED)
        return self._run.state.value()

    @property
    def context(self) -> Context:
        """The context that the task's runs share: see `weft.Context`.

        A called run has a fork of the calling run's context. Its changes are merged when the caller gets its result.
        Each coroutine of a `gather` has its own fork; forks are merged in the order of the parts. So get the context
        again in each coroutine, and change it only between steps, not in the function of a `ctx.step`.
        """
        run, branch = self._here("ctx.context")
        return run.context_of(branch)

    @property
    def uses_context(self) -> bool:
        """Whether the code has read or changed `ctx.context` here."""
        return self._here("ctx.uses_context")[1].uses_context

    def session(self) -> Session:
        """The context that all tasks of the session share: `async with ctx.session() as session:`.

        Changes are merged when the block ends without an error. Raises InvalidInput if the task has no session.
        """
        return Session(self._run)

    @property
    def tool_limits(self) -> Sequence[Sequence[str]]:
        """The lists of tools (names or patterns) that must all allow a call of this run; empty: all are allowed."""
        return self._run.limits_of_tools()

    def allow_tools(self, *names: str) -> None:
        """Limit this run, and all that it calls or sends from now on, to these tools: names, or patterns as `files.*`.

        Limits only add up. A call of any other tool raises ToolError of type `NotAllowed`. Call it with the same names
        in each replay.
        """
        self._here("ctx.allow_tools")[0].allow_tools([checked_text(name, "name of ctx.allow_tools") for name in names])

    def set_tools_conf(self, conf: Mapping[str, Mapping[str, object]]) -> None:
        """Give tools settings, by the tool's name, for the calls of this run and all that it calls from now on.

        A tool reads its own as `ToolContext.conf`. Call it with the same settings in each replay.
        """
        self._here("ctx.set_tools_conf")[0].carry("tools_conf", checked_conf(conf))

    # ---- calls -------------------------------------------------------------------------------------------

    @overload
    def tool(
        self, tool: Callable[Concatenate[ToolContext, P], Coroutine[Any, Any, R]], /,
        *args: P.args, **arguments: P.kwargs,
    ) -> Awaitable[R]: ...  # fmt: skip
    @overload
    def tool(
        self, tool: Callable[Concatenate[ToolContext, P], R], /, *args: P.args, **arguments: P.kwargs
    ) -> Awaitable[R]: ...
    @overload
    def tool(
        self, tool: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **arguments: P.kwargs
    ) -> Awaitable[R]: ...
    @overload
    def tool(self, tool: Callable[P, R], /, *args: P.args, **arguments: P.kwargs) -> Awaitable[R]: ...
    @overload
    def tool(self, tool: str | CallTarget | HasStep, /, **arguments: object) -> Awaitable[Any]: ...
    def tool(self, tool: object, /, *args: object, **arguments: object) -> Awaitable[Any]:  # Any: the tool's own result
        """Call a tool, given its function or name.

        The result of a function has its return type; the result of a name is JSON. When awaited, raises ToolError if
        the tool failed permanently, Denied if a hook denied it, and InvalidResult if a result has a different type.
        """
        run = self._run
        branch = run.flow.branch_here("ctx.tool")
        known = run.functions.tool(tool)
        name, pool = name_and_pool(run, "tool", known, tool)
        if args:
            arguments = with_positions(args, arguments, name, known)
        data = encode(arguments, f"arguments of tool {name!r}")
        reader = None if known is None or isinstance(tool, str) else known.result_reader
        if run.hooks is not None and (guarded := run.hooks.tool(branch, name, data, pool, reader)) is not None:
            return guarded
        return call(run, branch, "tool", name, data=data, pool=pool, reader=reader)

    @overload
    def agent(
        self, agent: Callable[[AgentContext, Input], Coroutine[Any, Any, R]], input: Input, /, *, key: str = ...
    ) -> RequestStep[R]: ...
    @overload
    def agent(
        self, agent: Callable[[AgentContext], Coroutine[Any, Any, R]], /, *, key: str = ...
    ) -> RequestStep[R]: ...
    @overload
    def agent(
        self, agent: str | CallTarget | type[Agent], input: object = ..., /, *, key: str = ...
    ) -> RequestStep[Any]: ...
    def agent(self, agent: object, input: object = None, /, *, key: str = "") -> RequestStep[Any]:  # Any: its result
        """Call an agent, given its function, class or name, and wait for its answer.

        The answer of a function has its return type; other answers are JSON. `key` names the instance; empty: a new one
        for this call. When awaited, raises AgentError if it failed, and InvalidResult if an answer has a different
        type.
        """
        run, branch = self._here("ctx.agent")
        return call_agent(run, branch, agent, input, key=key)

    def engine(self, engine: str | type[RuntimeEngine] | None = None) -> Engine:
        """Return an engine for compute steps, as in `ctx.engine("ray").call(rank, passages=found)`.

        None: the task's `conf.engine`, or `local`. An engine that `app.add_engine` has declared is named as
        `package.module:Class`, or given as its class.
        """
        if engine is None:
            engine = self._run.meta.get("engine", "local")
        name = engine if isinstance(engine, str) else engine_name(engine)
        if name not in ENGINES:
            self._run.functions.engines.check(name)
        return Engine(self._run, name)

    @overload
    def human(
        self, prompt: str, *, type: type[R], data: object = ..., timeout: float | timedelta | None = ...,
        default: object = ...,
    ) -> Awaitable[R]: ...  # fmt: skip
    @overload
    def human(
        self, prompt: str, *, type: object = ..., data: object = ..., timeout: float | timedelta | None = ...,
        default: object = ...,
    ) -> Awaitable[Any]: ...  # fmt: skip
    def human(
        self, prompt: str, *, type: object = None, data: object = None, timeout: float | timedelta | None = None,
        default: object = ...,
    ) -> Awaitable[Any]:  # fmt: skip  # Any: of the type, or whatever JSON was sent
        """Ask a human, or another program that answers with `weft.task.signal`.

        With a `type`, an answer that does not fit its JSON schema is refused, and the result has the type. After
        `timeout` (seconds or timedelta; None: no limit) it is `default`; without one, HumanTimeout is raised.
        """
        run, branch = self._here("ctx.human")
        prompt = checked_text(prompt, "prompt of ctx.human")
        shown = encode(data, "data of ctx.human")
        answer = None if isinstance(default, EllipsisType) else encode(default, "default of ctx.human")
        expected = None if type is None else answer_type(type, answer)
        limit = None if timeout is None else milliseconds(timeout, "timeout of ctx.human", least=1)
        if run.hooks is not None:
            guarded = run.hooks.human(branch, prompt, shown, limit, answer, expected)
            if guarded is not None:
                return guarded
        return QuestionStep(run, branch, prompt, data=shown, timeout_ms=limit, default=answer, expected=expected)

    def approve(
        self, what: str, *, data: object = None, timeout: float | timedelta | None = None, default: object = ...
    ) -> Awaitable[Approval]:
        """Let a human approve, deny or edit `data`; the run waits on the broker for the verdict.

        After `timeout` (as for `human`) the answer is `default`, True to approve or False to deny; without a default,
        HumanTimeout is raised. The broker refuses any other answer, and the question stays open.
        """
        run, branch = self._here("ctx.approve")
        what = checked_text(what, "prompt of ctx.approve")
        shown = encode(data, "data of ctx.approve")
        answer = checked_default(default, "default of ctx.approve")
        limit = None if timeout is None else milliseconds(timeout, "timeout of ctx.approve", least=1)
        if run.hooks is not None and (guarded := run.hooks.approve(branch, what, shown, limit, answer)) is not None:
            return guarded
        return ApprovalQuestion(run, branch, what, data=shown, timeout_ms=limit, default=answer)

    def receive(
        self, name: str, /, *, timeout: float | timedelta | None = None, default: object = ...
    ) -> RequestStep[Any]:  # Any: the message is whatever JSON was sent
        """Wait for the next message of this name to the task, sent by `TaskHandle.send` or `weft task send`.

        Earlier messages are kept, and each is received once, in order. After `timeout` (seconds above 0 or timedelta;
        None: no limit) the result is `default`; without a default, ReceiveTimeout is raised.
        """
        run, branch = self._here("ctx.receive")
        name = checked_message("name of ctx.receive", name)
        other = None if isinstance(default, EllipsisType) else encode(default, "default of ctx.receive")
        limit = None if timeout is None else milliseconds(timeout, "timeout of ctx.receive", least=1)
        return receive(run, branch, name, timeout_ms=limit, default=other)

    def sleep(self, delay: float | timedelta) -> RequestStep[None]:
        """Wait for seconds or days, without a process. A delay below 0 counts as 0, as in asyncio."""
        return sleep(*self._here("ctx.sleep"), milliseconds(delay, "delay of ctx.sleep"))

    def released(self) -> Released:
        """Give up the run's key inside `async with ctx.released():`, so that the key's next events are handled.

        At the end the run waits for its key and continues with the state that those events left. Inside, `ctx.state`
        must not be used. Raises Deadlock if a run that holds the key waits for this one.
        """
        return Released(self._run)

    # ---- local steps and output --------------------------------------------------------------------------

    @overload
    def step(  # type: ignore[overload-overlap]  # a `fn` with an argument `name`, which is the step's name
        self, fn: Callable[..., MaybeAsync[Plain]], /, *args: object, name: str | None, **kwargs: object
    ) -> DurableStep[Plain]: ...
    @overload
    def step(
        self, fn: Callable[..., object], /, *args: object, name: str | None, **kwargs: object
    ) -> DurableStep[Any]: ...
    @overload
    def step(self, fn: Callable[P, MaybeAsync[Plain]], /, *args: P.args, **kwargs: P.kwargs) -> DurableStep[Plain]: ...
    @overload
    def step(self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> DurableStep[Any]: ...
    def step(self, fn: Callable[..., object], /, *args: Any, name: Any = None, **kwargs: Any) -> DurableStep[Any]:
        """Run `fn` once, async or (in a thread) sync, and record its result as JSON.

        An error of `fn` is recorded and raised as LocalStepError, except Retry and Reject. If an argument has no JSON,
        such as a client, `fn` still gets it, and the digest ignores the arguments.
        """
        run, branch = self._here("ctx.step")
        label = checked_text(name or label_of(fn), "name of ctx.step")
        try:
            data = encode({"args": args, **kwargs}, "arguments")
        except InvalidInput:
            data = b""
        return LocalStep(run, branch, "step", label, partial(call_function, fn, args, kwargs), data)

    def model(
        self, name: str, request: object, function: Callable[..., object], /, *, identity: object = None,
        reserve: Reserve | None = None,
    ) -> Awaitable[Any]:  # fmt: skip  # Any: the model's own JSON
        """Call a model once with `function(request)` or `function(request, call)`, sync or async. Record its JSON.

        `call` is a ModelCall: it has the attempt, streams pieces of the answer, and takes usage reports. `identity`
        (JSON) replaces name and request in the step's digest, so that another version of the code finds the answer.
        `reserve` is the part of the task's limits that the call may use, as `{"tokens": (least, most)}`. If the limits
        have less left, the task ends with LimitExceeded. If other calls of the task hold it, LocalStepError of type
        `Reserved` is raised: sleep and try again.

        Hooks of `before_llm_call` may change or deny the request, hooks of `after_llm_call` the result. An error of the
        function is raised as LocalStepError.
        """
        run, branch = self._here("ctx.model")
        if run.hooks is not None:
            guarded = run.hooks.model(branch, name, request, function, identity, reserve)
            if guarded is not None:
                return guarded
        return ModelStep(run, branch, name, request, function, identity=identity, reserve=reserve)

    def hooked(self, point: str) -> bool:
        """Return whether a hook of this run listens at a point."""
        run = self._run
        known = point_named(point, "point")
        return run.hooks is not None and run.hooks.listens(known)

    def hook(self, point: str, payload: object = None, /, *, name: str = "") -> Awaitable[Any]:  # Any: as the payload
        """Run the hooks of a point that only the agent's code knows, such as `before_context_compact`.

        Returns the payload, which hooks may change. Raises Denied. Without hooks it does nothing.
        """
        run, branch = self._here("ctx.hook")
        known = point_named(point, "point")
        data = encode(payload, "payload of ctx.hook")
        return Ready(from_json(data)) if run.hooks is None else run.hooks.at(branch, known, name, data)

    def emit(self, value: object, *, chunk: bool = False) -> Awaitable[None]:
        """Send output (text or any JSON value) to the client's stream, immediately when awaited.

        With `chunk`, it is a piece of a longer output: readers in the mode OUTPUT do not get it.
        """
        run, branch = self._here("ctx.emit")
        data, name = encode(value, "value of ctx.emit"), "chunk" if chunk else "emit"
        if run.hooks is not None and (guarded := run.hooks.emit(branch, data, name)) is not None:
            return guarded
        return Emit(run, branch, data, name)

    @overload
    def send(
        self, agent: Callable[[AgentContext, Input], Coroutine[Any, Any, object]], input: Input, /, *, key: str = ...
    ) -> SendStep: ...
    @overload
    def send(self, agent: Callable[[AgentContext], Coroutine[Any, Any, object]], /, *, key: str = ...) -> SendStep: ...
    @overload
    def send(self, agent: str | CallTarget | type[Agent], input: object = ..., /, *, key: str = ...) -> SendStep: ...
    def send(self, agent: object, input: object = None, /, *, key: str = "") -> SendStep:
        """Send a message to an agent without waiting for an answer. This turn's commit sends it.

        Await it for the id of the task that the message starts.
        """
        run, branch = self._here("ctx.send")
        known = run.functions.agent(agent)
        name, _ = name_and_pool(run, "agent", known, agent)
        data = encode(input, "input") if known is None else known.encode_input(input)
        return SendStep(run, branch, name, checked_key("key of ctx.send", key), data)

    def publish(self, topic: str, data: object = None, /, *, source: str = "") -> PublishStep:
        """Publish a message to every agent that subscribes to the topic. This turn's commit sends it.

        `source` names the receiving instance of each agent; empty: a new instance for this message.
        """
        run, branch = self._here("ctx.publish")
        instance = checked_key("source of ctx.publish", source)
        return PublishStep(run, branch, checked_topic(topic), instance, encode(data, "data of ctx.publish"))

    def note(self, name: str, value: object) -> Note:
        """Add a row of kind `message` with this name to the task's trajectory."""
        run, branch = self._here("ctx.note")
        return Note(run, branch, checked_text(name, "name of ctx.note"), encode(value, "value of ctx.note"))

    def spend(self, *, model: str = "", **amounts: float) -> SpendStep:
        """Report usage, as in `await ctx.spend(tokens=812, requests=1, cost=0.004, model="…")`.

        This turn's commit adds it to the task's usage, once. It counts against `max_tokens` and `max_cost`. Raises
        InvalidInput (`spend.…`) for an invalid amount.
        """
        run, branch = self._here("ctx.spend")
        return SpendStep(run, branch, Usage.of(amounts, model))

    async def manifests(self) -> Sequence[Manifest] | None:
        """Return the current manifests of all apps in the namespace; None in a replay from the trajectory.

        This is not a step: record what the following code depends on.
        """
        run, _ = self._here("ctx.manifests")
        return await run.of_port(run.port.manifests())

    async def usage(self) -> Usage:
        """Return the task's usage: all committed runs and calls, and this run so far.

        This is a step: a replay gets the same sums.
        """
        run, branch = self._here("ctx.usage")

        async def sums() -> object:
            committed = Usage.from_json(await run.port.usage())
            return msgspec.to_builtins(total_usage([committed, *(spend.usage for spend in run.spends)]))

        return msgspec.convert(await LocalStep(run, branch, "step", "ctx.usage", sums, b""), Usage)

    def gather(self, *parts: Awaitable[Any], return_exceptions: bool = False) -> Gather:  # Any: see Gather
        """Run steps, and coroutines that take steps, concurrently.

        Waits for all parts. Then returns their results in order, or raises the first error in order; with
        `return_exceptions` errors are results.
        """
        run, branch = self._here("ctx.gather", *parts)
        return Gather(run, branch, parts, return_exceptions)

    def background(self, part: Awaitable[R], /, *, at_end: AtEnd = "join") -> Job[R]:
        """Start a step, or a coroutine that takes steps, in the background. Later, `await job` returns its result.

        If this function ends first, the run waits for the job, and fails if the job fails and nobody has awaited it.
        With `at_end="cancel"` it stops the job instead. If this function fails, its jobs stop. `job.cancel()`
        stops a job now. For work that outlives the run, use `ctx.send`.

        Calls are sent only when all branches of the run wait. So put long work into a tool or an agent, or it delays
        the other branches.
        """
        run, branch = self._here("ctx.background", part)
        if at_end not in ("join", "cancel"):
            raise InvalidInput("at_end", f"{at_end!r} is neither join nor cancel")
        return Job(run, branch, part, at_end)

    async def wait_for(self, part: Awaitable[R], /, timeout: float | timedelta) -> R:
        """Wait for a step, or a coroutine that takes steps, at most `timeout` (seconds above 0, or timedelta).

        Raises TimeoutError at the limit. The broker measures it, so it survives restarts. Whatever still runs of `part`
        is stopped, as by `job.cancel()`. A replay takes the same path.
        """
        run, branch = self._here("ctx.wait_for", part)
        limit = milliseconds(timeout, "timeout of ctx.wait_for", least=1)
        result: R = await limited(run, branch, part, limit)
        return result

    def patched(self, name: str) -> bool:
        """Return whether this run follows the changed code: `if ctx.patched("new-search"): … else: …`.

        A run that passed this place before the change gets False, and any other run True. A replay gets the same
        answer. The first answer counts for the whole run; a coroutine of `gather` or `background` that asks first has
        its own. See the page "Change code under running tasks".
        """
        run, branch = self._here("ctx.patched")
        return patched(run, branch, checked_patch(name))

    def now(self) -> datetime:
        """Return the time (UTC) of the latest result that this branch has seen; at first, of the run's start."""
        _, branch = self._here("ctx.now")
        return datetime.fromtimestamp(branch.now_ms / 1000, UTC)

    def uuid(self) -> uuid.UUID:
        """Return a UUID derived from the run and the place in the program."""
        return uuid_of_place(self._place("uuid"))

    def random(self) -> float:
        """Return a number in [0, 1) derived from the run and the place in the program."""
        digest = hashlib.blake2b(self._place("random").encode(), digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) * 2.0**-53

    def _here(self, what: str, *parts: object) -> tuple[Execution, Branch]:
        run = self._run
        try:
            check_awaitable(what, parts)
            return run, run.flow.branch_here(what)
        except BaseException:
            for part in parts:
                if hasattr(part, "close"):  # a coroutine that will never be awaited
                    part.close()
            raise

    def _place(self, kind: str) -> str:
        run, branch = self._here(f"ctx.{kind}")
        return run.place(branch, kind)
