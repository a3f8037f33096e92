"""Messages of a conversation as JSON, and the text of an answer while the model writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from runtime_core import codec
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.runs.model_step import ModelCall


Message = dict[str, Any]  # Any: JSON
Part = dict[str, Any]
Outcome = Literal["success", "failed", "denied", "retried"]

FILE_KINDS = ("image-url", "audio-url", "video-url", "document-url", "binary")
"""Parts of a prompt that are no text; the first four have a `url`, the last `data` (base64) and `media_type`."""


def user_part(content: object, at: datetime) -> Part:
    """What the user says: text, or a list of content parts."""
    return {"part_kind": "user-prompt", "content": content, "timestamp": at.isoformat()}


def result_part(name: str, call: str, content: object, at: datetime, outcome: Outcome = "success") -> Part:
    """What a tool call has given, in the place of its id `call`."""
    part = {"part_kind": "tool-return", "tool_name": name, "content": content, "tool_call_id": call}
    if outcome != "success":
        part["outcome"] = outcome
    return {**part, "timestamp": at.isoformat()}


def request(parts: Sequence[Part], instructions: str) -> Message:
    """What is sent to the model next."""
    message: Message = {"kind": "request", "parts": list(parts)}
    if instructions:
        message["instructions"] = instructions
    return message


def response(text: str) -> Message:
    """An answer in the model's place, given by another agent."""
    return {"kind": "response", "parts": [{"part_kind": "text", "content": text}]}


def without_instructions(messages: Sequence[Message]) -> list[Message]:
    """The same conversation for whoever goes on with it, and has instructions of its own."""
    return [{name: part for name, part in message.items() if name != "instructions"} for message in messages]


def with_instructions(messages: Sequence[Message], instructions: str) -> list[Message]:
    """A conversation that ends with a request, for the agent that goes on with it."""
    *before, last = messages
    return [*before, request(last["parts"], instructions)]


def checked_content(given: object, field: str) -> str | list[Any]:  # Any: JSON
    """The content of a prompt: text, or a list of texts and files. Raises InvalidInput."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidInput(field, f"{codec.quoted(given)} is neither text nor a list of content parts")
    return [_content_part(part, f"{field}.{place}") for place, part in enumerate(given)]


def is_content(given: object) -> bool:
    """Whether a list holds parts of a prompt, and not data of another kind."""
    return isinstance(given, list) and bool(given) and all(isinstance(p, str) or _is_part(p) for p in given)


def checked_history(given: object, field: str) -> list[Message]:
    """Messages as this module writes them, or `{"role", "content"}` of user or assistant. Raises InvalidInput."""
    if not isinstance(given, list):
        raise InvalidInput(field, f"{codec.quoted(given)} is not a list of messages")
    return [_message(message, f"{field}.{place}") for place, message in enumerate(given)]


def _is_part(part: object) -> bool:
    return isinstance(part, Mapping) and (part.get("type") in ("text", "image") or part.get("kind") in FILE_KINDS)


def _content_part(part: object, field: str) -> object:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return part["text"]
        if part.get("type") == "image" and isinstance(part.get("url"), str):
            return {"kind": "image-url", "url": part["url"]}
        if part.get("kind") in FILE_KINDS:
            needed = ("data", "media_type") if part["kind"] == "binary" else ("url",)
            missing = [name for name in needed if not isinstance(part.get(name), str)]
            if missing:
                raise InvalidInput(f"{field}.{missing[0]}", "is missing, or is not text")
            return dict(part)
    kinds = ", ".join(FILE_KINDS)
    raise InvalidInput(field, f'{codec.quoted(part)} is no content: give text, or {{"kind": …}} with one of {kinds}')


def _message(given: object, field: str) -> Message:
    if isinstance(given, Mapping):
        if given.get("kind") in ("request", "response") and isinstance(given.get("parts"), list):
            return dict(given)
        if given.get("role") == "user" and given.keys() == {"role", "content"}:
            content = checked_content(given["content"], f"{field}.content")
            return request([{"part_kind": "user-prompt", "content": content}], "")
        if given.get("role") == "assistant" and isinstance(given.get("content"), str):
            return response(given["content"])
    raise InvalidInput(
        field, f'{codec.quoted(given)} is no message: give {{"role": "user" or "assistant", "content": text}}'
    )


BATCH_SECONDS = 0.04
"""How long a piece waits for others."""
BATCH_CHARACTERS = 200


class Pieces:
    """Puts small pieces together, so that a fast model does not cost the broker a write for each word."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._waiting: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        if call.attempt > 1:
            # What an earlier attempt has shown is replaced, even where this one has nothing to say.
            call.stream("")

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= BATCH_CHARACTERS:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._send)

    def close(self) -> None:
        """Send what is left. What was taken back leaves nothing."""
        self._send()

    async def take_back(self) -> None:
        """Tell the client that what it was shown is no answer."""
        self._waiting.clear()
        if self._shown:
            await self._call.again()
            self._call.stream("")

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        self._size = 0
        self._shown = True
        self._call.stream(text)
