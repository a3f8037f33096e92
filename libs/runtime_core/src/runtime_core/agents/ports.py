"""What a run needs from others: the broker in mid-turn, the agent's definition, the app's registered names."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext


class RunPort(Protocol):
    """What a running turn may write on the broker before it commits. Both writes are put-if-absent."""

    async def record(self, step: str, digest: str, status: bytes, payload: bytes) -> bytes:
        """Journal the result of a step; returns the journal value that is stored now, maybe another's.

        Raises Fenced where the owner was declared dead, and BusError; both end the run here without a result.
        """
        ...

    def emit(self, step: str, digest: str, data: bytes) -> None:
        """Send a delta (JSON) to the client. Does not wait; a step that is journaled is sent once."""
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

    def run(self, arguments: bytes, /) -> bytes:
        """Call it with a JSON object of arguments; returns JSON. Blocks, so it is called in a thread."""
        ...


class Functions(Protocol):
    """Finds what the code names, by name or by the object that was registered.

    None: this app has no such thing. A name (text) may then still be another app's, and is sent as it is.
    """

    def tool(self, named: object, /) -> Registered | None: ...

    def agent(self, named: object, /) -> RegisteredAgent | None: ...

    def engine_function(self, named: object, /) -> LocalFunction | None: ...


class Meta(TypedDict, total=False):
    """What the task says of itself."""

    session_id: str
    metadata: Mapping[str, Any]  # Any: the user's own JSON
    deadline: float | None
    """Epoch seconds."""
