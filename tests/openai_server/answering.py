"""The content of an answer to one request, before it gets a format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from tests.openai_server.asked import Asked
from tests.openai_server.script import Answer, Usage


@dataclass(frozen=True)
class SaidCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """An answer with its placeholders filled in."""

    id: str
    """Of the question."""
    number: int
    """Of the request: an answer's id ends in it, so that who has kept one can tell which."""
    text: str | None
    calls: tuple[SaidCall, ...]
    refusal: str | None
    reasoning: str | None
    finish_reason: str
    usage: Usage


def say(answer: Answer, asked: Asked, number: int = 0) -> Said:
    """Fill in values of the request. The same request gets the same answer, except for the number and the time."""
    text = None if answer.text is None else filled(answer.text, asked)
    calls = [
        SaidCall(
            call.id or f"call_{asked.digest[:16]}_{number}",
            call.name,
            filled(
                call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments), asked, quoted=True
            ),
        )
        for number, call in enumerate(answer.calls)
    ]
    if answer.output is not None:
        written = filled(json.dumps(answer.output), asked, quoted=True)
        if asked.wants_json or answer.output_tool not in asked.tools:
            text = written
        else:
            calls.append(SaidCall(f"call_{asked.digest[:16]}_{len(calls)}", answer.output_tool, written))
    finish_reason = answer.finish_reason or ("tool_calls" if calls else "stop")
    usage = answer.usage or counted(asked, text or answer.refusal or "", calls)
    return Said(asked.digest, number, text, tuple(calls), answer.refusal, answer.reasoning, finish_reason, usage)


def filled(text: str, asked: Asked, *, quoted: bool = False) -> str:
    """Replace `{user}`, `{conversation}` … by values of the request; `quoted` for the inside of a JSON text."""
    if "{" not in text:
        return text
    values = {
        "{user}": asked.users[-1] if asked.users else "",
        "{system}": asked.system,
        "{conversation}": asked.conversation,
        "{result}": asked.results[-1].text if asked.results else "",
        "{results}": ", ".join(result.text for result in asked.results),
        "{turn}": str(asked.turn),
    }
    for blank, value in values.items():
        if blank in text:
            text = text.replace(blank, json.dumps(value)[1:-1] if quoted else value)
    return text


def counted(asked: Asked, text: str, calls: list[SaidCall]) -> Usage:
    """Estimate tokens by length: about four bytes each."""
    said = len(text) + sum(len(call.name) + len(call.arguments) for call in calls)
    return Usage(math.ceil(asked.size / 4), max(1, math.ceil(said / 4)))


def parts_of(text: str, count: int) -> list[str]:
    """Split the text into this many parts of about the same length, or fewer, none of them empty."""
    size = max(1, math.ceil(len(text) / max(1, count)))
    return [text[start : start + size] for start in range(0, len(text), size)]
