"""Schedules in a history: what a client sets, replaces and deletes, and the tasks that they must start."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.state_manager.schedules import SET, Schedule
from runtime_core.wire.commands import digest
from tests.simulation.choice_source import ChoiceSource, pick
from tests.simulation.programs import KEYED, KEYS
from tests.simulation.server import EPOCH_MS
from tests.simulation.snapshot import ENDED, Snapshot, Violation

if TYPE_CHECKING:
    from tests.simulation.history import History

ID = "d"
POLL_SECONDS = 0.4
"""How often schedulers poll in a history with a schedule."""
SLACK_MS = 1000
"""How long after its command a schedule may start, and a schedule without faults may be late."""


@dataclass
class Command:
    """A client sets the schedule, or deletes it, some time after its last command."""

    wait_seconds: float
    data: dict[str, Any] | None
    """Of `weft.schedule.set`; None deletes."""

    def __str__(self) -> str:
        what = "is deleted" if self.data is None else f"is set to {msgspec.json.encode(self.data).decode()}"
        return f"{self.wait_seconds} s later it {what}"


def draw(choice_source: ChoiceSource) -> list[Command]:
    """Set, replace, repeat and delete: at the end no schedule repeats."""
    commands = [Command(0.0, _draw_data(choice_source))]
    for _ in range(choice_source.choose(3)):
        wait = pick(choice_source, (0.4, 0.0, 2.5))
        before = next(command.data for command in reversed(commands) if command.data is not None)
        match choice_source.choose(3):
            case 0:
                commands.append(Command(wait, None))
            case 1:
                commands.append(Command(wait, before))
            case _:
                commands.append(Command(wait, _draw_data(choice_source)))
    last = commands[-1].data
    if last is not None and "every_seconds" in last:
        commands.append(Command(pick(choice_source, (2.5, 0.0, 5.0)), None))
    return commands


def _draw_data(choice_source: ChoiceSource) -> dict[str, Any]:
    agent = pick(choice_source, ("free", KEYED[0]))
    data: dict[str, Any] = {
        "schedule_id": ID,
        "agent": agent,
        "input": [["charge", pick(choice_source, (0, 1.0, 3.0))]],
    }
    if agent in KEYED:
        data["key"] = KEYS[0]
        data["input"].append(["count"])
    if choice_source.choose(3):
        data["every_seconds"] = pick(choice_source, (1.0, 1.5))
        data["overlap"] = pick(choice_source, ("start", "skip"))
    else:
        data["delay_seconds"] = pick(choice_source, (0.5, 0.0, 2.0))
    return data


@dataclass
class _Version:
    """A schedule as one command sets it."""

    schedule: Schedule
    begin_ms: int
    """When the broker stored it."""
    end_ms: int | None = None
    """When it was replaced or deleted."""
    started: list[int] = field(default_factory=list)

    def has(self, time_ms: int, digest: str) -> bool:
        """Whether it might start a task for this time, with this digest of its content."""
        since = time_ms - self.schedule.set_ms
        if self.end_ms is not None and time_ms > self.end_ms:
            return False
        if self.schedule.submission(time_ms).digest != digest:
            return False
        if self.schedule.every_ms:
            return since > 0 and since % self.schedule.every_ms == 0
        return time_ms == self.schedule.next_ms


def look(history: History, held: Snapshot) -> list[Violation]:
    """The last command decides what is stored. Each time starts one task: none is missed, and none overlaps."""
    if not history.schedule or history.lost_tail or history.clock_stepped:
        return []
    found = _kept(history, held)
    versions = _versions(history)
    tasks: dict[int, dict[str, str]] = {}
    for name, fields in held.hashes.items():
        task = name.partition(":task:")[2]
        if task.startswith(f"{ID}-"):
            tasks[int(task.removeprefix(f"{ID}-"))] = fields
    for time_ms in sorted(tasks):
        digest_of_task = tasks[time_ms]["h"].split("\n")[8]
        version = next((version for version in versions if version.has(time_ms, digest_of_task)), None)
        if version is None:
            found.append(Violation("schedule time", f"no schedule had the time {time_ms}: {_told(versions)}"))
        else:
            version.started.append(time_ms)
    for version in versions:
        found += _missed(history, version, tasks) + _overlaps(history, version, tasks)
    return found


def _kept(history: History, held: Snapshot) -> list[Violation]:
    base = history.scheduler.bases[0]
    stored = held.hashes.get(f"{base}schedules", {}).get(ID)
    wanted = history.schedule[-1].data
    looked = cast(list[bytes], history.server.execute("ZRANGE", f"{base}scheduled", 0, -1))
    if wanted is None and stored is not None:
        return [Violation("schedule back", f"the schedule was deleted, and is there: {stored}")]
    if wanted is not None and (stored is None or Schedule.from_json(stored.encode()).digest != digest(SET, wanted)):
        return [Violation("schedule lost", f"the schedule was set to {wanted}, and is {stored}")]
    if bool(looked) != (stored is not None):
        return [Violation("schedule left", f"the schedule is {stored}, and its times are {looked}")]
    return []


def _versions(history: History) -> list[_Version]:
    versions: list[_Version] = []
    for now, _, args, reply in history.scheduler.log:
        if args[0] != b"FCALL" or not cast(bytes, args[1]).endswith(b"_schedule") or reply != 1:
            continue
        at_ms, new = EPOCH_MS + round(now * 1000), cast(bytes, args[6])
        schedule = Schedule.from_json(new) if new else None
        current = versions[-1] if versions and versions[-1].end_ms is None else None
        if current is not None and (schedule is None or _command(schedule) != _command(current.schedule)):
            current.end_ms = at_ms
            current = None
        if current is None and schedule is not None:
            versions.append(_Version(schedule, at_ms))
    return versions


def _command(schedule: Schedule) -> tuple[int, str]:
    """Return the fields that the setting command leaves unchanged."""
    return schedule.set_ms, schedule.digest


def _missed(history: History, version: _Version, tasks: Container[int]) -> list[Violation]:
    schedule, end_ms = version.schedule, version.end_ms
    if schedule.once:
        # Any task of that time: the same schedule may have been set, deleted and set again within its millisecond.
        wanted = [schedule.next_ms] if end_ms is None and schedule.next_ms not in tasks else []
    elif history.planned or schedule.overlap == "skip":
        wanted = []  # a leader that comes late starts the last of the times that it finds
    else:
        assert end_ms is not None, "draw() deletes it"
        times = range(schedule.set_ms + schedule.every_ms, end_ms - SLACK_MS, schedule.every_ms)
        wanted = [time_ms for time_ms in times if time_ms > version.begin_ms + SLACK_MS]
    missed = [time_ms for time_ms in wanted if time_ms not in version.started]
    return [Violation("schedule missed", f"{missed} of {_told([version])} started nothing")] if missed else []


def _overlaps(history: History, version: _Version, tasks: dict[int, dict[str, str]]) -> list[Violation]:
    if version.schedule.overlap != "skip" or history.starters > 1:
        return []  # two that do not know of each other start nothing twice, and that is all
    found = []
    for before, after in zip(version.started, version.started[1:], strict=False):
        one, two = tasks[before], tasks[after]
        if f"{ID}-{before}" in history.clients.redriven or one.get("status") not in ENDED or "ended" not in one:
            continue
        created = int(two["h"].split("\n")[4])
        if int(one["ended"]) > created:
            found.append(
                Violation("schedule overlap", f"{ID}-{after} began at {created}, before {ID}-{before} ended: {one}")
            )
    return found


def _told(versions: list[_Version]) -> str:
    return "; ".join(
        f"set {version.schedule.set_ms} every {version.schedule.every_ms}, kept {version.begin_ms} to {version.end_ms},"
        f" started {version.started}"
        for version in versions
    )
