"""One request, from its first to its last byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Protocol

import msgspec

from tests.openai_server import chat, responses
from tests.openai_server.answering import Said, filled, say
from tests.openai_server.asked import Asked
from tests.openai_server.gates import Gates
from tests.openai_server.ledger import Entry, Ledger
from tests.openai_server.script import Chooser, Fault, Rule, Script
from tests.openai_server.wire import LAST_CHUNK, Request, chunk_of, head_of, json_reply


class Format(Protocol):
    """One of the two APIs."""

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
        """Read the body. Raises KeyError, TypeError or AttributeError if it does not have this format."""

    def whole(self, said: Said, asked: Asked) -> dict[str, Any]: ...

    def stream(self, said: Said, asked: Asked, pieces: int) -> Iterator[bytes]:
        """The stream's events, to the last."""

    def error_event(self, message: str, number: int) -> bytes:
        """Return a stream's error, as its event of this number."""


FORMATS: Mapping[str, Format] = {"/v1/chat/completions": chat, "/v1/responses": responses}
JSON_HEADERS = {"content-type": "application/json"}


class ClientLeft(Exception):
    """The client closed its connection before it got its answer."""


class Ended(Exception):
    """The script says to close the connection."""


class Model:
    """Answers requests by the script, and keeps the ledger."""

    def __init__(self, ledger: Ledger, gates: Gates, keys: frozenset[str]) -> None:
        self.ledger = ledger
        self.gates = gates
        self._keys = keys
        self._rules: tuple[Rule, ...] = ()
        self.models: tuple[str, ...] = ()
        self._chooser = Chooser((), gates.is_open)

    def play(self, script: Script) -> None:
        self._rules = (*script.rules, *self._rules) if script.more else script.rules
        self.models = script.models or (self.models if script.more else ())
        self._chooser = Chooser(self._rules, self.gates.is_open)

    def refused(self, request: Request) -> bytes | None:
        """The answer to a request whose key is not accepted."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key in self._keys:
            return None
        return error_body("Incorrect API key provided.", "invalid_request_error", "invalid_api_key")

    async def answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. Raises Ended if the connection must be closed."""
        format = FORMATS[request.path]
        try:
            body = msgspec.json.decode(request.body)
            asked: Asked = format.read(body, request.headers)
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            message = f"the body is no request of {request.path}: {type(error).__name__}: {error}"
            writer.write(json_reply(400, error_body(message, "invalid_request_error", None)))
            return
        entry = self.ledger.ask(asked, dict(request.headers), request.body)
        sending = Sending(entry, reader, writer)
        try:
            await self._send(sending, request, format, asked, entry)
            entry.complete = True
        except (ClientLeft, ConnectionError):
            entry.left = True
            raise Ended from None
        finally:
            self.ledger.end(entry)

    async def _send(self, sending: Sending, request: Request, format: Format, asked: Asked, entry: Entry) -> None:
        if (refused := self.refused(request)) is not None:
            return await sending.whole(401, refused)
        if self.models and asked.model not in self.models:
            message = f"The model `{asked.model}` does not exist or you do not have access to it."
            body = error_body(message, "invalid_request_error", "model_not_found")
            return await sending.whole(404, body)
        chosen = self._chooser.choose(asked)
        if chosen is None:
            return await sending.whole(400, error_body(unmatched(asked), "invalid_request_error", None))
        entry.rule, rule = chosen
        await sending.wait(asyncio.sleep(rule.delay) if rule.delay else None)
        if rule.fault is not None:
            reply = fault_of(rule.fault)
        else:
            assert rule.answer is not None
            said = say(rule.answer, asked, entry.number)
            entry.answer = True
            entry.usage = said.usage
            reply = streamed(format, said, asked, rule) if asked.stream else plain(format.whole(said, asked))
        await self._send_pieces(sending, rule, asked, reply)

    async def _send_pieces(self, sending: Sending, rule: Rule, asked: Asked, reply: Reply) -> None:
        cut, gate = rule.cut, rule.gate
        pieces = reply.pieces
        if cut is None and gate is None and not rule.piece_delay:
            return await sending.write(reply.status, reply.head + b"".join(pieces), len(pieces))
        gate_name = filled(gate.name, asked) if gate else ""
        if cut and not cut.headers:
            if gate:
                await self._pass(sending, gate_name)
            raise Ended
        last = min(cut.after, len(pieces) - 1) if cut else len(pieces)
        if gate and not gate.headers:
            # The headers pass together with the first piece.
            pieces = [reply.head + pieces[0], *pieces[1:]]
        else:
            await sending.write(reply.status, reply.head, 0)
        for number, piece in enumerate(pieces):
            if gate and number >= gate.after:
                await self._pass(sending, gate_name)
            if number == last:
                if reply.last_words:
                    await sending.write(reply.status, reply.last_words, 0)
                raise Ended
            await sending.wait(asyncio.sleep(rule.piece_delay) if rule.piece_delay else None)
            await sending.write(reply.status, piece, 1)

    async def _pass(self, sending: Sending, gate: str) -> None:
        sending.entry.waits = gate
        await sending.wait(self.gates.passed(gate))
        sending.entry.waits = None


