"""Checks of the broker, the services and the trajectory store, with a remedy for each problem.

`weft doctor` prints the findings, and the console shows them.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from runtime_core.base.text import in_bytes
from runtime_core.bus.connection import Reply, Transport, position, text
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, NAMESPACE_FORMAT, STATE_MANAGER, TRAJECTORY_RECORDER, namespace_settings
from runtime_core.bus.library import library
from runtime_core.bus.namespace import server_info
from runtime_core.consumer.announcements import stored_manifests
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput, ServerError, WeftError
from runtime_core.settings import Settings, without_password
from runtime_core.state_manager.backlog import find_lasting_waits, find_quarantines
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.state_manager.ingress import MAX_ID_AHEAD_MS, IngressStream
from runtime_core.state_manager.measures import UNSERVED_TASKS, cure_of, find_unserved, groups_of
from runtime_core.state_manager.publishers import Publishers
from runtime_core.state_manager.schedules import schedules_by_tenant
from runtime_core.state_manager.stuck import find_circles, find_stuck, free

if TYPE_CHECKING:
    from runtime_core.client.task_view import Row
    from runtime_core.trajectory.store import TrajectoryStore

CLOCK_SECONDS = 1.0
"""The largest accepted difference of two clocks, in seconds: a larger one shows wrong ages and times."""
SILENT_MS = 10_000
"""After this time without a heartbeat no service runs: living services would have declared the silent ones dead."""
ENGINES = ("ray", "spark")
REQUIRED = (GROUPS["agent"], GROUPS["tool"], STATE_MANAGER, TRAJECTORY_RECORDER)
"""Services without which no task ends."""
MEMORY_WARNING = 0.8
"""The share of `maxmemory` above which submits are rejected."""
SCHEDULES_WARNING = 0.9
"""The share of a tenant's schedules above which the check fails: more are soon rejected."""
PARKED_SHOWN = 5
FSYNC_LOSS = {
    "always": "a crash loses no acknowledged write",
    "everysec": "a crash may lose the last two seconds",
    "no": "a crash may lose everything that the operating system has not written",
}
"""What a crash loses, by `appendfsync`."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What the checks examine."""

    settings: Settings
    url: str
    """The broker's."""
    transport: Transport
    buses: Sequence[EventBus]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    ok: bool
    message: str
    remedy: str = ""
    checked: bool = True
    """False: this user may not check it."""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        found: dict[str, Any] = {"check": self.check, "ok": self.ok, "message": self.message}
        return {**found, "remedy": self.remedy} if self.remedy else found


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that the user allows."""

    repair: bool = False
    clean: bool = False


Check = Callable[[Installation, Changes], AsyncIterator[Finding]]


async def findings(opened: Installation, changes: Changes = Changes()) -> AsyncIterator[Finding]:
    """Run all checks, and yield what each finds."""
    for check in CHECKS:
        try:
            async for finding in check(opened, changes):
                yield finding
        except ServerError as error:
            message = f"could not be checked: {error}"
            yield Finding(check.__name__, False, message, "check the rights of this user", checked=False)


# -- the server --------------------------------------------------------------------------------------------------


async def server(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    began = time.monotonic()
    info = await server_info(opened.transport, "server")
    took = (time.monotonic() - began) * 1000
    where = without_password(opened.url)
    lease = opened.settings.lease_seconds
    if took > lease * 1000:
        message = f"{where} answers in {took / 1000:.1f} s, longer than the lease of {lease:g} s"
        remedy = "run the services nearer to the broker, or raise WEFT_LEASE_SECONDS in all of them"
        yield Finding("server", False, message, remedy)
        return
    if not info:
        yield Finding("server", True, f"{where} answers; this user may not run INFO, so the version is unknown")
        return
    valkey = info.get("valkey_version")
    name = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'unknown')}"
    yield Finding("server", True, f"{name} at {where} answers in {took:.1f} ms")


async def memory(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    info = await server_info(opened.transport, "memory")
    if not info:
        yield Finding("memory", True, "unknown: this user may not run INFO")
        return
    policy = info.get("maxmemory_policy", "")
    if policy == "noeviction":
        yield Finding("maxmemory-policy", True, policy)
    else:
        remedy = "CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration"
        lost = f"{policy}: the server may evict unfinished work"
        yield Finding("maxmemory-policy", False, lost, remedy)
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        yield Finding("memory", True, f"{in_bytes(used)} used, no limit (maxmemory 0)")
    elif used <= limit * MEMORY_WARNING:
        yield Finding("memory", True, f"{in_bytes(used)} of {in_bytes(limit)} used")
    else:
        full = f"{in_bytes(used)} of {in_bytes(limit)} used: submits are rejected"
        yield Finding("memory", False, full, "raise maxmemory, or lower WEFT_RETENTION_SECONDS")


async def persistence(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    reply = await _allowed(opened.transport.call("CONFIG", "GET", "appendonly", "appendfsync", "save"))
    found = _pairs(reply or [])
    if "appendonly" not in found:
        yield Finding("persistence", True, "unknown: this user may not run CONFIG GET")
    elif found["appendonly"] != "yes":
        lost = "all data since the last snapshot" if found.get("save") else "all data"
        off = f"appendonly is off: a restart of the server loses {lost}"
        yield Finding("persistence", False, off, "CONFIG SET appendonly yes, and set it in the server's configuration")
    elif (await server_info(opened.transport, "persistence")).get("aof_last_write_status", "ok") != "ok":
        broken = "the append-only file cannot be written"
        yield Finding("persistence", False, broken, "check the server's log and its disk")
    else:
        fsync = found.get("appendfsync", "")
        yield Finding("persistence", True, f"append-only file, appendfsync {fsync}: {FSYNC_LOSS.get(fsync, '')}")


async def clock(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    before = time.time()
    apart = abs(await opened.buses[0].time_ms() / 1000 - (before + time.time()) / 2)
    yield Finding(
        "clock",
        apart <= CLOCK_SECONDS,
        f"the clocks of the broker and this machine differ by {apart:.3f} s",
        ""
        if apart <= CLOCK_SECONDS
        else "synchronize both with NTP: retries, deadlines and times of steps are off by this amount",
    )


async def functions(opened: Installation, changes: Changes) -> AsyncIterator[Finding]:
    own, call = library().name, opened.transport.call
    try:
        reply = cast(list[list[Reply]], await call("FUNCTION", "LIST", "LIBRARYNAME", "weft_*"))
    except ServerError as error:
        yield Finding("functions", False, f"cannot be listed: {error}", "allow this user FUNCTION LIST")
        return
    names = {text(dict(zip(map(text, flat[::2]), flat[1::2], strict=True))["library_name"]) for flat in reply}
    others = ", ".join(sorted(names - {own}))
    loaded = f"{own} is loaded" if own in names else f"{own} is not loaded; the first call loads it"
    yield Finding("functions", True, loaded)
    if others and changes.clean:
        for name in names - {own}:
            await call("FUNCTION", "DELETE", name)
        yield Finding("functions", True, f"removed {others}; a service that still needs one loads it again")
    elif others:
        also = f"{others} of other releases are also loaded; after an update, weft doctor --clean removes them"
        yield Finding("functions", True, also)


# -- the namespace -----------------------------------------------------------------------------------------------


async def namespace(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    name, call = opened.settings.namespace, opened.transport.call
    stored = cast(list[bytes | None], await call("HMGET", namespace_settings(name), "partitions", "format"))
    if stored[0] is None or stored[1] is None:
        remedy = "start services in it, or set WEFT_NAMESPACE to the one that they use"
        yield Finding("namespace", False, f"{name!r} does not exist on this broker", remedy)
        return
    known = int(stored[1]) <= NAMESPACE_FORMAT
    yield Finding(
        "namespace",
        known,
        f"{name!r} has {_counted(int(stored[0]), 'partition')}, format {int(stored[1])}",
        "" if known else f"this release reads formats up to {NAMESPACE_FORMAT}: update it",
    )
    if overload := await call("HGET", opened.buses[0].keys.meta, "overload"):
        remedy = "wait until work has drained, or raise this limit"
        yield Finding("limits", False, f"submits are rejected: {text(overload)}", remedy)


async def ingress(opened: Installation, changes: Changes) -> AsyncIterator[Finding]:
    """Check the ingress streams. An entry with the largest possible id makes the server reject every later `XADD *`."""
    registered = await Publishers(opened.buses[0]).all()
    failed = False
    for publisher in ("", *(each.name for each in registered)):
        stream = IngressStream(opened.transport, opened.settings.namespace, publisher)
        try:
            ahead = await _last_id_ahead(opened, stream)
        except ServerError as error:
            remedy = f"if it is not a stream, remove it with DEL {stream.key}; publishers create it again"
            yield Finding("ingress", False, f"{stream.key} cannot be read: {error}", remedy)
            failed = True
            continue
        if ahead and changes.repair:
            await stream.read(b"", 1, 1)  # deletes it if it is empty
            if not await _last_id_ahead(opened, stream):
                repaired = f"repaired: removed {stream.key}, whose last id was in the future"
                yield Finding("ingress", True, repaired)
                continue
        if ahead:
            ended = f"the last id of {stream.key} is {ahead}, in the future: it may accept no more entries"
            remedy = "after the state-manager has emptied it, weft doctor --repair removes it"
            yield Finding("ingress", False, ended, f"{remedy}; weft dead list shows its sender")
            failed = True
    if registered:
        async for finding in _schedules(opened, {each.tenant for each in registered}):
            yield finding
    if not failed:
        names = ", ".join(f"{each.name} ({each.tenant})" for each in registered)
        also = f", as can those of {names}" if names else "; no publishers are registered"
        yield Finding("ingress", True, f"the shared stream can be read{also}")


async def _schedules(opened: Installation, tenants: set[str]) -> AsyncIterator[Finding]:
    """Compare the schedules of each tenant with its bounds."""
    counts, sizes = await schedules_by_tenant(opened.buses[0], tenants)
    del sizes[""]
    most, most_bytes = opened.settings.tenant_schedules_max, opened.settings.tenant_schedules_max_bytes
    for tenant, size in sizes.most_common():
        line = f"tenant {tenant} has {counts[tenant]} of {most} schedules, {in_bytes(size)} of {in_bytes(most_bytes)}"
        full = counts[tenant] > most * SCHEDULES_WARNING or size > most_bytes * SCHEDULES_WARNING
        remedy = "delete some, or raise WEFT_TENANT_SCHEDULES_MAX and WEFT_TENANT_SCHEDULES_MAX_BYTES"
        yield Finding("schedules", not full, line, remedy if full else "")


async def _last_id_ahead(opened: Installation, stream: IngressStream) -> str:
    """Return the stream's last id if it is in the future; else an empty text."""
    try:
        reply = cast(list[Reply], await opened.transport.call("XINFO", "STREAM", stream.key))
    except ServerError as error:
        if "no such key" in str(error):
            return ""
        raise
    last = text(dict(zip(reply[::2], reply[1::2], strict=True))[b"last-generated-id"])
    return last if position(last)[0] > await opened.buses[0].time_ms() + MAX_ID_AHEAD_MS else ""


