"""What a model's agent is asked: its input, in all the forms that it may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime_core import codec
from runtime_core.declare.manifest import Schema
from runtime_core.errors import InvalidInput
from runtime_core.llm.window import Message
from runtime_core.runs.policy import Observation

SCHEMA: Schema = {
    "type": ["string", "array", "object", "number", "boolean"],
    "properties": {"prompt": {"type": ["string", "array"]}, "history": {"type": "array"}},
}
"""Of the input. By the members of an object a manifest shows that an agent can go on with a conversation."""
_MEMBERS = {"prompt", "history", "handed"}
FILE_KINDS = ("image-url", "audio-url", "video-url", "document-url", "binary")
"""Parts of a prompt that are no text; the first four have a `url`, the last `data` (base64) and `media_type`."""


class Asked(msgspec.Struct):
    """An input that was read."""

    prompt: str | list[Any] | None = None  # Any: JSON
    """Text or content parts; None: the history ends with what is to be answered."""
    history: list[Message] | None = None
    """The conversation before it; None: that of the instance."""
    handed: list[str] = []
    """The agents that have handed the conversation over, in order."""
    info: dict[str, Any] = {}  # Any: JSON
    """What the swarm around it says: `team`, `peers`, `handoffs`, `max_steps`."""

    def names(self, member: str) -> list[str]:
        """Names of agents that the swarm gives."""
        found = self.info.get(member, ())
        return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def read(given: object) -> Asked:
    """The input from its JSON: text, content parts, `{"prompt", "history"}`, an Observation, or any data.

    Raises InvalidInput that names the part.
    """
    if isinstance(given, Mapping) and not _MEMBERS.isdisjoint(given):
        return _conversation(given)
    if isinstance(given, Mapping) and "content" in given and "role" not in given:
        try:
            seen = Observation.of(given)
        except TypeError as error:
            raise InvalidInput("input", f"is no observation, {error}") from None
        if seen.content is not given:
            prompt = _prompt(seen.content, "input.content")
            if seen.images:
                files = [{"kind": "image-url", "url": url} for url in seen.images]
                prompt = [*([prompt] if isinstance(prompt, str) else prompt), *files]
            return Asked(prompt, info=seen.info)
    return Asked(_prompt(given, "input"))


def is_conversation(schema: Schema | None) -> bool:
    """Whether an agent with this input can go on with a conversation."""
    return schema is not None and schema.get("properties") == SCHEMA["properties"]


def _conversation(given: Mapping[str, Any]) -> Asked:
    unknown = sorted(given.keys() - _MEMBERS)
    if unknown:
        raise InvalidInput(f"input.{unknown[0]}", "is not known; known are history, prompt")
    history = None
    if given.get("history") is not None:
        history = checked_history(given["history"], "input.history")
    if given.get("prompt") is None:
        if not history or history[-1]["kind"] != "request":
            raise InvalidInput("input.prompt", "is missing: give text or a list of content parts")
        prompt = None
    else:
        prompt = _filled(checked_content(given["prompt"], "input.prompt"), "input.prompt")
    handed = given.get("handed", [])
    if not isinstance(handed, list) or not all(isinstance(name, str) for name in handed):
        raise InvalidInput("input.handed", f"{codec.quoted(handed)} is not a list of names")
    return Asked(prompt, history, handed)


def _prompt(given: object, field: str) -> str | list[Any]:  # Any: JSON
    if given is None:
        raise InvalidInput(field, "is empty: give text")
    if isinstance(given, str) or is_content(given):
        return _filled(checked_content(given, field), field)
    # What another agent of a workflow has given, as the model reads it.
    return json.dumps(given, ensure_ascii=False)


def _filled(content: str | list[Any], field: str) -> str | list[Any]:  # Any: JSON
    if not content or (isinstance(content, str) and not content.strip()):
        raise InvalidInput(field, "is empty: give text")
    return content


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
    """Messages as pydantic-ai writes them, or `{"role", "content"}` of user or assistant. Raises InvalidInput."""
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
            return {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": content}]}
        if given.get("role") == "assistant" and isinstance(given.get("content"), str):
            return {"kind": "response", "parts": [{"part_kind": "text", "content": given["content"]}]}
    raise InvalidInput(
        field, f'{codec.quoted(given)} is no message: give {{"role": "user" or "assistant", "content": text}}'
    )
