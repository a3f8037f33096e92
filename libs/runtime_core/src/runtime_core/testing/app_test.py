"""A running app under test, which the fixture `weft_app` gives: its clock, which the test moves, and fakes of its tools
and models.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.client.client import Client
from runtime_core.client.replay import replay_code
from runtime_core.client.task import TaskHandle
from runtime_core.declare.schema import encode_result
from runtime_core.declare.tool import AbandonedThreads, Tool, ToolContext
from runtime_core.errors import ConfigurationError, InvalidInput, WeftError
from runtime_core.host.local import LocalApp
from runtime_core.testing.crashes import HiddenFrames, KillReport, StandIn, When, compare, run_and_kill
from runtime_core.wire.step import ENDED, Status

__tracebackhide__ = HiddenFrames()
POLL_SECONDS = 0.003
RETRY = "e|"
"""How the names of timers of retries begin."""


async def settle(bus: EventBus, timeout: float, *, retries: bool) -> None:
    """Wait until no handler has work. With `retries`, also until no retry waits for its backoff.

    Raises TimeoutError after `timeout` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            while await _open_work(bus, retries):  # noqa: ASYNC110  # the work is on the broker
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"the app is still busy after {timeout:g} s: a tool or an agent takes longer, or a retry waits; "
            "give a larger timeout, or override the slow tool"
        ) from None


async def _open_work(bus: EventBus, retries: bool) -> int:
    work, _ = await bus.idle()
    if retries or not work:
        return work
    # `idle` counts retries that wait for their backoff: the clock can bring them forward.
    return work - sum(member.startswith(RETRY) for member, _ in await bus.timers())


class Clock:
    """The time of an app's timers: sleeps, deadlines, time limits, retries.

    It starts at the real time and runs with it. Schedules keep to the real time.
    """

    def __init__(self, bus: Callable[[], EventBus]) -> None:
        self._bus = bus

    async def now(self) -> datetime:
        """Return the time that timers see, in UTC."""
        return datetime.fromtimestamp(await self._bus().clock_ms() / 1000, UTC)

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, timeout: float = 30
    ) -> None:
        """Move the time forward, and fire the timers that become due, in order.

        After each timer, wait until all work that it caused is done. A sleep that starts on the way counts from there.
        `timeout` is how long that work may take, in real seconds for each timer. Raises TimeoutError, and InvalidInput
        for a negative time.
        """
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if span < timedelta(0):
            raise InvalidInput("clock.advance", f"time cannot go back by {-span}: give a positive time")
        bus = self._bus()
        await settle(bus, timeout, retries=False)
        until = await bus.clock_ms() + round(span.total_seconds() * 1000)
        while (timers := await bus.timers()) and timers[0][1] <= until:
            await self._move_to(bus, timers[0][1])
            await bus.promote()
            await settle(bus, timeout, retries=False)
        await self._move_to(bus, until)

    async def _move_to(self, bus: EventBus, at_ms: int) -> None:
        missing = at_ms - await bus.clock_ms()
        if missing > 0:
            await bus.shift_clock(missing)


