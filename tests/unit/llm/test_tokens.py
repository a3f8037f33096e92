"""Which part of a conversation is sent. Sizes are estimates, which the tests do not know."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from runtime_core.errors import ConfigurationError
from runtime_core.llm.tokens import MEDIA_TOKENS, KeepAll, KeepRecent, Message, Summarise, estimate_tokens, said


class WindowContext:
    """A window's view of a call, without a run."""

    ctx: Any = None
    overhead_tokens = 0

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.asked: list[str] = []

    def tokens(self, messages: Sequence[Message]) -> int:
        return estimate_tokens(messages)

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        self.asked.append(messages[-1]["parts"][0]["content"])
        return f"summary {len(self.asked)}"


def response(*parts: Message) -> Message:
    return {"kind": "response", "parts": list(parts)}


def text(content: str) -> Message:
    return {"part_kind": "text", "content": content}


def call(number: int) -> Message:
    return {"part_kind": "tool-call", "tool_name": "look", "args": "{}", "tool_call_id": f"c{number}"}


def result(number: int) -> Message:
    return {"part_kind": "tool-return", "tool_name": "look", "content": "x" * 60, "tool_call_id": f"c{number}"}


def conversation(turns: int, *, seed: int = 0) -> list[Message]:
    """Return questions, some of which need tools, with an answer each except for the last."""
    chance = random.Random(seed)
    messages: list[Message] = []
    for number in range(turns):
        messages.append(said(f"question {number} " + "x" * chance.randrange(90)))
        for each in range(chance.randrange(3)):
            messages.append(response(call(10 * number + each)))
            messages.append({"kind": "request", "parts": [result(10 * number + each)]})
        messages.append(response(text(f"answer {number}")))
    return messages[:-1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keep_first", [0, 1, 3])
async def test_a_call_and_its_result_go_together_and_the_end_stays(seed: int, keep_first: int) -> None:
    messages = conversation(12, seed=seed)
    context = WindowContext()
    for room in (1, 50, 150, 400, 10_000):
        sent = await KeepRecent(room, keep_first=keep_first).fit(context, messages, shrink=False)
        assert sent[-1] is messages[-1]
        _check_pairs(sent)
        assert sent[0]["kind"] == "request"
        if room == 10_000:
            assert sent == messages
        elif len(sent) < len(messages) and room > 150:
            assert estimate_tokens(sent) <= room
            if keep_first:
                assert sent[0] is messages[0]


async def test_as_much_is_kept_as_fits() -> None:
    messages = conversation(10, seed=3)
    room = estimate_tokens(messages) - 1
    sent = await KeepRecent(room, keep_first=0).fit(WindowContext(), messages, shrink=False)
    second = next(at for at, message in enumerate(messages) if at and message["parts"][0]["part_kind"] == "user-prompt")
    assert sent == messages[second:], "only the first exchange is left out"


async def test_a_refused_request_becomes_shorter_until_it_cannot() -> None:
    messages = conversation(10, seed=5)
    sent = await KeepRecent(10_000).fit(WindowContext(), messages, shrink=True)
    assert estimate_tokens(sent) <= estimate_tokens(messages) // 2
    one = [said("only this")]
    assert await KeepRecent(10_000).fit(WindowContext(), one, shrink=True) == one
    assert await KeepAll().fit(WindowContext(), messages, shrink=True) is messages


async def test_a_summary_is_written_when_needed_and_kept() -> None:
    messages = conversation(30, seed=2)
    context = WindowContext()
    window = Summarise(max_tokens=300, keep_tokens=100)
    lengths = []
    for end in [at + 1 for at, message in enumerate(messages) if message["parts"][0]["part_kind"] == "user-prompt"]:
        sent = await window.fit(context, messages[:end], shrink=False)
        assert sent[-1] is messages[end - 1]
        _check_pairs(sent)
        lengths.append((len(context.asked), estimate_tokens(sent)))
    made = len(context.asked)
    assert 2 < made < 15, "a summary holds for several questions"
    assert max(size for _, size in lengths) <= 300
    assert context.asked[0].startswith(window.prompt)
    assert "user: question 0" in context.asked[0]
    assert "summary 1" in context.asked[1], "a later summary builds on the one before"
    sent = await window.fit(context, messages, shrink=False)
    assert sent[0]["parts"][-1]["content"].endswith(f"summary {made}")


async def test_a_summary_of_another_conversation_is_not_used() -> None:
    context = WindowContext()
    window = Summarise(max_tokens=200, keep_tokens=60)
    await window.fit(context, conversation(12, seed=1), shrink=False)
    other = conversation(2, seed=9)
    assert await window.fit(context, other, shrink=False) == other


async def test_instructions_and_system_prompts_are_not_summed_up() -> None:
    messages = conversation(12, seed=4)
    system = {"part_kind": "system-prompt", "content": "Be kind."}
    messages[0] = {**messages[0], "parts": [system, *messages[0]["parts"]], "instructions": "Be short."}
    sent = await Summarise(max_tokens=200, keep_tokens=60).fit(WindowContext(), messages, shrink=False)
    assert sent[0]["parts"][0] == system
    assert sent[0]["instructions"] == "Be short."


def test_an_image_counts_as_one_and_not_by_its_bytes() -> None:
    image = {"kind": "binary", "media_type": "image/png", "data": "A" * 1_000_000}
    part = {"part_kind": "user-prompt", "content": ["What is this?", image]}
    assert MEDIA_TOKENS < estimate_tokens([{"kind": "request", "parts": [part]}]) < MEDIA_TOKENS + 50


@pytest.mark.parametrize(
    "make",
    [lambda: KeepRecent(0), lambda: KeepRecent(10, keep_first=-1), lambda: Summarise(True), lambda: Summarise(9, 0)],
)
def test_sizes_are_whole_numbers(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        make()


def _check_pairs(messages: list[Message]) -> None:
    ids = {"tool-call": set[str](), "tool-return": set[str]()}
    for message in messages:
        for part in message["parts"]:
            if part["part_kind"] in ids:
                ids[part["part_kind"]].add(part["tool_call_id"])
    assert ids["tool-call"] == ids["tool-return"]
