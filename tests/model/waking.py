"""Model of a run that waits for a tool and for a person's answer, beside a time limit of the answer and a cancel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.model.search import Move

STEPS = ("human", "tool")
RESULTS = {"tool result": "tool", "answer": "human", "time limit": "human"}


class Guards(NamedTuple):
    look_again: bool = True
    """The commit that begins to wait looks for results that came during its turn."""
    one_resume: bool = True
    """A second result appends no resume while one is under way."""
    if_absent: bool = True
    """A result is stored only if its step has none."""
    settle_cancelled: bool = True
    """The commit of a cancelled run is settled: acknowledged and released. Otherwise it is refused."""
    cancel_ends_waiting: bool = True
    """A cancel ends a waiting run and releases its instance."""
    ended_is_fenced: bool = True
    """A late result of an ended run writes nothing."""


class State(NamedTuple):
    phase: Literal["turn", "waits", "queued", "refused", "ended"] = "turn"
    results: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    """The results that the current turn began with."""
    resumes: int = 0
    cancelled: bool = False
    released: int = 0
    arrived: tuple[str, ...] = ()
    late: bool = False


class Waking:
    def __init__(self, guards: Guards | None = None) -> None:
        self.guards = guards or Guards()

    def initial(self) -> State:
        return State()

    def moves(self, state: State) -> Iterator[Move]:
        for name, step in RESULTS.items():
            if name not in state.arrived:
                after = self.result(state, step)._replace(arrived=tuple(sorted((*state.arrived, name))))
                yield Move(name, after, optional=name == "answer")
        if not state.cancelled and state.phase != "ended":
            yield Move("cancel", self.cancel(state), optional=True)
        if state.phase == "queued":
            turn = state._replace(phase="turn", seen=state.results, resumes=state.resumes - 1)
            yield Move("the turn begins", turn)
        if state.phase == "turn":
            yield Move("commit", self.commit(state))

    def result(self, state: State, step: str) -> State:
        if state.phase == "ended":
            return state if self.guards.ended_is_fenced else state._replace(late=True)
        if step in state.results and self.guards.if_absent:
            return state
        state = state._replace(results=tuple(sorted((*state.results, step))))
        if state.phase == "waits" or (state.phase == "queued" and not self.guards.one_resume):
            return state._replace(phase="queued", resumes=state.resumes + 1)
        return state

    def cancel(self, state: State) -> State:
        if state.phase == "turn" or not self.guards.cancel_ends_waiting:
            return state._replace(cancelled=True)
        return state._replace(phase="ended", resumes=0, cancelled=True, released=state.released + 1)

    def commit(self, state: State) -> State:
        if state.cancelled and not self.guards.settle_cancelled:
            return state._replace(phase="refused")
        if state.cancelled or state.seen == STEPS:
            return state._replace(phase="ended", released=state.released + 1)
        if self.guards.look_again and state.results != state.seen:
            return state._replace(phase="queued", resumes=state.resumes + 1)
        return state._replace(phase="waits")

    def broken(self, state: State, quiet: bool) -> str:
        if len(set(state.results)) < len(state.results):
            return "a step was answered twice"
        if state.resumes > 1 or (state.phase == "turn" and state.resumes):
            return "two resumes of one run"
        if state.late:
            return "a late result wrote to an ended run"
        if state.cancelled and state.phase == "waits":
            return "a cancelled run goes on waiting"
        if quiet and (state.phase != "ended" or state.released != 1):
            return f"the run stays {state.phase!r}, released {state.released} times"
        return ""
