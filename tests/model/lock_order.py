"""Model of keyed agents that call each other: a ring of requests must end in `Deadlock`, never hang.

Agent i asks agent i + 1 in a separate task, and the last one asks the first. A run holds its instance until it ends,
so a request to a busy instance waits in the mailbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeVar

from tests.model.search import Move

V = TypeVar("V")
Phase = Literal["new", "mail", "turn", "held", "ended"]


class Guards(NamedTuple):
    """What prevents a wait cycle. The model drops one to see what breaks."""

    detect: bool = True
    """A request that would close a cycle is answered with `Deadlock` on entry to the mailbox."""
    detect_in_commit: bool = True
    """Detection and entry are one function. Otherwise the handler checks first, and enters in a second call."""
    follow: int = 16
    """How many waits the detection follows."""
    deadline: bool = False
    """Every request has a time limit, which answers it with an error."""


class Run(NamedTuple):
    """A task's own run (`asks`), or the run that its request starts."""

    phase: Phase
    at: int
    answer: str = ""


class State(NamedTuple):
    runs: tuple[Run, ...]
    """Run 2i is the task of agent i; run 2i + 1 is its request to agent i + 1."""
    holders: tuple[int, ...]
    mail: tuple[tuple[int, ...], ...]
    looked: tuple[int, ...] = ()
    """Requests that passed a detection of their own and have yet to enter."""


class LockOrder:
    """`agents` keyed agents in a ring; `open_ring`: the last one asks nobody, so no cycle exists."""

    def __init__(self, agents: int = 2, guards: Guards | None = None, *, open_ring: bool = False) -> None:
        self.agents = agents
        self.guards = guards or Guards()
        self.open_ring = open_ring

    def initial(self) -> State:
        runs = tuple(
            Run("new", number // 2 if number % 2 == 0 else self.next(number // 2)) for number in range(2 * self.agents)
        )
        return State(runs, (-1,) * self.agents, ((),) * self.agents)

    def next(self, agent: int) -> int:
        return (agent + 1) % self.agents

    def moves(self, state: State) -> Iterator[Move]:
        for number, run in enumerate(state.runs):
            if run.phase == "new" and number % 2 == 0:
                yield Move(f"task {number // 2} starts", self.deliver(state, number))
            if run.phase == "turn":
                yield from self.turn(state, number)
            if run.phase == "held" and self.guards.deadline and state.runs[number + 1].phase != "ended":
                yield Move(f"the request of task {number // 2} times out", self.time_out(state, number + 1))

    def turn(self, state: State, number: int) -> Iterator[Move]:
        run, task = state.runs[number], number // 2
        asks = number % 2 == 0 and not run.answer and not (self.open_ring and task == self.agents - 1)
        if not asks:
            yield Move(f"run {number} ends", self.end(state, number, "answered"))
            return
        if not self.guards.detect_in_commit and number not in state.looked:
            if self.guards.detect and self.closes_cycle(state, number + 1):
                yield Move(f"task {task} is told of a deadlock", self.refuse(state, number))
            else:
                yield Move(f"task {task} looks for a cycle", state._replace(looked=(*state.looked, number)))
            return
        if self.guards.detect and self.guards.detect_in_commit and self.closes_cycle(state, number + 1):
            yield Move(f"task {task} is told of a deadlock", self.refuse(state, number))
            return
        held = with_run(state, number, run._replace(phase="held"))
        held = held._replace(looked=tuple(one for one in held.looked if one != number))
        yield Move(f"task {task} asks agent {self.next(task)}", self.deliver(held, number + 1))

    def closes_cycle(self, state: State, request: int) -> bool:
        """Follow from the target's holder to the run that it waits for, until the caller or a run that can continue."""
        target = state.runs[request].at
        for _ in range(self.guards.follow):
            holder = state.holders[target]
            if holder < 0:
                return False
            if holder == request - 1:
                return True
            if state.runs[holder].phase != "held" or state.runs[holder + 1].phase != "mail":
                return False
            target = state.runs[holder + 1].at
        return False

    def deliver(self, state: State, number: int) -> State:
        run = state.runs[number]
        if state.holders[run.at] < 0:
            held = with_run(state, number, run._replace(phase="turn"))
            return held._replace(holders=replaced(held.holders, run.at, number))
        waiting = with_run(state, number, run._replace(phase="mail"))
        return waiting._replace(mail=replaced(waiting.mail, run.at, (*waiting.mail[run.at], number)))

    def refuse(self, state: State, number: int) -> State:
        state = with_run(state, number, state.runs[number]._replace(answer="deadlock"))
        return with_run(state, number + 1, state.runs[number + 1]._replace(phase="ended"))

    def time_out(self, state: State, number: int) -> State:
        run = state.runs[number]
        mail = tuple(tuple(one for one in line if one != number) for line in state.mail)
        return self.end(state._replace(mail=mail), number, "timeout", releases=run.phase == "turn")

    def end(self, state: State, number: int, answer: str, *, releases: bool = True) -> State:
        """End a run: its caller continues with the answer, and its instance takes the next event of its mailbox."""
        run = state.runs[number]
        state = with_run(state, number, run._replace(phase="ended"))
        if number % 2:
            asker = state.runs[number - 1]
            state = with_run(state, number - 1, asker._replace(phase="turn", answer=answer))
        if not releases:
            return state
        state = state._replace(holders=replaced(state.holders, run.at, -1))
        line = state.mail[run.at]
        if not line:
            return state
        return self.deliver(state._replace(mail=replaced(state.mail, run.at, line[1:])), line[0])

    def broken(self, state: State, quiet: bool) -> str:
        for number, run in enumerate(state.runs):
            if self.open_ring and run.answer == "deadlock":
                return f"task {number // 2} was told of a deadlock that does not exist"
            if quiet and number % 2 == 0 and run.phase != "ended":
                return f"task {number // 2} waits for ever ({run.phase})"
        return ""


def with_run(state: State, number: int, run: Run) -> State:
    return state._replace(runs=(*state.runs[:number], run, *state.runs[number + 1 :]))


def replaced(values: tuple[V, ...], place: int, value: V) -> tuple[V, ...]:
    return (*values[:place], value, *values[place + 1 :])
