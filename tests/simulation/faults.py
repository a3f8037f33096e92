"""The faults of a history. Each is a function of the history; `FAULTS` gives their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from runtime_core.bus.connection import Argument
from runtime_core.bus.keys import group_of
from runtime_core.errors import ServerError
from tests.simulation.choice_source import pick
from tests.simulation.scheduler import delay_reply, lose_reply, lose_request

if TYPE_CHECKING:
    from tests.simulation.history import History
    from tests.simulation.processes import RoleProcess, SchedulerProcess


def kill(history: History) -> None:
    """SIGKILL of a process; another one starts soon."""
    victim = _victim(history)
    if victim is not None:
        stream, seconds = victim.serves, pick(history.choice_source, (0.1, 1.0, 4.0))
        history.note(f"{victim.name} is killed; its successor starts in {seconds} s")
        victim.kill()
        history.loop.call_later(seconds, history.start_process, stream)


def replace(history: History) -> None:
    """A rolling update: a process gets SIGTERM, and its replacement starts before or after."""
    victim = _victim(history)
    if victim is not None:
        stream, before = victim.serves, history.choice_source.choose(2)
        history.note(f"{victim.name} leaves; its successor starts {'before' if before else 'soon'}")
        if before:
            history.start_process(stream)
        victim.leave()
        if not before:
            history.loop.call_later(0.5, history.start_process, stream)


def pause(history: History) -> None:
    """SIGSTOP of a process, for less or more than its lease."""
    victim = _victim(history)
    if victim is not None:
        seconds = pick(history.choice_source, (1.0, 9.0))
        history.note(f"{victim.name} is paused for {seconds} s")
        victim.pause(seconds)


def break_before(history: History) -> None:
    """A connection breaks before a call is executed."""
    history.scheduler.call_fault = partial(lose_request, scheduler=history.scheduler)


def break_after(history: History) -> None:
    """A connection breaks after a call was executed and before its reply arrives."""
    history.scheduler.call_fault = partial(lose_reply, scheduler=history.scheduler)


def delay(history: History) -> None:
    """A reply arrives late, perhaps later than a lease."""
    seconds = pick(history.choice_source, (0.1, 1.0, 8.0))
    history.scheduler.call_fault = partial(delay_reply, scheduler=history.scheduler, seconds=seconds)


def fail_disk(history: History) -> None:
    """The server refuses some writes because its disk is full."""
    history.scheduler.disk_errors = 1 + history.choice_source.choose(4)
    history.note(f"the disk fails for {history.scheduler.disk_errors} writes")


def lose_group(history: History) -> None:
    """The group of a work stream is lost."""
    base, stream = (
        pick(history.choice_source, history.scheduler.bases),
        pick(history.choice_source, history.streams),
    )
    history.note(f"the group of {base}{stream} is lost")
    try:
        history.server.execute("XGROUP", "DESTROY", base + stream, group_of(stream))
    except ServerError:
        return  # no such stream yet
    history.scheduler.forget_reads()


def lose_library(history: History) -> None:
    """The server has lost its functions."""
    history.note("the function library is lost")
    history.server.execute("FUNCTION", "FLUSH")


def restart_broker(history: History) -> None:
    """The broker is down for a while and keeps all its data."""
    seconds = pick(history.choice_source, (0.2, 8.0))
    history.note(f"the broker is away for {seconds} s")
    history.scheduler.lose_connections(seconds)


def step_clock(history: History) -> None:
    """The server's clock steps by an hour."""
    step = pick(history.choice_source, (3_600_000, -3_600_000))
    history.note(f"the server's clock steps by {step // 1000} s")
    history.scheduler.clock_step_ms += step
    history.clock_stepped = True


def lose_tail(history: History) -> None:
    """A partition's server crashes a little later, and loses what it wrote from now on.

    So does a replica that takes its place, as in a Cluster. It confirms nothing meanwhile.
    """
    base = pick(history.choice_source, history.scheduler.bases)
    saved = _saved(history, base)
    accepted = list(history.clients.accepted)
    messages = [message for message in history.clients.messages if message.accepted]
    history.lost_tail = True
    lags = history.scheduler.lags
    lags[base] = lags.get(base, 0) + 1

    def crash() -> None:
        history.note(f"the server of {base} loses its last writes")
        lags[base] -= 1
        server = history.server
        found = cast(list[bytes], server.execute("KEYS", _pattern(base)))
        commands: list[tuple[Argument, ...]] = [("DEL", *found)] if found else []
        commands += [("RESTORE", key, 0, dump) for key, dump in saved]
        if commands:
            server.pipeline(commands)
        history.ledger.lose_tail()
        # What was accepted later may be lost, or not: nobody was promised anything of a server that syncs lazily.
        # Submits that wait for a replica are accepted only when it has them.
        if not history.quorum:
            history.uncertain += [task for task in history.clients.accepted if task not in accepted]
        for message in history.clients.messages:
            message.uncertain |= message not in messages
        history.scheduler.lose_connections(0.2, base)
        history.scheduler.forget_reads()
        history.clients.repeat_lost()

    history.scheduler.at(history.scheduler.steps + 1 + history.choice_source.choose(60), crash)


