"""Finds runs that wait for each other in a circle, over all partitions.

Within a partition the broker refuses the request that would close a circle. What is left are circles across
partitions, which the time limit of the request ends, and those that a task of an older release has made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.command.stuck import PAUSE_SECONDS, Fields, open_runs

Place = tuple[int, str, str]
"""Partition, task, run."""


async def find_circles(buses: Sequence[EventBus]) -> list[str]:
    """Each circle as one line: it was there in two looks with a pause between them."""
    first = await _look(buses)
    if not first:
        return []
    await asyncio.sleep(PAUSE_SECONDS)
    second = await _look(buses)
    return [circle for circle in first if circle in second]


async def _look(buses: Sequence[EventBus]) -> list[str]:
    runs: dict[Place, Fields] = {}
    for bus in buses:
        for (task, run), fields in (await open_runs(bus)).items():
            runs[bus.keys.partition, task, run] = fields
    lines: dict[Place, str] = {}
    """The instance in whose line a run stands."""
    waits: dict[Place, list[Place]] = {}
    for place, fields in runs.items():
        waits[place] = _children(place, fields, runs)
        if fields.get(b"cur", b"") == b"mail":
            _, agent, key = fields[b"h"].decode().split("\n")[:3]
            lines[place] = f"{agent}/{key}"
            waits[place] += await _holders(buses[place[0]], lines[place])
    found = []
    for circle in _circles(waits):
        links = [f"{lines[place]} (task {place[1]})" for place in circle if place in lines]
        start = links.index(min(links))
        found.append(" waits for ".join([*links[start:], *links[:start], links[start]]))
    return sorted(set(found))


def _children(place: Place, fields: Fields, runs: dict[Place, Fields]) -> list[Place]:
    """The runs whose answers a run lacks."""
    partition, task, run = place
    found = []
    for name, value in fields.items():
        if not name.startswith(b"m:") or value[8:9] != b"a":
            continue
        child = f"{run}/{name[2:].decode()}"
        elsewhere = runs.get((partition, task, "r"), {}).get(b"k:" + child.encode(), b"").decode()
        if elsewhere.startswith("@"):
            there, _, other = elsewhere[1:].partition(":")
            found.append((int(there), other, "r"))
        else:
            found.append((partition, task, child))
    return found


async def _holders(bus: EventBus, instance: str) -> list[Place]:
    """The runs that hold an instance."""
    busy = cast(bytes | None, await bus.transport.call("HGET", bus.keys.base + f"inst:{instance}", "busy"))
    found = []
    for holder in (busy or b"").decode().split("\n"):
        task, _, run = holder.rpartition("|")
        if task:
            found.append((bus.keys.partition, task, run))
    return found


def _circles(waits: dict[Place, list[Place]]) -> list[list[Place]]:
    """One circle for each group of runs that wait for each other, in the order of their waits."""
    found: list[list[Place]] = []
    done: set[Place] = set()
    for start in waits:
        path: list[Place] = []
        on_path: dict[Place, int] = {}
        todo: list[tuple[Place, bool]] = [(start, True)]
        while todo:
            place, entering = todo.pop()
            if not entering:
                path.pop()
                del on_path[place]
                done.add(place)
            elif place in on_path:
                found.append(path[on_path[place] :])
            elif place not in done:
                on_path[place] = len(path)
                path.append(place)
                todo.append((place, False))
                todo += [(following, True) for following in waits.get(place, ())]
    return found
