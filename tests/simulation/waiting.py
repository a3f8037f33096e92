"""Histories that do not end: who waits for whom, and what is left to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.bus.keys import group_of
from tests.simulation.snapshot import ENDED, Snapshot, Violation

if TYPE_CHECKING:
    from tests.simulation.history import History


def stuck(history: History) -> list[Violation]:
    """Return the tasks that wait although no work is left: for whom, and whether in a circle."""
    held = Snapshot(history)
    waits: dict[str, list[str]] = {}
    told = []
    for base in history.scheduler.bases:
        for name, fields in held.hashes.items():
            if not name.startswith(base) or "cur" not in fields or fields.get("status") in ENDED:
                continue
            kind, _, rest = name[len(base) :].partition(":")
            if kind not in ("task", "run"):
                continue
            ref = f"{rest}|r" if kind == "task" else "|".join(rest.split("/", 1))
            told.append(f"{ref} {fields['cur']} missing {[f[2:] for f in fields if f.startswith('m:')]}")
            for f in fields:
                if f.startswith("m:"):
                    waits.setdefault(ref, []).append(f"{ref}/{f[2:]}")
            agent_key = fields["h"].split("\n")[1:3] if "h" in fields else ["", ""]
            if fields["cur"] in ("mail", "nest"):
                busy = held.hashes.get(f"{base}inst:{agent_key[0]}/{agent_key[1]}", {}).get("busy", "")
                waits.setdefault(ref, []).extend(line for line in busy.split("\n") if line)
    circle = _circle(waits)
    opened = [
        name.partition(":task:")[2]
        for name, f in held.hashes.items()
        if ":task:" in name and f.get("status") not in ENDED
    ]
    held_by = {name: f["busy"] for name, f in held.hashes.items() if ":inst:" in name and "busy" in f}
    if circle:
        return [Violation("wait cycle", " -> ".join(circle) + f"; open: {opened}")]
    return [Violation("stuck", f"open: {opened}; {'; '.join(told)}; busy: {held_by}")]


def _circle(waits: dict[str, list[str]]) -> list[str]:
    def walk(ref: str, path: list[str]) -> list[str]:
        if ref in path:
            return [*path[path.index(ref) :], ref]
        for other in waits.get(ref, ()):
            if found := walk(other, [*path, ref]):
                return found
        return []

    for ref in waits:
        if found := walk(ref, []):
            return found
    return []


def unsettled(history: History) -> list[Violation]:
    """Work is left after a long time."""
    held = Snapshot(history)
    told = []
    for base in history.scheduler.bases:
        for stream in (*history.streams, "asks", "replies"):
            told += [f"{stream} {entry} {fields}" for entry, fields in held.streams.get(base + stream, [])]
        told.append(f"timers {history.server.execute('ZRANGE', base + 'timers', 0, -1, 'WITHSCORES')!r}")
        for stream in history.streams:
            pending = history.server.pipeline([("XPENDING", base + stream, group_of(stream))])
            told.append(f"pending {stream} {pending[0]!r}")
    return [Violation("unsettled", "; ".join(told)[:1500])]
