"""What an execution needs from others: the broker in mid-turn, its definition, the app's declarations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from runtime_core.declare.manifest import Manifest
from runtime_core.engines.results import Results

if TYPE_CHECKING:
    import asyncio

    from runtime_core.bus.commits import CallBegun
    from runtime_core.bus.replies import Answer
    from runtime_core.consumer.effects import Effect, JournaledStep
    from runtime_core.declare.manifest import HookPoint
    from runtime_core.declare.mcp_server import MCPServer
    from runtime_core.declare.schema import Reader
    from runtime_core.declare.tool import Tool
    from runtime_core.engines.function import EngineFunction
    from runtime_core.engines.local import EngineCompute, OwnEngines
    from runtime_core.runs.effects import AnswerType, Approval, Call
    from runtime_core.runs.output import Piece
    from runtime_core.runs.scheduler import Branch


class RecordedCalls(Protocol):
    """Finds steps in the record of tasks."""

    async def __call__(self, task: str, run: str, step: str, /) -> str:
        """Return a step as the call that made it; empty if it is not found, or not soon. Never raises."""
        ...


class RunPort(Protocol):
    """What a turn may read and write on the broker before its commit. Nothing overwrites a stored result."""

    async def confirm(self, known: Container[str]) -> None:
        """Check that the journal holds no step beyond `known`, before this process performs a step.

        Raises JournalMoved if it does, and as `record`. Both end the run here without a result.
        """
        ...

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        """Journal the result of a step. Return the stored journal value, which another process may have written.

        Raises Fenced if the owner was declared dead, and BusError. Both end the run here without a result. Raises
        JournalLost if the broker has lost an earlier step of the turn: store those again first.
        """
        ...

    async def store_again(
        self, journaled: Sequence[JournaledStep], known: Container[str], answered: Sequence[str] = ()
    ) -> str:
        """Store the turn's steps and output again, after the broker has lost them with its last writes.

        Returns the limit that the task exceeds now (empty: none). Raises JournalMoved if another process has stored a
        different result meanwhile, or if the broker has lost the answer to a request of `answered`, which is handled
        again; and TurnTaken if another process is still in this turn.
        """
        ...

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        """Begin a model call and reserve a part of the task's limits: `reserve` is JSON, names to `[least, most]`.

        Raises as `record`; Reserved if it does not fit next to other calls, LimitExceeded if it never will.
        """
        ...

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        """As `record`, for a model call, with its usage (JSON; empty: none) in the same write.

        Returns the stored journal value, and the limit that the task now exceeds (empty: none).
        """
        ...

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        """Send a piece of a model's answer (JSON) to the client, without waiting or journaling."""
        ...

    def progress(self, step: str, data: bytes) -> None:
        """Send progress of a step (JSON) to the client, without waiting or journaling."""
        ...

    async def usage(self) -> bytes:
        """Return the task's usage so far (JSON; empty: none). Raises as `record`."""
        ...

    async def manifests(self) -> Sequence[Manifest] | None:
        """Return the manifests of all apps, at most some seconds old; the same object while nothing changes.

        None: there is no broker, since this is a replay from the trajectory.
        """
        ...

    def emit(self, piece: Piece, known: Container[str]) -> None:
        """Send a piece of output that the run has not sent before, without waiting. `known` are its journaled steps."""
        ...

    def room(self) -> Awaitable[None] | None:
        """Return what to await before the next emit if the broker is behind, or others should run; else None.

        When awaited, raises LimitExceeded if the task's output exceeds its limit, and the errors of failed writes.
        """
        ...

    def note(self, step: str, digest: str, name: str = "") -> None:
        """Journal a step without a result, without waiting."""
        ...

    def mark(self, mark: JournaledStep, known: Iterable[str]) -> None:
        """Journal a mark before any other write of this turn, and before the commit of a turn that waits.

        `known`: the steps of the run's journal, as for `confirm`.
        """
        ...

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b"", *, answered: str = ""
    ) -> Mapping[str, asyncio.Future[Answer]]:
        """Send calls and messages in mid-turn. Return a future of the answer for each call's step.

        `answered` is the newest request whose answer the turn has used (empty: none).

        A repeat sends nothing twice. `state` (JSON; empty: unchanged) is the state that a reentrant call into this
        instance sees. To give up, cancel the future. Raises as `record`, and LimitExceeded if the task would exceed its
        `max_steps`.
        """
        ...


class Definition(Protocol):
    """The definition of a run's agent."""

    @property
    def name(self) -> str: ...

    @property
    def timeout_seconds(self) -> float:
        """The limit of one turn. The time between turns does not count."""
        ...

    @property
    def own_tools(self) -> Sequence[object]:
        """The only tools that its runs may call, as names, patterns or declared functions; empty: all."""
        ...

    def decode_input(self, data: bytes, /) -> object:
        """Decode the input of the agent's function. Raises InvalidInput."""
        ...

    def encode_output(self, value: Any, /) -> bytes:  # Any: the function's own result type
        """Return JSON of the result. Raises InvalidInput."""
        ...


