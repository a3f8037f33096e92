"""What a recorded step says of a model call: its messages, its answer, tokens, log-probabilities.

A step is taken for a model call where it says so (kind `model`), or where it is a `ctx.step` that was given a member
`messages` or has returned a member `usage`, as the clients of models do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime_core.codec import readable
from runtime_core.trajectory.steps import Step

_OWN_KINDS = ("model", "step", "engine")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def is_model_call(step: Step) -> bool:
    """Return whether the step asked a model."""
    if step.kind == "model":
        return True
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
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def logprobs_of(step: Step) -> object:
    """Return the log-probabilities in the step's result, as the model gave them; None where it gave none."""
    if step.kind not in _OWN_KINDS:
        return None
    found = _member(step.output, "logprobs")
    return found if found is not None else _choice(step).get("logprobs")


def content_of(step: Step) -> object:
    """Return the model's answer: the member `content`, or that of the first choice's message, else the whole result."""
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
    message = _choice(step).get("message")
    found = message.get("tool_calls") if isinstance(message, dict) else _member(step.output, "tool_calls")
    return found if isinstance(found, list) and found else None


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
