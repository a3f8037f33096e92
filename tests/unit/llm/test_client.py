"""Batches of streamed text for the client."""

from __future__ import annotations

from typing import Any, cast

from runtime_core.llm.client import BATCH_CHARACTERS, TextBatcher
from runtime_core.runs.model_step import ModelCall


class Call:
    """The part of a call that the batches see."""

    def __init__(self, attempt: int = 1) -> None:
        self.attempt = attempt
        self.shown: list[tuple[int, Any]] = []

    def stream(self, value: object) -> None:
        self.shown.append((self.attempt, value))

    async def again(self) -> None:
        self.attempt += 1


def pieces(call: Call) -> TextBatcher:
    return TextBatcher(cast(ModelCall, call))


async def test_small_pieces_are_joined_and_nothing_is_lost() -> None:
    call = Call()
    every = pieces(call)
    for _ in range(BATCH_CHARACTERS + 50):
        every.add("x")
    assert call.shown == [(1, "x" * BATCH_CHARACTERS)], "the loop had no chance to send by time"
    every.close()
    assert call.shown[1:] == [(1, "x" * 50)]


async def test_a_later_attempt_replaces_the_output_of_an_earlier_process() -> None:
    call = Call(attempt=2)
    pieces(call).close()
    assert call.shown == [(2, "")]


async def test_withdrawing_retracts_shown_text_and_drops_the_rest() -> None:
    call = Call()
    every = pieces(call)
    every.add("x" * BATCH_CHARACTERS)
    every.add("rest")
    await every.withdraw()
    every.close()
    assert call.shown == [(1, "x" * BATCH_CHARACTERS), (2, "")]
    silent = Call()
    await pieces(silent).withdraw()
    assert silent.shown == []