class RegisteredFunction(Protocol):
    """A tool, agent or engine function of this app."""

    @property
    def name(self) -> str: ...

    @property
    def pool(self) -> str: ...

    @property
    def result_reader(self) -> Reader | None:
        """What reads its results for a caller in this program; None if their JSON is enough."""
        ...


class RegisteredAgent(RegisteredFunction, Protocol):
    """An agent of this app, which encodes its input."""

    def encode_input(self, value: object, /) -> bytes:
        """Return JSON of an input. Raises InvalidInput."""
        ...


class Functions(Protocol):
    """Finds declarations by name or by the registered object.

    None: this app does not have it. A name may still belong to another app, so it is sent as it is.
    """

    def tool(self, named: object, /) -> Tool | None: ...

    def agent(self, named: object, /) -> RegisteredAgent | None: ...

    def engine_function(self, named: object, /) -> EngineFunction | None: ...

    def mcp_server_of(self, tool: str, /) -> MCPServer | None:
        """Return the declared MCP server with this tool; None if there is none, or the app has its own."""
        ...

    @property
    def engines(self) -> OwnEngines: ...

    @property
    def models(self) -> Any:  # Any: `llm.models.OpenModels`, which runs do not know
        """The open language models of this process."""
        ...

    @property
    def handlers(self) -> Mapping[str, type[Any]]:  # Any: `Handler` of event-driven runs, which runs do not know
        """Message handlers, by category or by the app's own name."""
        ...

    @property
    def subscribers(self) -> Sequence[Any]:  # Any: `DeclaredSubscriber` of event-driven runs
        """Functions that handle messages in all event-driven runs."""
        ...


Reserve = Mapping[str, tuple[float, float]]
"""The part of the task's limits that a call needs: `tokens`, `cost` → the least that makes it worthwhile, and the most
that it may use."""


class RunHooks(Protocol):
    """The hooks of one run. A method returns an awaitable that runs the step with its hooks, or None without hooks."""

    async def around(self, data: bytes, /) -> object:
        """Run the agent on the input in `data` (JSON)."""
        ...

    def tool(
        self, branch: Branch, name: str, data: bytes, pool: str, reader: Reader | None = None, /
    ) -> Awaitable[Any] | None: ...

    def model(
        self,
        branch: Branch,
        name: str,
        request: object,
        function: Callable[..., object],
        identity: object,
        reserve: Reserve | None,
        /,
    ) -> Awaitable[Any] | None: ...

    def emit(self, branch: Branch, data: bytes, name: str, /) -> Awaitable[None] | None: ...

    def human(
        self,
        branch: Branch,
        prompt: str,
        data: bytes,
        timeout_ms: int | None,
        default: bytes | None,
        expected: AnswerType | None,
        /,
    ) -> Awaitable[Any] | None: ...

    def approve(
        self, branch: Branch, prompt: str, data: bytes, timeout_ms: int | None, default: bool | None, /
    ) -> Awaitable[Approval] | None: ...

    def listens(self, point: HookPoint, /) -> bool: ...

    def at(self, branch: Branch, point: HookPoint, name: str, payload: bytes, /) -> Awaitable[Any]:
        """Run the hooks of a point that the agent's code names."""
        ...


class BackgroundJob(Protocol):
    """A job of `ctx.background`, as its run sees it."""

    id: str
    at_end: Literal["join", "cancel"]
    """What the end of the agent's function does: wait for the job, or stop it."""
    cancelled: bool
    seen: bool
    """Whether the code has its result or its error."""
    given: Sequence[str]
    """The steps that were created outside the job and that it awaits."""

    @property
    def over(self) -> bool:
        """Whether it has ended or was cancelled."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Its error; None if it has none, or is still running."""
        ...

    def merge(self, branch: Branch) -> None:
        """Merge the job's context into that of a branch. A repeat changes nothing."""
        ...

    def stop(self) -> None:
        """Stop it without a step in the journal."""
        ...


class Meta(TypedDict, total=False):
    """The task's metadata, from its submit."""

    session_id: str
    metadata: Mapping[str, Any]  # Any: the user's own JSON
    tenant: str
    deadline: float | None
    """Epoch seconds."""
    topic: str
    """The topic on which the run's message was published."""
    sender: str
    """The publisher, as `agent/key`."""
    asked: bool
    """Whether the task answers a step of a task in another partition."""
    tools: Sequence[Sequence[str]]
    """The lists that must all allow a tool; absent: all tools are allowed."""
    engine: str
    """The engine of `ctx.engine()`; absent: `local`."""
    hooks: Mapping[str, Sequence[str]]
    """Hook point → names from the submit, guards with a leading `!`."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a run of a task, and its owner."""

    task_id: str
    run_id: str
    key: str = ""
    """The key of the agent's instance."""
    number: int = 1
    owner: str = ""


@dataclass(slots=True)
class Workplace:
    """The functions and resources of a process for its runs."""

    functions: Functions
    compute: EngineCompute | None = None
    """Runs the functions of `ctx.engine("local")`; None: in threads."""
    results: Results = field(default_factory=Results)
    """Where that engine stores large results."""
