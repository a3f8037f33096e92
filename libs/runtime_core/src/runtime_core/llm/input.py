"""The input of an LLMAgent, in all its forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime_core.declare.manifest import Schema
from runtime_core.errors import InvalidInput
from runtime_core.llm.tokens import Message
from runtime_core.runs.policy import Observation
from runtime_core.wire import codec

SCHEMA: Schema = {
    "type": ["string", "array", "object", "number", "boolean"],
    "properties": {"prompt": {"type": ["string", "array"]}, "history": {"type": "array"}},
}
"""The schema of the input. Its properties show in a manifest that an agent can continue a conversation."""
_MEMBERS = {"prompt", "history", "handed"}
FILE_KINDS = ("image-url", "audio-url", "video-url", "document-url", "binary")
"""The kinds of parts other than text. The first four have a `url`, the last `data` (base64) and `media_type`."""


class AgentInput(msgspec.Struct):
    prompt: str | list[Any] | None = None  # Any: JSON
    """Text or content parts; None: the history ends with the request."""
    history: list[Message] | None = None
    """The conversation before it; None: the conversation of the instance."""
    handed: list[str] = []
    """The agents that handed off the conversation, in order."""
    info: dict[str, Any] = {}  # Any: JSON
    """The members that its swarm adds: `team`, `peers`, `handoffs`, `max_steps`."""

    def names(self, member: str) -> list[str]:
        """Return the names of agents in a member of `info`."""
        found = self.info.get(member, ())
        return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def read(given: object) -> AgentInput:
    """Read an input from its JSON: text, content parts, `{"prompt", "history"}`, an Observation, or any data.

    Raises InvalidInput that names the invalid part.
    """
    if isinstance(given, Mapping) and not _MEMBERS.isdisjoint(given):
        return _conversation(given)
    if isinstance(given, Mapping) and "content" in given and "role" not in given:
        try:
            seen = Observation.of(given)
        except TypeError as error:
            raise InvalidInput("input", f"is not an observation: {error}") from None
        if seen.content is not given:
            prompt = _prompt(seen.content, "input.content")
            if seen.images:
                files = [{"kind": "image-url", "url": url} for url in seen.images]
                prompt = [*([prompt] if isinstance(prompt, str) else prompt), *files]
            return AgentInput(prompt, info=seen.info)
    return AgentInput(_prompt(given, "input"))


def is_conversation(schema: Schema | None) -> bool:
    """Return whether an agent with this input schema can continue a conversation."""
    return schema is not None and schema.get("properties") == SCHEMA["properties"]


def _conversation(given: Mapping[str, Any]) -> AgentInput:
    unknown = sorted(given.keys() - _MEMBERS)
    if unknown:
        raise InvalidInput(f"input.{unknown[0]}", "is not known; choose from history, prompt")
    history = None
    if given.get("history") is not None:
        history = checked_history(given["history"], "input.history")
    if given.get("prompt") is None:
        if not history or history[-1]["kind"] != "request":
            raise InvalidInput("input.prompt", "is missing: pass text or a list of content parts")
        prompt = None
    else:
        prompt = _filled(checked_content(given["prompt"], "input.prompt"), "input.prompt")
    handed = given.get("handed", [])
    if not isinstance(handed, list) or not all(isinstance(name, str) for name in handed):
        raise InvalidInput("input.handed", f"{codec.quoted(handed)} is not a list of names")
    return AgentInput(prompt, history, handed)


def _prompt(given: object, field: str) -> str | list[Any]:  # Any: JSON
    if given is None:
        raise InvalidInput(field, "is empty: pass text")
    if isinstance(given, str) or is_content(given):
        return _filled(checked_content(given, field), field)
    # The output of another agent in a workflow, as JSON text.
    return json.dumps(given, ensure_ascii=False)


def _filled(content: str | list[Any], field: str) -> str | list[Any]:  # Any: JSON
    if not content or (isinstance(content, str) and not content.strip()):
        raise InvalidInput(field, "is empty: pass text")
    return content


def checked_content(given: object, field: str) -> str | list[Any]:  # Any: JSON
    """Return the content of a prompt: text, or a list of texts and files. Raises InvalidInput."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidInput(field, f"{codec.quoted(given)} is neither text nor a list of content parts")
    return [_content_part(part, f"{field}.{place}") for place, part in enumerate(given)]


def is_content(given: object) -> bool:
    """Return whether a list consists of parts of a prompt, and is not other data."""
    return isinstance(given, list) and bool(given) and all(isinstance(p, str) or _is_part(p) for p in given)


def checked_history(given: object, field: str) -> list[Message]:
    """Return messages in pydantic-ai's format, or `{"role", "content"}` of user or assistant. Raises InvalidInput."""
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
    raise InvalidInput(field, f'{codec.quoted(part)} is not content: pass text, or {{"kind": …}} with one of {kinds}')


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
        field, f'{codec.quoted(given)} is not a message: pass {{"role": "user" or "assistant", "content": text}}'
    )