class AppTest:
    """Runs an app in this process for one test: `async with AppTest(app) as weft_app`.

    With the pytest plugin, the fixture `weft_app` is one.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.clock = Clock(self._bus)
        """The time of its timers."""
        self._local: LocalApp | None = None
        self._fakes: list[FakeTool] = []

    async def __aenter__(self) -> Self:
        self._local = LocalApp(self.app, trajectory=True)
        await self._local.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._running().__aexit__(kind, error, trace)
        finally:
            for fake in reversed(self._fakes):
                self.app.functions.tools.replace(fake, fake.real)
            self._fakes.clear()
            self.app.functions.models.stand_in = None

    @property
    def client(self) -> Client:
        """The app's client, for anything that this class does not offer."""
        return self._running().client

    async def submit(self, agent: str, input: object = None, **settings: Any) -> TaskHandle:  # Any: as Client.submit
        """Start a task. `settings` are those of `Client.submit`."""
        task: TaskHandle = await self.client.submit(agent, input, **settings)
        return task

    async def answer(self, task: TaskHandle, value: object, *, timeout: float = 30.0) -> str:
        """Wait until a task asks a person a question, answer the oldest one, and return its prompt.

        `timeout` is in real seconds. Raises AssertionError if the task asks nothing, and InvalidInput for an answer
        that does not fit the question.
        """
        await settle(self._bus(), timeout, retries=False)
        questions = (await task.show()).get("questions") or ()
        if not questions:
            raise AssertionError(f"task {task.task_id} has no open question")
        await task.signal(questions[0]["request_id"], value)
        prompt: str = questions[0]["prompt"]
        return prompt

    # -- fakes --------------------------------------------------------------------------------------------------

    def override(self, tool: object, answer: Callable[..., object]) -> FakeTool:
        """Answer the calls of a tool by `answer` until the test ends.

        Args:
            tool: The tool's function or name. Raises ConfigurationError if the app does not declare it.
            answer: A function, async or plain, that gets the tool's arguments by name.

        Returns:
            The fake, whose `calls` has the arguments of each call.
        """
        fake = FakeTool(tool_of(self.app, tool), answer)
        self.app.functions.tools.replace(fake.real, fake)
        self._fakes.append(fake)
        return fake

    def script_model(self, *replies: Reply) -> ScriptedModel:
        """Answer the model requests of all agents by these replies, in their order, until the test ends.

        A reply is a text, a `ToolCall`, a list of them, or an exception. Returns the model, whose `requests` has the
        messages of each request.
        """
        scripted = ScriptedModel(replies)
        self.app.functions.models.stand_in = scripted.model()
        return scripted

    # -- assertions ---------------------------------------------------------------------------------------------

    async def assert_completed(self, task: TaskHandle, *, timeout: float = 30.0) -> Any:  # Any: JSON
        """Wait for the end of a task and return its output.

        Raises AssertionError with the error and its traceback if the task failed, and at once if it waits for a timer
        or a person. `timeout` is in real seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while (shown := await task.show())["status"] not in ENDED:
                    await settle(self._bus(), timeout, retries=True)
                    shown = await task.show()
                    if shown["status"] not in ENDED and not (await self._bus().idle())[0]:
                        raise AssertionError(await self._why_waiting(task))
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"task {task.task_id} has not ended after {timeout:g} s") from None
        response = await task.result(timeout)
        if response.status != Status.COMPLETED:
            raise AssertionError(await self._why_failed(task, response.status, response.error))
        return response.output

    async def assert_deterministic(self, task: TaskHandle) -> None:
        """Run the code of an ended task again, with its recorded results, and compare each step.

        Raises AssertionError that names the first step that differs, and the line of the code.
        """
        recorded = await self._running().recorded(task.task_id)
        replayed = await replay_code(recorded, self.app, None)
        if replayed.divergences:
            raise AssertionError(
                f"task {task.task_id} is not deterministic: {replayed.divergences[0]}. "
                "Read clocks, random numbers and files in ctx.step, ctx.now and tools only"
            )
        for run in replayed.runs.values():
            if run.status in (Status.COMPLETED, Status.FAILED) and not run.same:
                raise AssertionError(
                    f"task {task.task_id} is not deterministic: run {run.run} of agent {run.agent!r} ended "
                    f"differently, with {run.output!r}"
                )

    async def kill_and_recover(
        self,
        agent: str,
        input: object = None,
        *,
        key: str = "",
        timeout: float = 60.0,
        answer: Callable[[str], object] | None = None,
    ) -> KillReport:
        """Run a task once without a kill, then once for each place where its process can die, and compare the effects.

        Each process runs until just before or just after one of its commits, and then vanishes. New services continue.
        Status, output, emitted output, and the set of tool calls must be the same as without a kill. Takes about a
        second for each kill. Time moves to the next timer whenever nothing else is left to do, so a sleep of days takes
        no time. Only retries wait in real time.

        Args:
            agent: The agent's name.
            input: Its input.
            key: The instance of the agent.
            timeout: The longest time of one execution, in real seconds.
            answer: A function that answers questions of `ctx.human` and `ctx.approve`. It gets a question's prompt.

        Raises AssertionError that names each difference, or the question or message that the task waits for,
        ConfigurationError for an agent that the app does not declare, and TimeoutError if an execution takes longer
        than `timeout` seconds. The report lists repeated tool calls.
        """
        if agent not in self.app.agents:
            known = ", ".join(sorted(self.app.agents)) or "none"
            raise ConfigurationError(f"app {self.app.name!r} declares no agent {agent!r}: it declares {known}")
        whole = await run_and_kill(self.app, agent, input, key=key, kill_at=None, timeout=timeout, answer=answer)
        if whole.status != Status.COMPLETED:
            raise AssertionError(f"agent {agent!r} {whole.status} without a kill: {whole.error}")
        killed, problems = [], []
        places: list[tuple[int, When]] = [
            (number, when) for number in range(1, len(whole.commits) + 1) for when in ("before", "after")
        ]
        for place in places:
            outcome = await run_and_kill(self.app, agent, input, key=key, kill_at=place, timeout=timeout, answer=answer)
            killed.append(outcome)
            problems += [f"{outcome.kill}: {difference}" for difference in compare(whole, outcome)]
        if problems:
            raise AssertionError(f"agent {agent!r} has other effects after a kill:\n  " + "\n  ".join(problems))
        return KillReport(whole, killed)

    # -- inside -------------------------------------------------------------------------------------------------

    def _running(self) -> LocalApp:
        if self._local is None:
            raise WeftError("the app under test is not running: use the fixture weft_app in an async test")
        return self._local

    def _bus(self) -> EventBus:
        return self.client.buses[0]

    async def _why_waiting(self, task: TaskHandle) -> str:
        bus, now = self._bus(), await self._bus().clock_ms()
        for member, at in await bus.timers():
            kind, _, rest = member.partition("|")
            if kind == "s" and rest.partition("|")[0] == task.task_id:
                left = max(0, at - now) / 1000
                return (
                    f"task {task.task_id} waits for a sleep or an answer, for another {left:g} s: move the time with "
                    f"`await weft_app.clock.advance(seconds={left:g})`, or answer with `weft_app.answer`"
                )
        return f"task {task.task_id} waits for an answer without a deadline: give one with `weft_app.answer`"

    async def _why_failed(self, task: TaskHandle, status: str, error: dict[str, str] | None) -> str:
        said = f": {error['type']}: {error['message']}" if error else ""
        recorded = await self._running().recorded(task.task_id)
        traces = [step.error.traceback for step in recorded.steps if step.error is not None and step.error.traceback]
        return "\n\n".join([f"task {task.task_id} {status}{said}", *traces[-1:]])


class FakeTool(StandIn):
    """A tool whose calls a test answers."""

    def __init__(self, real: Tool, answer: Callable[..., object]) -> None:
        super().__init__(real)
        self._answer = answer
        self._wants_context = (
            self._context_name in inspect.signature(answer).parameters if self._context_name else False
        )
        self.calls: list[dict[str, Any]] = []  # Any: the tool's arguments
        """The arguments of each call, by name, in the order of the calls. A retried call is in it several times."""

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        given = self.arguments.decode(arguments)
        self.calls.append(dict(given))
        if self._wants_context:
            given[self._context_name] = context
        result = self._answer(**given)
        return encode_result(await result if inspect.isawaitable(result) else result)


def tool_of(app: App, named: object) -> Tool:
    """Return a tool of the app. Raises ConfigurationError."""
    found = app.functions.tool(named)
    if found is None:
        known = ", ".join(sorted(app.tools)) or "none"
        raise ConfigurationError(f"app {app.name!r} declares no tool {named!r}: it declares {known}")
    return found


@dataclass(frozen=True)
class ToolCall:
    """What a scripted model asks for: a call of the tool `name` with these arguments."""

    name: str
    arguments: dict[str, Any]  # Any: JSON

    def __init__(self, name: str, /, **arguments: Any) -> None:  # Any: JSON
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arguments", arguments)


Reply = str | ToolCall | Sequence[ToolCall] | Exception
"""An answer in text, calls of tools, or the error that the request raises."""


class ScriptedModel:
    """Answers the requests of models with the replies of a script, in the order of the requests."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = list(replies)
        self.requests: list[list[Any]] = []  # Any: messages of pydantic-ai
        """The messages of each request."""

    def next(self, messages: list[Any]) -> str | Sequence[ToolCall]:  # Any: as above
        """Return the next reply. Raises it if it is an error, and AssertionError after the last one."""
        self.requests.append(messages)
        if len(self.requests) > len(self._replies):
            raise AssertionError(
                f"the script of the model has {len(self._replies)} replies, and this is one more request"
            )
        reply = self._replies[len(self.requests) - 1]
        if isinstance(reply, Exception):
            raise reply
        return [reply] if isinstance(reply, ToolCall) else reply

    def model(self) -> object:
        """Return it as a Model of pydantic-ai. Raises ConfigurationError without `weft[llm]`."""
        try:
            from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
            from pydantic_ai.models.function import DeltaToolCall, FunctionModel
        except ImportError:
            raise ConfigurationError("a scripted model needs pydantic-ai: pip install 'weft[llm]'") from None

        def answer(messages: list[Any], _: object) -> ModelResponse:
            reply = self.next(messages)
            if isinstance(reply, str):
                return ModelResponse(parts=[TextPart(reply)])
            return ModelResponse(parts=[ToolCallPart(each.name, each.arguments) for each in reply])

        async def stream(messages: list[Any], _: object) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
            reply = self.next(messages)
            if isinstance(reply, str):
                yield reply
                return
            yield {
                number: DeltaToolCall(name=each.name, json_args=json.dumps(each.arguments))
                for number, each in enumerate(reply)
            }

        return FunctionModel(answer, stream_function=stream, model_name="scripted")
