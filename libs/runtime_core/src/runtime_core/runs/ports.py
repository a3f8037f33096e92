"""What a run needs from others: the broker in mid-turn, the agent's definition, the app's registered names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from runtime_core.engines.results import Results

if TYPE_CHECKING:
    import asyncio

    from runtime_core.bus.replies import Answer
    from runtime_core.bus.values import CallBegun
    from runtime_core.consumer.effects import Call, Publish, Send
    from runtime_core.declare.hook_points import HookPoint
    from runtime_core.declare.manifest import Manifest
    from runtime_core.declare.retry_policy import RetryPolicy
    from runtime_core.engines.protocol import Step as EngineStep
    from runtime_core.runs.calls import Approval
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.definition import AgentDefinition
    from runtime_core.runs.model_step import Reserve
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch
    from runtime_core.tools.mcp.server import MCPServer
    from runtime_core.tools.tool import Tool


class RunPort(Protocol):
    """What a running turn may write on the broker before it commits. All writes are put-if-absent."""

    async def confirm(self, known: Container[str]) -> None:
        """Make sure that the journal holds no step beyond `known`, before this process does a step by itself.

        Raises JournalMoved where it does, and as `record`; both end the run here without a result.
        """
        ...

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        """Journal the result of a step; returns the journal value that is stored now, maybe another's.

        Raises Fenced where the owner was declared dead, and BusError; both end the run here without a result.
        """
        ...

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        """Begin a model call; `reserve` (JSON, names to `[least, most]`; empty: nothing) is held of the task's limits.

        Raises as `record`; Reserved where it does not fit beside other calls, LimitExceeded where it never will.
        """
        ...

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        """As `record`, for a model call, with what it has used (JSON; empty: nothing), in one write.

        Returns the journal value that is stored now, and which limit the task is over by it (empty: none).
        """
        ...

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        """Send a piece of a model's answer (JSON) to the client. Does not wait, and is not journaled."""
        ...

    def progress(self, step: str, data: bytes) -> None:
        """Show the client how far a step is (JSON). Does not wait, and is not journaled."""
        ...

    async def usage(self) -> bytes:
        """What the whole task has used so far, as the broker sums it (JSON; empty: nothing). Raises as `record`."""
        ...

    async def manifests(self) -> Sequence[Manifest] | None:
        """What all apps of the namespace offer, at most some seconds old; the same object while nothing has changed.

        None: nothing can be asked here, where a record is replayed.
        """
        ...

    def emit(self, step: str, digest: str, data: bytes) -> None:
        """Send a delta (JSON) to the client. Does not wait; a step that is journaled is sent once."""
        ...

    def room(self) -> Awaitable[None] | None:
        """What to await before more is emitted: the broker still has much to take. None: go on.

        Raises, when awaited, LimitExceeded where the task's output is over its limit.
        """
        ...

    def note(self, step: str, digest: str, name: str = "") -> None:
        """Journal a step that has no result but its row in the trajectory. Does not wait."""
        ...

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Send | Publish] = (), state: bytes = b""
    ) -> Mapping[str, asyncio.Future[Answer]]:
        """Ask for results, and send messages, while the turn goes on: a future of the answer for each call's step.

        A repeat asks for nothing twice and sends nothing twice. `state` (JSON; empty: unchanged) is what a call back
        into this instance sees. A caller that gives up cancels its future. Raises as `record`, and LimitExceeded where
        the task would go over its `max_steps`.
        """
        ...


class Definition(Protocol):
    """An agent, as far as a run is concerned."""

    @property
    def name(self) -> str: ...

    @property
    def timeout_seconds(self) -> float:
        """How long one turn may run; the time between turns does not count."""
        ...

    def decode_input(self, data: bytes, /) -> object:
        """The input of the agent's function; raises InvalidInput."""
        ...

    def encode_output(self, value: Any, /) -> bytes:  # Any: the function's own result type
        """JSON of the result; raises InvalidInput."""
        ...

    def start(self, ctx: AgentContext, value: Any, /) -> Coroutine[Any, Any, object]:  # Any: see above
        """The coroutine of one execution from the top."""
        ...


class Registered(Protocol):
    """A tool, agent or engine function that an app has registered."""

    @property
    def name(self) -> str: ...

    @property
    def pool(self) -> str: ...


class RegisteredAgent(Registered, Protocol):
    """An agent of this app, which knows how its input is written."""

    def encode_input(self, value: object, /) -> bytes:
        """JSON of a request; raises InvalidInput."""
        ...


class LocalFunction(Registered, Protocol):
    """An engine function that can run in this process."""

    @property
    def timeout_seconds(self) -> float:
        """How long one call may take, where the engine can end it."""
        ...

    def refusal(self, engine: str, /) -> str:
        """Why this engine cannot run it, in one line; empty: it can."""
        ...

    def item_argument(self, over: str, common: Collection[str], /) -> str:
        """The argument that takes the item of a map. Raises InvalidInput."""
        ...

    def bound(self, arguments: bytes, step: EngineStep, /, *, store: str | None = None) -> Callable[[], object]:
        """The function with its arguments, read from a JSON object, to be called in a thread or elsewhere."""
        ...


