"""State of the delivery model: two work streams, runs, instances, timers, dead letters, and two consumers."""

from __future__ import annotations

from typing import NamedTuple

LEFT = "left"
"""Owner of the entries whose owner died or left."""
MAIL, HELD, RETRY, NONE = "mail", "held", "retry", ""
AGENT, TOOL = 0, 1

FAN = "m1"
"""The message whose run does a local step and then asks two tools."""
CALLS = ("t1", "t2")


class Event(NamedTuple):
    """An entry's id: its run or call, the run's turn, the attempt, and how often the broker went back."""

    run: str
    turn: int = 0
    attempt: int = 0
    life: int = 0
    """Counts lost tails and redrives: entries appended later have other ids."""


class Entry(NamedTuple):
    """An entry of a stream; without an owner it has not been read."""

    event: Event
    owner: str = ""
    deliveries: int = 0


Cur = Event | str
"""Where a run is: its entry in flight, MAIL, HELD, RETRY, or NONE before it starts and after it ends."""


class Instance(NamedTuple):
    """A keyed agent. `state` holds the runs whose writes it has."""

    busy: str = ""
    mail: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


class Fan(NamedTuple):
    """The run of FAN: its journal and its missing calls."""

    missing: tuple[str, ...] = ()
    results: tuple[tuple[str, bool], ...] = ()
    turns: int = 0
    journaled: str = ""
    """The local step's result in the journal."""
    used: str = ""
    """The result that a committed turn went on with."""


class Broker(NamedTuple):
    """Everything that the broker stores, and may lose the tail of."""

    streams: tuple[tuple[Entry, ...], tuple[Entry, ...]]
    curs: tuple[Cur, ...]
    instances: tuple[Instance, ...]
    fan: Fan
    timers: tuple[Event, ...]
    letters: tuple[str, ...]
    done: tuple[str, ...]
    failed: tuple[str, ...]
    reopened: tuple[str, ...]
    sent: tuple[int, ...]
    life: int = 0
    wrong: str = ""


class Work(NamedTuple):
    """A delivery in a consumer's hands.

    `alive` is false once others have declared the consumer dead. `seen` is the instance's state when the turn began.
    """

    stream: int
    event: Event
    deliveries: int
    phase: str
    alive: bool = True
    answer: str = ""
    stored: bool = False
    seen: tuple[str, ...] = ()


class Consumer(NamedTuple):
    paused: bool = False
    work: Work | None = None


class State(NamedTuple):
    broker: Broker
    consumers: tuple[Consumer, Consumer]
    faults: int
    redrives: int
    synced: Broker | None = None
    """What the broker's disk holds, once that falls behind."""
