"""The content of a request, in either format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MARK = re.compile(r"\[(c-[\w.:-]+)\]")


@dataclass(frozen=True)
class ToolResult:
    tool: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, as rules see it."""

    api: str
    model: str
    stream: bool
    conversation: str
    digest: str
    """Of model, conversation and messages: the same for the same question, from whichever process it comes."""
    system: str
    users: tuple[str, ...]
    """Texts of the user messages."""
    results: tuple[ToolResult, ...]
    ends_in_result: bool
    model_messages: int
    turn: int
    messages: int
    size: int
    """Bytes of the messages as JSON."""
    tools: tuple[str, ...]
    wants_json: bool
    """Whether the text must be JSON."""
    usage: bool
    """Whether a stream ends with the usage."""


class Reading:
    """Collects the content of one request's messages, in order."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.users: list[str] = []
        self.results: list[ToolResult] = []
        self.tools_by_call: dict[str, str] = {}
        self.model_messages = 0
        self.turn = 0
        self.ends_in_result = False

    def said_system(self, content: object) -> None:
        self.system.append(text_of(content))

    def said_user(self, content: object) -> None:
        self.users.append(text_of(content))
        self.turn = 0
        self.ends_in_result = False

    def said_model(self) -> None:
        self.model_messages += 1
        self.turn += 1
        self.ends_in_result = False

    def said_tool(self, call: object, content: object) -> None:
        self.results.append(ToolResult(self.tools_by_call.get(str(call), ""), text_of(content)))
        self.ends_in_result = True

    def asked(
        self,
        api: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        messages: object,
        *,
        count: int,
        tools: tuple[str, ...],
        wants_json: bool,
        usage: bool,
    ) -> Asked:
        model = str(body.get("model", ""))
        encoded = msgspec.json.encode(messages, order="deterministic")
        conversation = self._conversation(body, headers)
        identity = msgspec.json.encode([model, conversation]) + encoded
        return Asked(
            api=api,
            model=model,
            stream=bool(body.get("stream")),
            conversation=conversation,
            digest=hashlib.sha256(identity).hexdigest()[:32],
            system="\n".join(self.system),
            users=tuple(self.users),
            results=tuple(self.results),
            ends_in_result=self.ends_in_result,
            model_messages=self.model_messages,
            turn=self.turn,
            messages=count,
            size=len(encoded),
            tools=tools,
            wants_json=wants_json,
            usage=usage,
        )

    def _conversation(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        if named := headers.get("x-conversation") or body.get("user"):
            return str(named)
        first = self.users[0] if self.users else ""
        if mark := MARK.search(first):
            return mark[1]
        return f"u-{hashlib.sha256(first.encode()).hexdigest()[:12]}"


def text_of(content: object) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return ""
