"""What an agent's code sees of its run."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from runtime_core.agents.asked import Asked, call, question, sleep
from runtime_core.agents.branch import Branch
from runtime_core.agents.engine import ENGINES, Engine
from runtime_core.agents.gather import Gather
from runtime_core.agents.local import LocalStep, call_function
from runtime_core.agents.naming import name_and_pool
from runtime_core.agents.outgoing import Emit, SendStep
from runtime_core.encoding import encode
from runtime_core.errors import InvalidInput
from runtime_core.identifiers import idempotency_key

if TYPE_CHECKING:
    from runtime_core.agents.run import Run

# Scopes what `ctx.uuid()` derives; any fixed UUID will do, but it may never change.
_NAMESPACE = uuid.UUID("6f0cb1f3-5f0f-4f57-9d5a-0f6a3c1f7e42")


class AgentContext:
    """Durable steps of one run, and what it knows of its task.

    Most methods return a step to `await` (or to give to `gather`); what it gives is recorded, so that after a
    crash, or in another process, the function runs again from the top and gets the same results without
    doing the work again. Between steps the code must therefore do the same each time: clocks, random numbers
    and requests belong into steps. Plain `asyncio.sleep` and the like work, but start anew with each replay,
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
    def idempotency_key(self) -> str:
        """The same at each attempt and replay of this run, and of no other run."""
        return idempotency_key(self._run.task_id, self._run.run_id)

    @property
    def state(self) -> dict[str, Any]:  # Any: JSON values of the user's choice
        """The instance's durable state: JSON values, as they were when the run began.

        Changes are written by the commit that ends the run.
        """
        return self._run.state.value()

    # ---- asking others -----------------------------------------------------------------------------------

    def tool(self, tool: object, /, **arguments: object) -> Asked[Any]:  # Any: the tool's own JSON
        """Call a tool, by its function or name. Raises ToolError when awaited, if it failed for good."""
        run, branch = self._here("ctx.tool")
        name, pool = name_and_pool(run, "tool", run.functions.tool(tool), tool)
        data = encode(arguments, f"arguments of tool {name!r}")
        return call(run, branch, "tool", name, data=data, pool=pool)

    def agent(self, agent: object, input: object = None, /, *, key: str = "") -> Asked[Any]:  # Any: its own JSON
        """Ask an agent, by its function, class or name, and wait for its answer.

        `key` names the instance; empty: one of its own for this request. Raises AgentError.
        """
        run, branch = self._here("ctx.agent")
        known = run.functions.agent(agent)
        name, pool = name_and_pool(run, "agent", known, agent)
        data = encode(input, "input") if known is None else known.encode_input(input)
        return call(run, branch, "agent", name, data=data, key=key, pool=pool)

    def engine(self, engine: str) -> Engine:
        """Where compute steps run, as in `ctx.engine("ray").call(rank, passages=found)`."""
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
    ) -> Asked[Any]:  # Any: the answer is whatever JSON was sent
        """Ask a human, or whoever answers with `weft.task.signal`.

        After `timeout` (seconds or timedelta; None: no limit) the answer is `default`; without a default,
        HumanTimeout is raised.
        """
        run, branch = self._here("ctx.human")
        shown = encode(data, "data of ctx.human")
        answer = None if isinstance(default, EllipsisType) else encode(default, "default of ctx.human")
        limit = None if timeout is None else _milliseconds(timeout, "timeout of ctx.human")
        return question(run, branch, prompt, data=shown, timeout_ms=limit, default=answer)

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
        body = partial(call_function, fn, args, kwargs, run.threads)
        return LocalStep(run, branch, "step", label, body, data)

    def emit(self, value: object) -> Emit:
        """Send a delta (text or any JSON value) to the client's stream, at once when awaited."""
        run, branch = self._here("ctx.emit")
        return Emit(run, branch, encode(value, "value of ctx.emit"))

    def send(self, agent: object, input: object = None, /, *, key: str = "") -> SendStep:
        """Send a message to an agent without waiting for an answer. It leaves with this turn's commit."""
        run, branch = self._here("ctx.send")
        known = run.functions.agent(agent)
        name, _ = name_and_pool(run, "agent", known, agent)
        data = encode(input, "input") if known is None else known.encode_input(input)
        return SendStep(run, branch, name, key, data)

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
        return max(0, round(seconds * 1000))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(field, f"{delay!r} is no number of seconds and no timedelta") from None


def _label(fn: Callable[..., object]) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__
