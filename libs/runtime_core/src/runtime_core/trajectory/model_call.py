"""What a recorded step says of a model call: its messages, its answer, tokens, log-probabilities.

A step is taken for a model call where it says so (kind `model`), or where it is a `ctx.step` that was given a member
`messages` or has returned a member `usage`, as the clients of models do. The result of an agent's own model call
(`ModelAnswer`) has a pydantic-ai message; of other results the common shapes of such clients are read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime_core.codec import readable
from runtime_core.record.step import Step, StepError
from runtime_core.telemetry import gen_ai

_OWN_KINDS = ("model", "step", "engine")
_encode = msgspec.json.Encoder().encode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ModelAnswer(msgspec.Struct, frozen=True):
    """The result of a model call as agents keep it."""

    message: dict[str, Any] = {}  # Any: a ModelResponse of pydantic-ai, as JSON
    """Empty where the call was put off."""
    finish_reason: str = ""
    usage: dict[str, Any] = {}  # Any: numbers, and whatever else a provider says
    provider: str = ""
    model: str = ""
    seconds: float | None = None
    first_seconds: float | None = None
    """To the first piece, where it was streamed."""
    retry_after: float | None = None
    """Set where the model did not answer and is to be asked again."""
    error: StepError | None = None
    """Why it did not."""

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "\n\n".join(str(part.get("content", "")) for part in self._parts("text"))

    @property
    def thinking(self) -> str:
        """What it has thought, where the provider tells."""
        return "\n\n".join(str(part.get("content", "")) for part in self._parts("thinking"))

    @property
    def tool_calls(self) -> list[dict[str, Any]]:  # Any: JSON
        """What it called, each `{"id", "type", "name", "arguments"}`."""
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
        """Its answer in short: the text, else the calls as `name(arguments)`."""
        calls = [f"{call['name']}({_encode(call['arguments']).decode()})" for call in self.tool_calls]
        return " ".join(text for text in (self.text, *calls) if text) or None

    def _parts(self, kind: str) -> list[dict[str, Any]]:  # Any: JSON
        parts = self.message.get("parts")
        found = parts if isinstance(parts, list) else []
        return [part for part in found if isinstance(part, dict) and part.get("part_kind") == kind]


_answer = msgspec.json.Decoder(ModelAnswer).decode


def answer_of(step: Step) -> ModelAnswer | None:
    """Return the answer of an agent's model call; None for other steps and other results."""
    data = bytes(step.output)
    if step.kind != "model" or data[:1] != b"{" or not (b'"message"' in data or b'"retry_after"' in data):
        return None
    try:
        answer = _answer(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return answer if answer.message.get("kind") == "response" or answer.retry_after is not None else None


def told_by(result: bytes) -> tuple[dict[str, float], dict[str, Any]]:  # Any: see Step.attributes
    """Return usage and attributes by what the result (JSON) says alone, where the process that made it has died."""
    if b'"message"' not in result and b'"retry_after"' not in result:
        return {}, {}
    try:
        answer = _answer(result)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}, {}
    usage = {name: value for name, value in answer.usage.items() if _is_amount(value)}
    return usage, gen_ai.response_attributes(msgspec.to_builtins(answer))


def said_in(message: object) -> object:
    """Return what the last part of a message says: the content of a prompt or a tool's result, else the message."""
    parts = message.get("parts") if isinstance(message, dict) else None
    if isinstance(message, dict) and isinstance(parts, list) and parts and isinstance(parts[-1], dict):
        return parts[-1].get("content", parts[-1])
    return message.get("content", message) if isinstance(message, dict) else message


def is_model_call(step: Step) -> bool:
    """Return whether the step asked a model and is over: one that was put off is asked again in a later step."""
    if step.kind == "model":
        if step.error is not None and step.error.type == "Reserved":
            return False
        return (answer := answer_of(step)) is None or answer.retry_after is None
    if step.kind != "step":
        return False
    return bool(step.usage) or messages_of(step) is not None or bool(usage_of(step))


def messages_of(step: Step) -> list[Any] | None:  # Any: the user's own JSON
    """Return the messages that were given to the step; None where it was given none."""
    found = _member(step.input, "messages")
    return found if isinstance(found, list) else None


def usage_of(step: Step) -> dict[str, float]:
    """Return the tokens of a step that the run did by itself: as recorded with it, else as its result says."""
    if step.usage:
        return step.usage
    found = _member(step.output, "usage") if step.kind in _OWN_KINDS else None
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if _is_amount(value)}


def logprobs_of(step: Step) -> object:
    """Return the log-probabilities in the step's result, as the model gave them; None where it gave none."""
    if step.kind not in _OWN_KINDS:
        return None
    found = _member(step.output, "logprobs")
    return found if found is not None else _choice(step).get("logprobs")


def content_of(step: Step) -> object:
    """Return the model's answer: the member `content`, or that of the first choice's message, else the whole result."""
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
    """Return the tool calls that the model named in its answer; None where it named none."""
    if (answer := answer_of(step)) is not None:
        return answer.tool_calls or None
    message = _choice(step).get("message")
    found = message.get("tool_calls") if isinstance(message, dict) else _member(step.output, "tool_calls")
    return found if isinstance(found, list) and found else None


def _arguments(args: object) -> object:
    """Providers write arguments as JSON in a text, or as an object."""
    if not isinstance(args, str):
        return args
    try:
        return msgspec.json.decode(args)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return args


def _is_amount(value: object) -> bool:
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
