"""The messages between a gateway and its driver process, and the interface of an engine for a driver."""

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
READ_BUFFER_BYTES = 4 * 1024 * 1024
"""The read buffer's size, in bytes: with less, a message of hundreds of megabytes arrives in too many pieces."""
MAX_MESSAGE_BYTES = 2**32 - 1

Message = TypeVar("Message")
Sent = TypeVar("Sent")


class Frames(Generic[Sent, Message]):
    """One end of a connection, which sends and receives messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Message]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Sent) -> None:
        """Send a message. If the other end has gone, the message is lost and the next `receive` returns None.

        Raises ValueError if the message is longer than MAX_MESSAGE_BYTES.
        """
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long: {MAX_MESSAGE_BYTES} are allowed")
        if not self._writer.is_closing():
            # Two writes: joining them would copy a large message.
            self._writer.write(_LENGTH.pack(len(data)))
            self._writer.write(data)

    async def sent(self) -> None:
        """Wait until the sent messages have left the write buffer. Raises OSError."""
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """Return the next message; None if the other end has disconnected or sent an invalid message."""
        try:
            [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            logger.error("closing the connection after an unreadable message: %s", error)
            return None

    def close(self) -> None:
        self._writer.close()


Cause = Literal["function", "invalid", "worker", "limit", "cancelled", "lost", "away"]
"""Why a call has no value.

- `function`: the user's function raised.
- `invalid`: the call cannot run, and no retry helps: unknown name, wrong arguments, a result that cannot be
  encoded or is too large, an import that fails.
- `worker`: the process that ran it died.
- `limit`: it exceeded its time limit and was stopped.
- `cancelled`: it was stopped on request.
- `lost`: the engine was lost while it ran; its progress is unknown.
- `away`: there is no connection to the engine; the call has not started.
"""


class Resources(Struct, frozen=True, omit_defaults=True):
    """The cluster resources that one call of a function uses."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0 means unspecified."""
    custom: dict[str, float] = {}
    """Custom resources of the cluster's nodes, by name."""


class Registered(Struct, frozen=True, tag="registered"):
    """A function by its name in the user's app; the far end imports the app."""

    app: str
    """`package.module:app`."""
    folder: str
    """The folder to import the app from besides `sys.path`: the working directory of the requesting process."""
    name: str
    arguments: bytes
    """A JSON object; for a map, the arguments that all calls share."""


class Mapped(Struct, frozen=True, tag="mapped"):
    """A registered function, called once for each item."""

    function: Registered
    over: str
    """The argument that takes the item."""
    items: bytes
    """A JSON array."""
    in_flight: int
    """The most items that run at the same time; 0 for as many as the engine takes."""


class Pickled(Struct, frozen=True, tag="pickled"):
    """Any function with its arguments, pickled by cloudpickle. From a RuntimeEngine only, never from a stream."""

    payload: bytes
    """(function, args, kwargs)."""


class StepInfo(Struct, frozen=True, omit_defaults=True):
    """The step that a function runs for, as far as the function may know it."""

    task: str = ""
    run: str = ""
    attempt: int = 1
    key: str = ""
    """The idempotency key: the same in each attempt."""
    deadline: float = 0.0
    """The time after which the result is no longer wanted, in epoch seconds; 0 for no deadline."""
    traceparent: str = ""


class Work(Struct, frozen=True):
    """One call to run."""

    call: Registered | Mapped | Pickled
    name: str
    """The name in errors, metrics and the engine's own pages."""
    key: str = ""
    """Identifies the work across attempts, gateways and drivers, so that it can be found again; empty if not needed."""
    timeout_seconds: float = 0.0
    """The limit for a call from its start, or for each item of a map; 0 means no limit."""
    resources: Resources = Resources()
    actors: int = 0
    """The number of long-lived workers for this function; 0 if any worker may run it."""
    batch: bool = False
    """Whether the function returns a command that runs as a batch job."""
    driver_side: bool = False
    """Whether the function runs in the driver process, with the engine's session as its argument `spark`."""
    step: StepInfo = StepInfo()


class Value(Struct, frozen=True, tag_field="end", tag="value"):
    """The result of a call."""

    data: bytes
    """JSON (for a large result, a Reference), or a pickle if the call was pickled. For a map, a JSON array with one
    `{"value": …}` or `{"error": {"type": …, "message": …}}` per item, in order."""


class Error(Struct, frozen=True, tag_field="end", tag="error"):
    """The reason why a call has no value."""

    cause: Cause
    type: str
    message: str
    traceback: str = ""
    pickled: bytes = b""
    """The pickled exception of a pickled call, if it can be pickled."""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """The delay that the function requested by raising Retry."""


Outcome = Value | Error


class RunCall(Struct, frozen=True, tag="run"):
    id: int
    work: Work


class Cancel(Struct, frozen=True, tag="cancel"):
    id: int


class Forget(Struct, frozen=True, tag="forget"):
    key: str


class ConnectionState(Struct, frozen=True, tag="state"):
    """The state of the connection to the engine."""

    connected: bool
    reason: str = ""
    """Why the engine is not connected, in one line with the remedy."""
    info: dict[str, str] = {}
    """Facts about the engine: version, address, resources."""
    trying: bool = False
    """Whether the engine is not connected only because the first attempt is still running."""


class Progress(Struct, frozen=True, tag="progress"):
    id: int
    value: bytes
    """JSON."""


class Ended(Struct, frozen=True, tag="ended"):
    id: int
    outcome: Outcome


ToDriver = RunCall | Cancel | Forget
FromDriver = ConnectionState | Progress | Ended


Report = Callable[[bytes], None]
"""Takes progress, as JSON. Call it on the loop's thread."""


class Away(Exception):
    """The engine cannot be reached, or is not installed; the message says so in one line, with the remedy."""


class Backend(Protocol):
    """One engine. All methods run on one event loop, and none may block it."""

    async def connect(self) -> Mapping[str, str]:
        """Connect to the engine, or start one if none is configured. Return facts about it. Raises Away.

        Called repeatedly, in the same process, until it succeeds once.
        """
        ...

    async def lost(self) -> str:
        """Wait until the engine is lost; return how, in one line. This process then ends, and another one connects."""
        ...

    async def run(self, work: Work, report: Report) -> Outcome:
        """Run one call, or attach to running work with the same key. If cancelled, stop the work on the engine."""
        ...

    async def forget(self, key: str) -> None:
        """Drop this work's result: nobody asks for it again."""
        ...

    async def close(self) -> None:
        """Disconnect from the engine. Work with a key continues there if the engine outlives its driver."""
        ...
