"""Messages on a stream of bytes: each is msgpack, after its length in four bytes."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Generic, TypeVar

import msgspec

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