# -- services ---------------------------------------------------------------------------------------------------


async def consumers(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Check that every required service sends heartbeats."""
    for bus in opened.buses:
        counts = Counter([name.partition("@")[0] for name in await _alive(bus)])
        place = _place(opened, bus)
        beat = cast(bytes | None, await bus.transport.call("HGET", bus.keys.meta, "beat_at"))
        silent = await opened.buses[0].time_ms() - int(beat) if beat is not None else 0
        absent = ", ".join(name for name in REQUIRED if name not in counts)
        alive = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
        if counts and silent > SILENT_MS:
            late = f"the last heartbeat{place} was {silent / 1000:.0f} s ago: no service is running"
            yield Finding("consumers", False, late, "start the services, for example with weft up")
        elif absent:
            yield Finding("consumers", False, f"alive{place}: {alive}; missing: {absent}", f"start {absent}")
        else:
            yield Finding("consumers", True, f"alive{place}: {alive}")


async def engines(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Check that a gateway is running for every engine stream with waiting steps."""
    streams = set(ENGINES)
    delayed: Counter[str] = Counter()
    for bus in opened.buses:
        streams |= {text(name) for name in cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.engines))}
        timers = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.timers, 0, -1))
        delayed += Counter([timer.decode().split("|")[1] for timer in timers if timer.startswith(b"e|")])
    lines: list[str] = []
    remedies: dict[str, None] = {}
    for stream in sorted(streams):
        live, waiting = [], 0
        for bus in opened.buses:
            gateways = await bus.gateways(stream)
            steps = cast(int, await bus.transport.call("XLEN", bus.keys.stream(stream)))
            live.append(gateways.live)
            waiting += steps
            if steps and not gateways.live:
                remedies[gateways.problem] = None
        again = f" and {delayed[stream]} to be retried" if delayed[stream] else ""
        lines.append(f"{stream}: {_counted(min(live), 'gateway')}, {_counted(waiting, 'step')}{again}")
    yield Finding("engines", not remedies, "; ".join(lines), "; ".join(remedies))