class Sending:
    """The response stream to one client."""

    def __init__(self, entry: Entry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.entry = entry
        self._reader = reader
        self._writer = writer

    async def whole(self, status: int, body: bytes) -> None:
        await self.write(status, json_reply(status, body), 1)

    async def write(self, status: int, data: bytes, pieces: int) -> None:
        """Write the bytes. Returns when the system has taken them. Raises ClientLeft if the client has closed the
        connection."""
        if self._reader.at_eof():
            raise ClientLeft
        self._writer.write(data)
        await self._writer.drain()
        self.entry.status = status
        self.entry.pieces += pieces

    async def wait(self, awaitable: Awaitable[None] | None) -> None:
        """Wait for this. Raises ClientLeft if the client closes the connection meanwhile."""
        if awaitable is None:
            return
        awaited = asyncio.ensure_future(awaitable)
        # A client sends nothing before it has its answer: what can be read is the end.
        end = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait((awaited, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise ClientLeft
        finally:
            awaited.cancel()
            end.cancel()
            # A reader has one waiter at a time: the next may come only when this one is gone.
            await asyncio.wait((awaited, end))


@dataclass(frozen=True)
class Reply:
    """A response to send."""

    status: int
    head: bytes
    pieces: Sequence[bytes]
    last_words: bytes = b""
    """What is said where the script cuts it."""


def plain(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A body in two pieces. What is not bytes is written as JSON."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    middle = len(data) // 2
    length = {"content-length": str(len(data))}
    return Reply(status, head_of(status, {**JSON_HEADERS, **length, **(headers or {})}), [data[:middle], data[middle:]])


def streamed(format: Format, said: Said, asked: Asked, rule: Rule) -> Reply:
    """A piece for each event."""
    pieces = [chunk_of(event) for event in format.stream(said, asked, rule.pieces)]
    pieces[-1] += LAST_CHUNK
    head = head_of(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"})
    if rule.cut is None or rule.cut.error is None:
        return Reply(200, head, pieces)
    number = min(rule.cut.after, len(pieces) - 1)
    return Reply(200, head, pieces, chunk_of(format.error_event(rule.cut.error, number)) + LAST_CHUNK)


def fault_of(fault: Fault) -> Reply:
    headers = {}
    if fault.retry_after is not None:
        date = formatdate(time.time() + fault.retry_after, usegmt=True)
        headers["retry-after"] = date if fault.date else f"{fault.retry_after:g}"
    if fault.retry_after_ms is not None:
        headers["retry-after-ms"] = f"{fault.retry_after_ms:g}"
    if fault.body is not None:
        return plain(fault.body.encode(), fault.status, headers)
    type, code = ERRORS.get(fault.status, ("server_error", None))
    message = fault.message or f"The test's script answers with status {fault.status}."
    return plain(error_body(message, fault.type or type, fault.code or code), fault.status, headers)


ERRORS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", None),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
}
"""Status → type and code of the error, as the real service says them."""


def error_body(message: str, type: str, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": None, "code": code}})


def unmatched(asked: Asked) -> str:
    return (
        f"no rule of the script matches: api {asked.api!r}, model {asked.model!r}, "
        f"conversation {asked.conversation!r}, {len(asked.users)} user messages, {asked.model_messages} of the model, "
        f"{len(asked.results)} tool results, last user message {(asked.users or ('',))[-1][:200]!r}"
    )
