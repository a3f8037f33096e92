"""The outside world: the real effects, whatever the broker says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts effects outside of Weft. `journaled(task, run, step)` asks the broker for a step's stored result."""

    journaled: Callable[[str, str, str], bool]
    owner_lives: Callable[[], bool]
    """Whether the process whose code runs is alive on the broker: a zombie cannot know what others have done."""
    is_open: Callable[[str, str], bool] = lambda task, run: True
    """Whether a run or a call is not over on the broker."""
    holders: Callable[[str, str], list[str] | None] = lambda limit, task: None
    """What holds slots of a limit in a task's partition."""
    carried: Callable[[str, str, str], bool] = lambda task, run, step: False
    """Whether a child run of a fork has the result of a step from the fork's origin, which has its row."""
    broken: list[tuple[str, str]] = field(default_factory=list)
    """What must never be: the kind, and the place in words."""
    begun: list[tuple[str, str, str]] = field(default_factory=list)
    finished: list[tuple[str, str, str]] = field(default_factory=list)
    stored: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)
    """By task, (run, step) of the steps whose result the broker has acknowledged."""
    sends: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    """By task, run and step: the instance that a message was sent to, and the task that it starts."""
    publishes: dict[tuple[str, str, str], tuple[str, str, str]] = field(default_factory=dict)
    """By task, run and step: topic, source and sender of a published message."""
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    """Attempts of each tool call that began."""
    lives: dict[tuple[str, str], int] = field(default_factory=dict)
    """By task and run: how often its code has begun."""
    said: dict[tuple[str, str], dict[int, list[str]]] = field(default_factory=dict)
    """By task and run: the output of each life of its code that has come to its end."""
    received: dict[tuple[str, str, str], object] = field(default_factory=dict)
    """By task, run and step: the message that the code of a run has received."""
    outlived: dict[tuple[str, str], int] = field(default_factory=dict)
    """By task and run: the last life that began before the broker lost its last writes."""
    once: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same of tools that may not be repeated; a redrive takes its call out."""

    def begins(self, task: str, run: str) -> int:
        """The code of a run begins. Return the number of its life."""
        life = self.lives[task, run] = self.lives.get((task, run), 0) + 1
        return life

    def ends(self, task: str, run: str, life: int, said: list[str]) -> None:
        self.said.setdefault((task, run), {})[life] = said

    def step_begins(self, task: str, run: str, step: str) -> None:
        self.begun.append((task, run, step))
        if self.journaled(task, run, step) and self.owner_lives():
            self.broken.append(("step again", f"finished step {step} of run {run} of task {task} ran again"))

    def step_ends(self, task: str, run: str, step: str) -> None:
        self.finished.append((task, run, step))

    def step_is_stored(self, task: str, run: str, step: str) -> None:
        """The agent's code continues with the step's result, so the broker must hold it."""
        if not self.carried(task, run, step):
            self.stored.setdefault(task, {})[run, step] = None

    def lose_tail(self) -> None:
        """The broker has lost its last writes: what it knew may happen again, and otherwise."""
        self.once.clear()
        self.stored.clear()
        self.received.clear()
        self.outlived = dict(self.lives)

    def message_is_received(self, task: str, run: str, step: str, life: int, message: object) -> None:
        """The agent's code has received a message, or the default for none. Each of its lives receives the same."""
        if life <= self.outlived.get((task, run), 0):
            return  # it may have read the message before the broker lost it
        first = self.received.setdefault((task, run, step), message)
        if first != message:
            self.broken.append(
                ("message differs", f"step {step} of run {run} of task {task} received {first}, then {message}")
            )

    def job_begins(self, task: str, run: str) -> None:
        """A cluster begins the job of a compute step."""
        parent, _, step = run.rpartition("/")
        if self.journaled(task, parent, step) and self.owner_lives():
            self.broken.append(
                ("job again", f"the job of run {run} of task {task} ran again, though it has its result")
            )

    @contextmanager
    def in_slot(self, limit: str, task: str, run: str) -> Iterator[None]:
        """Code of limited work runs: on the broker it alone holds the slot, unless it is over there."""
        self._check_slot(limit, task, run)
        yield
        self._check_slot(limit, task, run)

    def _check_slot(self, limit: str, task: str, run: str) -> None:
        held = self.holders(limit, task) if self.owner_lives() else None
        # A run that asks its own agent shares its slot.
        shares = held is not None and any(f"{task}|{run}/".startswith(f"{each}/") for each in held)
        if held is not None and not (shares and len(held) == 1) and self.is_open(task, run):
            self.broken.append(("no slot", f"run {run} of task {task} runs, and {held} hold slots of {limit}"))

    def call_begins(self, task: str, run: str) -> int:
        """Count an attempt of a call. Return how many there were."""
        count = self.calls[task, run] = self.calls.get((task, run), 0) + 1
        return count

    def once_begins(self, task: str, run: str) -> None:
        count = self.once[task, run] = self.once.get((task, run), 0) + 1
        if count > 1:
            self.broken.append(("tool again", f"repeatable=False tool of task {task}, run {run}, started twice"))


LEDGER: ContextVar[Ledger] = ContextVar("LEDGER")
"""The ledger of the history that runs."""