async def apps(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    bus = opened.buses[0]
    stored = await stored_manifests(bus)
    if not stored:
        none = "no app has published its agents, so submits wait"
        yield Finding("apps", False, none, "start an agent-handler with WEFT_APP")
    for data in stored:
        try:
            found = Manifest.from_json(data)
        except InvalidInput as error:
            yield Finding("apps", False, str(error), "a newer release may have written it: update this one")
            continue
        kinds = (("agents", found.agents), ("tools", found.tools), ("engine functions", found.engine_functions))
        names = [f"{kind} {', '.join(sorted(named)) or 'none'}" for kind, named in kinds]
        yield Finding("apps", True, f"{found.app} {found.version}: {'; '.join(names)}")


# -- work --------------------------------------------------------------------------------------------------------


async def stuck(opened: Installation, changes: Changes) -> AsyncIterator[Finding]:
    found_any = False
    for bus in opened.buses:
        for found in await find_stuck(bus):
            found_any = True
            if changes.repair and await free(bus, found):
                end = (
                    "it can continue"
                    if found.what in ("instance", "mailbox", "slot")
                    else "stored as a dead letter (reason: lost)"
                )
                yield Finding("stuck", True, f"repaired: {found}: {end}")
            else:
                yield Finding("stuck", False, str(found), "weft doctor --repair releases it")
    if not found_any:
        yield Finding("stuck", True, "every open run has an event or timer that continues it")


async def deadlock(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    found = await find_circles(opened.buses)
    for circle in found:
        yield Finding("deadlock", False, circle, "cancel one of the tasks: weft task cancel ID")
    if not found:
        yield Finding("deadlock", True, "no runs wait for each other")


async def waits(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Find messages of agents that wait for a busy agent, or for one that no process runs."""
    found = await find_lasting_waits(opened.buses)
    for wait in found:
        # Only the handler's own code knows whether it waits for one of these messages: a long wait is not a defect.
        remedy = (
            "start a process that registers it, or drop it"
            if wait.unserved
            else "if that handler waits for one of them: weft task cancel ID, and let the type interleave"
        )
        yield Finding("waits", not wait.unserved, str(wait), remedy)
    if not found:
        yield Finding("waits", True, "no message to an agent of a runtime has waited long")


async def quarantine(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Find handlers that take no other work until a delivery that was delivered too often has run alone."""
    found = [each for bus in opened.buses for each in await find_quarantines(bus)]
    for each in found:
        remedy = f"it ends on its own; to end it now, cancel the task (weft task cancel {each.task}), or add a handler"
        yield Finding("quarantine", each.others > 0, str(each), "" if each.others else remedy)
    if not found:
        yield Finding("quarantine", True, "no handler runs a delivery alone")


async def unserved(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Find work for an agent or a tool that was removed or renamed: no running handler has the name."""
    found = [each for bus in opened.buses for each in await find_unserved(bus, UNSERVED_TASKS * 500)]
    for each in found:
        remedy = f"{cure_of(each.pool)}, or cancel its tasks (weft task list --agent NAME)"
        yield Finding("names", False, str(each), remedy)
    if not found:
        yield Finding("names", True, "a running handler has each agent and tool that work waits for")


async def letters(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    found = DeadLetters(opened.buses)
    count, sizes = await found.count(), await found.sizes()
    line = "none"
    if count:
        bound = f" of {in_bytes(sizes.bound)}" if sizes.bound else ""
        shares = ", ".join(f"{share} {in_bytes(size)}" for share, size in list(sizes.shares.items())[:5])
        line = f"{count} ({in_bytes(sizes.total)}{bound}: {shares}); see weft dead list --group-by error"
    if sizes.trimmed:
        line += f"; {sizes.trimmed} older ones were trimmed by size or age"
    yield Finding("dead letters", True, line)


async def parked(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    """Find runs whose code differs from what they did before it changed."""
    found = [letter async for letter in DeadLetters(opened.buses).parked()]
    for letter in found[:PARKED_SHOWN]:
        line = f"agent {letter.name!r} of task {letter.task} is parked: {letter.error.get('message', '')}"
        yield Finding("parked", False, line, f"weft task show {letter.task}; weft dead redrive {letter.letter_id}")
    if len(found) > PARKED_SHOWN:
        remedy = "roll back or fix the code, then weft dead redrive --all --reason diverged"
        yield Finding("parked", False, f"{len(found) - PARKED_SHOWN} more runs are parked", remedy)
    if not found:
        yield Finding("parked", True, "no run waits for a rollback or a fix of its code")


async def store(opened: Installation, _: Changes) -> AsyncIterator[Finding]:
    from runtime_core.trajectory.store import TrajectoryStore  # here: the import takes half a second

    url = without_password(opened.settings.trajectory_url)
    # Read before the store: the recorder writes to the store first and may continue in between.
    published = {bus: await _published(bus) for bus in opened.buses}
    try:
        found = await TrajectoryStore.open_existing(opened.settings.trajectory_url)
        if found is None:
            yield await _recorded_elsewhere(url, published)
            return
        name = opened.settings.namespace
        try:
            cursors = {bus: await found.cursor(name, bus.keys.partition) for bus in opened.buses}
            broken = await found.unreadable(name)
        finally:
            await found.close()
    except WeftError as error:
        yield Finding("trajectories", False, str(error), "check WEFT_TRAJECTORY_URL")
        return
    for bus, cursor in cursors.items():
        position_there, upto = published[bus], f"{url} is recorded up to {cursor}{_place(opened, bus)}"
        # The store may be ahead of the recorder's position on the broker, but not behind: entries up to that position
        # may have been trimmed.
        if position_there is None or position(cursor) >= position(position_there):
            more = ", and more entries follow" if await _behind(bus, cursor) else ""
            yield Finding("trajectories", True, upto + more)
        else:
            remedy = "the store was replaced, or is not the recorder's: set WEFT_TRAJECTORY_URL to the recorder's value"
            yield Finding(
                "trajectories",
                False,
                f"{upto}, but the recorder's position on the broker is {position_there}: steps are missing",
                remedy,
            )
    if broken:
        first = f"the first of task {broken[0].task}: {broken[0].reason}"
        unread = f"{len(broken)} entries could not be read; {first}"
        yield Finding("trajectories", False, unread, "see the table weft_unreadable")


async def _recorded_elsewhere(url: str, published: dict[EventBus, str | None]) -> Finding:
    """Check a recorder whose store is not reachable from here, by its position on the broker."""
    more = False
    for bus, recorded in published.items():
        if recorded is None or not any(name.startswith(f"{TRAJECTORY_RECORDER}@") for name in await _alive(bus)):
            remedy = "start a trajectory-recorder, or set WEFT_TRAJECTORY_URL to its value"
            return Finding("trajectories", False, f"there is no store at {url}", remedy)
        more = more or await _behind(bus, recorded)
    rest = ", and more entries follow" if more else ""
    nothing = f"there is no store at {url}, so commands here cannot show steps"
    return Finding("trajectories", True, f"recorded by a trajectory-recorder elsewhere{rest}; {nothing}")


CHECKS: tuple[Check, ...] = (
    server, memory, persistence, clock, namespace, functions, ingress, consumers, engines, apps, stuck, deadlock,
    waits, quarantine, unserved, parked, letters, store,
)  # fmt: skip


async def _published(bus: EventBus) -> str | None:
    recorder = (await groups_of(bus.transport.call, bus.keys.record) or {}).get(TRAJECTORY_RECORDER)
    return None if recorder is None else recorder.read


async def _behind(bus: EventBus, entry: str) -> bool:
    """Return whether the record has entries after this one."""
    return bool(await bus.transport.call("XRANGE", bus.keys.record, f"({entry}", "+", "COUNT", 1))


async def _alive(bus: EventBus) -> list[str]:
    """Return the services with recent heartbeats, as `service@place`."""
    return [text(name) for name in cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.alive, 0, -1))]


async def _allowed(call: Awaitable[Reply]) -> Reply:
    """Return the reply; None if this user may not run the command."""
    try:
        return await call
    except ServerError as error:
        if not str(error).startswith("NOPERM"):
            raise
        return None


def _pairs(reply: Reply) -> dict[str, str]:
    flat = cast(list[Reply], reply)
    return dict(zip(map(text, flat[::2]), map(text, flat[1::2]), strict=True))


def _place(opened: Installation, bus: EventBus) -> str:
    return f" of partition {bus.keys.partition}" if len(opened.buses) > 1 else ""


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


# -- parked runs -------------------------------------------------------------------------------------------------

_DIVERGED = re.compile(
    r"step (\S+) of .*?: the journal has (.*?), but the code now requests (.*): the code has changed", re.DOTALL
)
"""The message of a Divergence."""
_LINE = re.compile(r'  File "([^"]+)", line (\d+), in (.+)\n(?:    (.+))?')


async def parked_runs(buses: Sequence[EventBus], namespace: str, task: str, store: TrajectoryStore | None) -> list[Row]:
    """Return where the code of the task's parked runs differs: `run`, `step`, the calls `recorded` and `now`, and the
    `line` of the code and its `code`. A part that is not known is empty.
    """
    found: list[Row] = []
    async for letter in DeadLetters(buses).parked(task):
        error = letter.errors[-1] if letter.errors else letter.error
        message = str(error.get("message", ""))
        parts = _DIVERGED.match(message)
        step, recorded, now = parts.groups() if parts else ("?", "", message)
        if not recorded.startswith("ctx."):
            recorded = await store.call_of(namespace, task, letter.run, step) if store is not None else ""
        frames = _LINE.findall(str(error.get("traceback", "")))
        file, number, function, code = frames[-1] if frames else ("", "", "", "")
        line = f"{file}:{number} in {function}" if file else ""
        found.append({"run": letter.run, "step": step, "recorded": recorded, "now": now, "line": line, "code": code})
    return found