def move_partition(history: History) -> None:
    """In a Cluster, a partition moves to another server, with all its data: its connections are made again there."""
    base, seconds = pick(history.choice_source, history.scheduler.bases), pick(history.choice_source, (0.05, 1.0))
    history.note(f"{base} moves to another server within {seconds} s")
    history.scheduler.lose_connections(seconds, base)


def cancel(history: History) -> None:
    """A user cancels a task, perhaps several times at once."""
    history.clients.cancel(history.choice_source.choose(len(history.tasks)), 1 + history.choice_source.choose(2))


def fork(history: History) -> None:
    """A user forks a task, whatever its state."""
    history.clients.fork(
        history.choice_source.choose(len(history.tasks)), pick(history.choice_source, (None, "1", "2", "3"))
    )


def redrive(history: History) -> None:
    """Dead letters are redriven while other tasks continue."""
    history.clients.redrive_letters()


def fill_memory(history: History) -> None:
    """The server is at its maxmemory for a while, and refuses commands that would need more."""
    seconds = pick(history.choice_source, (0.3, 2.0, 9.0))
    history.note(f"the server's memory is full for {seconds} s")
    history.scheduler.full = True

    def free() -> None:
        history.note("the server has memory again")
        history.scheduler.full = False

    history.loop.call_later(seconds, free)


def lose_engine(history: History) -> None:
    """A cluster is lost with its jobs, or a gateway's driver process ends; it is back soon."""
    if not history.clusters:
        return
    cluster = pick(history.choice_source, list(history.clusters.values()))
    seconds = pick(history.choice_source, (0.3, 3.0))
    drivers = [driver for driver in cluster.drivers if driver.process.serves]
    if drivers and history.choice_source.choose(2):
        driver = pick(history.choice_source, drivers)
        history.note(f"the driver of {driver.process.name} ends; another one connects after {seconds} s")
        driver.tell(partial(driver.lose, "the driver has ended", seconds))
    else:
        history.note(f"the {cluster.engine.title} cluster is lost for {seconds} s")
        cluster.lose(seconds)


def stop_at_start(history: History) -> None:
    """A process is told to stop while it starts."""
    victim = _victim(history)
    if victim is not None:
        process = history.start_process(victim.serves)
        history.note(f"{process.name} starts beside {victim.name}, and is told to stop soon")
        step = history.scheduler.steps + 1 + history.choice_source.choose(12)
        history.scheduler.at(step, lambda: process.leave() if process.serves else None)


def publish(history: History) -> None:
    """A user publishes a message, perhaps several times at once."""
    history.clients.publish(1 + history.choice_source.choose(2))


def subscribe(history: History) -> None:
    """An agent appears and subscribes to a topic without subscribers."""
    history.clients.subscribe()


def send(history: History) -> None:
    """A client sends messages to a running task one after the other, each perhaps several times at once."""
    history.clients.send(history.choice_source.choose(len(history.tasks)), 1 + history.choice_source.choose(3))


def change_code(history: History) -> None:
    """All agent-handlers are killed, and their successors run changed code."""
    history.scheduler.release += 1
    victims = [process for process in history.served if process.serves == "agent"]
    history.note(f"{', '.join(victim.name for victim in victims)} are killed; their successors run changed code")
    for victim in victims:
        victim.kill()
        history.start_process("agent")


FAULTS: tuple[tuple[int, Callable[[History], None]], ...] = (
    (10, kill),
    (12, replace),
    (6, pause),
    (3, break_before),
    (6, break_after),
    (6, delay),
    (4, fail_disk),
    (5, lose_group),
    (1, lose_library),
    (3, restart_broker),
    (1, step_clock),
    (2, lose_tail),
    (4, fill_memory),
    (6, cancel),
    (3, fork),
    (2, redrive),
    (4, stop_at_start),
    (2, publish),
    (1, subscribe),
    (3, send),
    (2, change_code),
)
OF_USERS = (cancel, fork, redrive, publish, subscribe, send)
"""What users do: no process, connection or server fails."""


def kinds(history: History) -> list[tuple[int, Callable[[History], None]]]:
    """The faults that this history may have, with their weights."""
    found = list(FAULTS)
    if history.clusters:
        found.append((20, lose_engine))
    if len(history.scheduler.bases) > 1:
        found.append((8, move_partition))
    return found


def _victim(history: History) -> RoleProcess | SchedulerProcess | None:
    found = [process for process in history.served if process.serves and not process.paused]
    return pick(history.choice_source, found) if found else None


def _pattern(base: str) -> str:
    return base.replace("{", "\\{").replace("}", "\\}") + "*"


def _saved(history: History, base: str) -> list[tuple[bytes, bytes]]:
    found = sorted(cast(list[bytes], history.server.execute("KEYS", _pattern(base))))
    dumps = history.server.pipeline([("DUMP", key) for key in found]) if found else []
    return [(key, cast(bytes, dump)) for key, dump in zip(found, dumps, strict=True) if dump is not None]
