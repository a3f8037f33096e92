"""What a gateway and its driver process say to each other, and what a driver needs of an engine."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
READ_AHEAD = 4 * 1024 * 1024
"""Bytes that a reader buffers: with less, a message of hundreds of megabytes comes in too many small pieces."""
LONGEST = 2**32 - 1

Message = TypeVar("Message")
Sent = TypeVar("Sent")


class Frames(Generic[Sent, Message]):
    """One end of a connection: what it sends, and what it gets."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Message]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Sent) -> None:
        """Put a message on its way; where the other end has gone it is lost, as the next `receive` tells.

        Raises ValueError for one that is too long to travel.
        """
        data = self._encoder.encode(message)
        if len(data) > LONGEST:
            raise ValueError(f"a message of {len(data)} bytes is too long: {LONGEST} are allowed")
        if not self._writer.is_closing():
            # Not together: joining them would copy a large one.
            self._writer.write(_LENGTH.pack(len(data)))
            self._writer.write(data)

    async def sent(self) -> None:
        """Wait until what was sent is with the system, and not in this process's memory. Raises OSError."""
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None where the other end has hung up."""
        try:
            [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            logger.error("hanging up on what cannot be read: %s", error)
            return None

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


Cause = Literal["function", "invalid", "worker", "limit", "cancelled", "lost", "away"]
"""Why a call has no value.

- `function`: the user's function raised.
- `invalid`: it cannot be run so, and no repetition helps: unknown name, wrong arguments, a result that cannot be
  encoded or is too large, an import that fails.
- `worker`: the process that ran it died.
- `limit`: it passed its time limit and was stopped.
- `cancelled`: it was stopped as asked.
- `lost`: the engine was lost while it ran; nobody knows how far it came.
- `away`: there is no connection to the engine; it has not begun.
"""


class Resources(Struct, frozen=True, omit_defaults=True):
    """What one call of a function takes of the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0: not said."""
    custom: dict[str, float] = {}
    """Resources that the cluster's nodes were given by name."""


class Registered(Struct, frozen=True, tag="registered"):
    """A function by its name in the user's app; the far end imports the app."""

    app: str
    """`package.module:app`."""
    folder: str
    """Where the app is imported from besides `sys.path`: the working directory of who asks."""
    name: str
    arguments: bytes
    """A JSON object. Of a map: what is the same in all calls."""


class Mapped(Struct, frozen=True, tag="mapped"):
    """A registered function, called once for each item."""

    function: Registered
    over: str
    """The argument that takes the item."""
    items: bytes
    """A JSON array."""
    in_flight: int
    """How many items are under way at once, at most; 0: as many as the engine takes."""


class Pickled(Struct, frozen=True, tag="pickled"):
    """Any function with its arguments, by cloudpickle: of a RuntimeEngine, never from a stream."""

    payload: bytes
    """(function, args, kwargs)."""


class Step(Struct, frozen=True, omit_defaults=True):
    """What a function may know of the step that it runs for."""

    task: str = ""
    run: str = ""
    attempt: int = 1
    key: str = ""
    """The idempotency key: the same in each attempt."""
    deadline: float = 0.0
    """Epoch seconds after which nobody wants the result; 0: there is no such time."""
    traceparent: str = ""


class Work(Struct, frozen=True):
    """One call to run."""

    call: Registered | Mapped | Pickled
    name: str
    """What errors, metrics and the engine's own pages call it."""
    key: str = ""
    """Names the work over all attempts, gateways and drivers, so that it can be found again; empty: nobody looks."""
    timeout_seconds: float = 0.0
    """Of one call, from when it begins; of a map: of each item. 0: no limit."""
    resources: Resources = Resources()
    actors: int = 0
    """How many long-lived workers are kept for this function; 0: any worker runs it."""
    batch: bool = False
    """The function gives a command, which runs as a batch job."""
    driver_side: bool = False
    """The function runs beside the driver, with the engine's session as its argument `spark`."""
    step: Step = Step()


class Value(Struct, frozen=True, tag_field="end", tag="value"):
    """What a call gave."""

    data: bytes
    """JSON (of a large result: a Reference), or a pickle where the call was one. Of a map: a JSON array with, for each
    item in order, `{"value": …}` or `{"error": {"type": …, "message": …}}`."""


class Error(Struct, frozen=True, tag_field="end", tag="error"):
    """Why a call gave nothing."""

    cause: Cause
    type: str
    message: str
    traceback: str = ""
    pickled: bytes = b""
    """The error itself, of a pickled call, where it can be sent."""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """What the function asked for by raising Retry."""


Outcome = Value | Error


class Run(Struct, frozen=True, tag="run"):
    id: int
    work: Work


class Cancel(Struct, frozen=True, tag="cancel"):
    id: int


class Forget(Struct, frozen=True, tag="forget"):
    key: str


class State(Struct, frozen=True, tag="state"):
    """Whether the engine can be used now."""

    connected: bool
    reason: str = ""
    """Why not, in one line with the remedy."""
    info: dict[str, str] = {}
    """What the engine says of itself: version, address, resources."""
    trying: bool = False
    """Whether it is not connected for the only reason that the first try is under way."""


class Progress(Struct, frozen=True, tag="progress"):
    id: int
    value: bytes
    """JSON."""


class Ended(Struct, frozen=True, tag="ended"):
    id: int
    outcome: Outcome


ToDriver = Run | Cancel | Forget
FromDriver = State | Progress | Ended


Report = Callable[[bytes], None]
"""Takes progress, as JSON. Call it on the loop's thread."""


class Away(Exception):
    """The engine cannot be reached, or is not installed; the message says so in one line, with the remedy."""


class Backend(Protocol):
    """One engine. All methods are called on one event loop, and none may block it."""

    async def connect(self) -> Mapping[str, str]:
        """Reach the engine, or start one where none was named; what it says of itself. Raises Away.

        Called again, in the same process, until it succeeds once.
        """
        ...

    async def lost(self) -> str:
        """Wait until the engine is lost, and say how in one line. The process ends then, and another one connects."""
        ...

    async def run(self, work: Work, report: Report) -> Outcome:
        """Run one call, or attach to it where this key runs already. Cancelled, it stops the work where it runs."""
        ...

    async def forget(self, key: str) -> None:
        """Nobody asks for this work's result again."""
        ...

    async def close(self) -> None:
        """Let go of the engine. Work with a key goes on there where the engine outlives its driver."""
        ...
