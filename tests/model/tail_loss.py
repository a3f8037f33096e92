"""Model of a question between two partitions, each of which may lose the tail of what it wrote.

An agent in the first partition asks one in the second. A relay carries the question and the answer, and deletes each
entry after it has carried it. A partition that loses its tail goes back to what its disk holds. The other is ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.model.search import Move


class Guards(NamedTuple):
    repeat: bool = True
    """A run that waits for another partition repeats its question on a schedule."""
    known_answers: bool = True
    """A question that the other partition knows and has ended is answered from the stored result."""
    answer_if_missing: bool = True
    """An answer counts only while its step is missing."""
    dedupe: bool = True
    """A question that the other partition knows starts nothing."""
    delete_after: bool = True
    """The relay deletes an entry after it has carried it, not before."""


class Asker(NamedTuple):
    """The first partition."""

    run: Literal["turn", "held", "done"] = "turn"
    asks: bool = False
    answers: int = 0


class Answerer(NamedTuple):
    """The second partition."""

    task: Literal["", "running", "ended"] = ""
    replies: bool = False
    started: int = 0


class State(NamedTuple):
    asker: Asker = Asker()
    answerer: Answerer = Answerer()
    carrying: Literal["", "ask", "reply"] = ""
    """What the relay has done half of."""
    asker_disk: Asker | None = None
    answerer_disk: Answerer | None = None
    faults: int = 0


class TailLoss:
    def __init__(self, faults: int = 1, guards: Guards | None = None) -> None:
        self.faults = faults
        self.guards = guards or Guards()

    def initial(self) -> State:
        return State(faults=self.faults)

    def moves(self, state: State) -> Iterator[Move]:
        asker, answerer = state.asker, state.answerer
        if asker.run == "turn":
            yield Move("the agent asks", state._replace(asker=asker._replace(run="held", asks=True)))
        if asker.run == "held" and not asker.asks and self.guards.repeat:
            yield Move("the question is repeated", state._replace(asker=asker._replace(asks=True)))
        if answerer.task == "running":
            ended = answerer._replace(task="ended", replies=True)
            yield Move("the other agent answers", state._replace(answerer=ended))
        yield from self.relay(state)
        yield from self.lose(state)

    def relay(self, state: State) -> Iterator[Move]:
        first, last = ("carry", "delete") if self.guards.delete_after else ("delete", "carry")
        if not state.carrying:
            if state.asker.asks:
                yield Move(f"relay: {first} the question", self.carry_ask(state, first)._replace(carrying="ask"))
            if state.answerer.replies:
                yield Move(f"relay: {first} the answer", self.carry_reply(state, first)._replace(carrying="reply"))
            return
        if state.carrying == "ask":
            yield Move(f"relay: {last} the question", self.carry_ask(state, last)._replace(carrying=""))
        else:
            yield Move(f"relay: {last} the answer", self.carry_reply(state, last)._replace(carrying=""))
        if state.faults:
            yield Move("the relay is killed", state._replace(carrying="", faults=state.faults - 1), optional=True)

    def carry_ask(self, state: State, part: str) -> State:
        if part == "delete":
            return state._replace(asker=state.asker._replace(asks=False))
        answerer = state.answerer
        if not answerer.task or not self.guards.dedupe:
            return state._replace(answerer=answerer._replace(task="running", started=answerer.started + 1))
        if answerer.task == "ended" and self.guards.known_answers:
            return state._replace(answerer=answerer._replace(replies=True))
        return state

    def carry_reply(self, state: State, part: str) -> State:
        if part == "delete":
            return state._replace(answerer=state.answerer._replace(replies=False))
        asker = state.asker
        if asker.run == "held" or not self.guards.answer_if_missing:
            return state._replace(asker=asker._replace(run="done", answers=asker.answers + 1))
        return state

    def lose(self, state: State) -> Iterator[Move]:
        if not state.faults:
            return
        spent = state._replace(faults=state.faults - 1)
        if state.asker_disk is None:
            yield Move("the asker's disk falls behind", state._replace(asker_disk=state.asker), optional=True)
        else:
            lost = spent._replace(asker=state.asker_disk, asker_disk=None)
            yield Move("the asker's partition loses its tail", lost, optional=True)
        if state.answerer_disk is None:
            yield Move("the answerer's disk falls behind", state._replace(answerer_disk=state.answerer), optional=True)
        else:
            lost = spent._replace(answerer=state.answerer_disk, answerer_disk=None)
            yield Move("the answerer's partition loses its tail", lost, optional=True)

    def broken(self, state: State, quiet: bool) -> str:
        if state.asker.answers > 1:
            return "a question was answered twice"
        if state.answerer.started > 1:
            return "a question started two runs"
        if quiet and state.asker.run != "done":
            return "the agent waits for ever"
        return ""