class Compute(Protocol):
    """Runs engine functions outside the threads of this process."""

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        ...

    async def run(self, function: LocalFunction, arguments: bytes, step: EngineStep, results: Results, /) -> bytes:
        """Call it with a JSON object of arguments; returns JSON. A cancel stops the call."""
        ...


class Functions(Protocol):
    """Finds what the code names, by name or by the object that was registered.

    None: this app has no such thing. A name (text) may then still be another app's, and is sent as it is.
    """

    def tool(self, named: object, /) -> Registered | None: ...

    def agent(self, named: object, /) -> RegisteredAgent | None: ...

    def engine_function(self, named: object, /) -> LocalFunction | None: ...

    def mcp_server_of(self, tool: str, /) -> MCPServer | None:
        """The declared MCP server whose tool this name is, if it is anybody's and not the app's own."""
        ...

    @property
    def models(self) -> Any:  # Any: `llm.models.OpenModels`, which runs do not know
        """The language models that this process has open for the app."""
        ...

    @property
    def handlers(self) -> Mapping[str, type[Any]]:  # Any: `Handler` of event-driven runs, which runs do not know
        """Handlers of messages, by category or by a name of the app's own."""
        ...

    @property
    def subscribers(self) -> Sequence[Any]:  # Any: `DeclaredSubscriber` of event-driven runs
        """Functions of messages, for all event-driven runs."""
        ...


class RunHooks(Protocol):
    """The hooks of one run. What gives an awaitable does the step with hooks around it; None: it has none there."""

    async def around(self, data: bytes, /) -> object:
        """Run the agent on the input in `data` (JSON)."""
        ...

    def tool(self, branch: Branch, name: str, data: bytes, pool: str, /) -> Awaitable[Any] | None: ...

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

    def emit(self, branch: Branch, data: bytes, /) -> Awaitable[None] | None: ...

    def human(
        self, branch: Branch, prompt: str, data: bytes, timeout_ms: int | None, default: bytes | None, /
    ) -> Awaitable[Any] | None: ...

    def approve(
        self, branch: Branch, prompt: str, data: bytes, timeout_ms: int | None, default: bool | None, /
    ) -> Awaitable[Approval] | None: ...

    def at(self, branch: Branch, point: HookPoint, name: str, payload: bytes, /) -> Awaitable[Any]:
        """The hooks of a point that the agent's code names."""
        ...


class AppHooks(Protocol):
    """The hooks of an app."""

    @property
    def everywhere(self) -> bool:
        """Whether there is a hook or a callback that runs without being named."""
        ...

    def of_ends_agent(self, app: str, /) -> AgentDefinition:
        """The agent that runs the hooks of tasks that ended without being completed."""
        ...

    def ended_task(self, input: bytes, /) -> str:
        """The id of the task that this input of that agent tells of."""
        ...

    def of_run(
        self, run: Run, /, *, of_end: bool, retry: RetryPolicy, entry: Callable[[], str], failed: Callable[[str], None]
    ) -> RunHooks:
        """The hooks of one run; with `of_end` it is a run of the agent of ended tasks.

        `entry` gives the id of the delivery in hand; `failed` is told the point of each execution that failed.
        """
        ...


class DeclaredApp(Protocol):
    """What turns need of an app."""

    @property
    def name(self) -> str: ...

    @property
    def agents(self) -> Mapping[str, AgentDefinition]: ...

    @property
    def tools(self) -> Mapping[str, Tool]: ...

    @property
    def functions(self) -> Functions: ...

    @property
    def hooks(self) -> AppHooks: ...


class Meta(TypedDict, total=False):
    """What the task says of itself."""

    session_id: str
    metadata: Mapping[str, Any]  # Any: the user's own JSON
    tenant: str
    deadline: float | None
    """Epoch seconds."""
    topic: str
    """The topic on which the run's message was published."""
    sender: str
    """Who published it, as `agent/key`."""
    asked: bool
    """Whether it answers a step of a task in another partition."""
    engine: str
    """What `ctx.engine()` stands for; absent: `local`."""
    hooks: Mapping[str, Sequence[str]]
    """Hook point → names that the submit chose; `!` before the name of a guard."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a run of a task, and the owner that makes it."""

    task_id: str
    run_id: str
    key: str = ""
    """The key of the agent's instance."""
    number: int = 1
    owner: str = ""


@dataclass(slots=True)
class Workplace:
    """The functions and resources that a process offers to its runs."""

    functions: Functions
    compute: Compute | None = None
    """Runs the functions of `ctx.engine("local")`; None: threads do."""
    results: Results = field(default_factory=Results)
    """Where that engine stores large results."""
