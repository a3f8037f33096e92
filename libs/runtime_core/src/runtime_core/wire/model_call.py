"""Reads a model call from a recorded step: its messages, its answer, tokens, log-probabilities.

A step counts as a model call if its kind is `model`, or if it is a `ctx.step` whose input has a member `messages` or
whose output has a member `usage`, as with clients of models. The result of an agent's own model call (`ModelAnswer`)
has a pydantic-ai message. Other results are read in the common formats of such clients.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime_core.wire.codec import readable
from runtime_core.wire.step import Step, StepFailure

_OWN_KINDS = ("model", "step", "engine")
_encode = msgspec.json.Encoder().encode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ModelAnswer(msgspec.Struct, frozen=True):
    """The journaled result of an agent's model call."""

    message: dict[str, Any] = {}  # Any: a ModelResponse of pydantic-ai, as JSON
    """Empty if the call was deferred."""
    finish_reason: str = ""
    usage: dict[str, Any] = {}  # Any: numbers, and members of the provider
    provider: str = ""
    model: str = ""
    seconds: float | None = None
    first_seconds: float | None = None
    """Time to the first chunk of a streamed answer."""
    retry_after: float | None = None
    """Set if the model did not answer and will be called again."""
    error: StepFailure | None = None
    """Why the model did not answer."""

    @property
    def text(self) -> str:
        """The text that the model wrote."""
        return "\n\n".join(str(part.get("content", "")) for part in self._parts("text"))

    @property
    def thinking(self) -> str:
        """The model's reasoning, if the provider returns it."""
        return "\n\n".join(str(part.get("content", "")) for part in self._parts("thinking"))

    @property
    def tool_calls(self) -> list[dict[str, Any]]:  # Any: JSON
        """The tool calls, each `{"id", "type", "name", "arguments"}`."""
        return [
            {
                "id": part.get("tool_call_id"),
                "type": "function",
                "name": part.get("tool_name", ""),
                "arguments": _arguments(part.get("args")),
            }
            for part in self._parts("tool-call")
        ]

    @property
    def shown(self) -> object:
        """A short form of the answer: the text, or else the calls as `name(arguments)`."""
        calls = [f"{call['name']}({_encode(call['arguments']).decode()})" for call in self.tool_calls]
        return " ".join(text for text in (self.text, *calls) if text) or None

    def _parts(self, kind: str) -> list[dict[str, Any]]:  # Any: JSON
        parts = self.message.get("parts")
        found = parts if isinstance(parts, list) else []
        return [part for part in found if isinstance(part, dict) and part.get("part_kind") == kind]


_answer = msgspec.json.Decoder(ModelAnswer).decode


def answer_in(result: bytes) -> ModelAnswer | None:
    """Return the answer that a result (JSON) holds; None if it is another value."""
    if result[:1] != b"{" or not (b'"message"' in result or b'"retry_after"' in result):
        return None
    try:
        return _answer(result)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def answer_of(step: Step) -> ModelAnswer | None:
    """Return the answer of an agent's model call; None for other steps and other results."""
    answer = answer_in(bytes(step.output)) if step.kind == "model" else None
    if answer is None:
        return None
    return answer if answer.message.get("kind") == "response" or answer.retry_after is not None else None


def said_in(message: object) -> object:
    """Return the last part of a message: the content of a prompt or tool result, or else the message."""
    parts = message.get("parts") if isinstance(message, dict) else None
    if isinstance(message, dict) and isinstance(parts, list) and parts and isinstance(parts[-1], dict):
        return parts[-1].get("content", parts[-1])
    return message.get("content", message) if isinstance(message, dict) else message


def is_model_call(step: Step) -> bool:
    """Return whether the step is a finished model call. A deferred call is repeated in a later step."""
    if step.kind == "model":
        if step.error is not None and step.error.type == "Reserved":
            return False
        return (answer := answer_of(step)) is None or answer.retry_after is None
    if step.kind != "step":
        return False
    return bool(step.usage) or messages_of(step) is not None or bool(usage_of(step))


def messages_of(step: Step) -> list[Any] | None:  # Any: the user's own JSON
    """Return the messages in the step's input; None if there are none."""
    found = _member(step.input, "messages")
    return found if isinstance(found, list) else None


def usage_of(step: Step) -> dict[str, float]:
    """Return the tokens of a step of the run itself: as recorded with it, or else from its result."""
    if step.usage:
        return step.usage
    found = _member(step.output, "usage") if step.kind in _OWN_KINDS else None
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if is_amount(value)}


def logprobs_of(step: Step) -> object:
    """Return the log-probabilities in the step's result, in the model's format; None if there are none."""
    if step.kind not in _OWN_KINDS:
        return None
    found = _member(step.output, "logprobs")
    return found if found is not None else _choice(step).get("logprobs")


def content_of(step: Step) -> object:
    """Return the answer: the member `content`, or that of the first choice's message, or else the whole result."""
    if (answer := answer_of(step)) is not None:
        return answer.text or None
    whole = readable(bytes(step.output))
    if isinstance(whole, dict):
        if "content" in whole:
            return whole["content"]
        message = _choice(step).get("message")
        if isinstance(message, dict) and "content" in message:
            return message["content"]
    return whole


def tool_calls_of(step: Step) -> list[Any] | None:  # Any: the user's own JSON
    """Return the tool calls in the model's answer; None if there are none."""
    if (answer := answer_of(step)) is not None:
        return answer.tool_calls or None
    message = _choice(step).get("message")
    found = message.get("tool_calls") if isinstance(message, dict) else _member(step.output, "tool_calls")
    return found if isinstance(found, list) and found else None


def _arguments(args: object) -> object:
    """Return the arguments, which providers write as an object or as JSON in a text."""
    if not isinstance(args, str):
        return args
    try:
        return msgspec.json.decode(args)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return args


def is_amount(value: object) -> bool:
    """Return whether the value is a number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choice(step: Step) -> dict[str, Any]:  # Any: the user's own JSON
    choices = _member(step.output, "choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _member(raw: msgspec.Raw, name: str) -> object:
    data = bytes(raw)
    if data[:1] != b"{" or b'"%b"' % name.encode() not in data:
        return None
    try:
        found = _members(data).get(name)
        value: object = msgspec.json.decode(found) if found is not None else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return value
