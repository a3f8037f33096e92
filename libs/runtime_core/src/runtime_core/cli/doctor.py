"""`weft doctor`: is everything as it must be, and what to do where it is not: one check after the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

from typer import Exit, Option

from runtime_core.bus.admin import AHEAD_MS, IngressStream
from runtime_core.bus.connection import Reply, position, text
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, NAMESPACE_FORMAT, STATE_MANAGER, TRAJECTORY_RECORDER, namespace_settings
from runtime_core.bus.library import library
from runtime_core.cli.connection import Broker, Commands, broker, trajectories
from runtime_core.cli.output import Json, in_bytes, print_json
from runtime_core.config.values import without_password
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import ConfigurationError, InvalidInput, ServerError, WeftError
from runtime_core.ingress.publishers import Publishers
from runtime_core.maintenance.dead_letters import DeadLetters
from runtime_core.maintenance.measures import groups_of
from runtime_core.maintenance.stuck import find_circles, find_stuck, free
from runtime_core.text import plain

CLOCK_SECONDS = 1.0
"""Clocks further apart than this show wrong ages and times."""
SILENT_MS = 10_000
"""Without a heartbeat for so long nobody is left to notice: deaths are noticed by the beats of others."""
ENGINES = ("ray", "spark")
NEEDED = (GROUPS["agent"], GROUPS["tool"], STATE_MANAGER, TRAJECTORY_RECORDER)
"""Services without which no task ends."""
MEMORY_WARNING = 0.8
"""Of `maxmemory`: above it submits are refused."""

app = Commands()


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    ok: bool
    message: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        found: dict[str, Any] = {"check": self.check, "ok": self.ok, "message": self.message}
        return {**found, "remedy": self.remedy} if self.remedy else found

    def print(self) -> None:
        print(f"{'✓' if self.ok else '✗'} {self.check}: {plain(self.message)}", flush=True)
        if self.remedy:
            print(f"    → {plain(self.remedy)}", flush=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the doctor may change."""

    repair: bool = False
    clean: bool = False


Check = Callable[[Broker, Wanted], AsyncIterator[Finding]]


@app.verb("doctor", seconds=None)  # large namespaces take a while
async def doctor(
    repair: Annotated[
        bool, Option("--repair", help="Free what is stuck: lost work becomes dead letters, instances go on.")
    ] = False,
    clean: Annotated[bool, Option("--clean", help="Remove functions of other releases from the broker.")] = False,
    as_json: Json = False,
) -> None:
    """Check that everything is as it must be.

    The broker, the services and the trajectory store; what is wrong comes with a remedy. The status is then 1.

    \b
    Example:
      weft doctor
    """
    findings: list[Finding] = []
    async for finding in _findings(Wanted(repair, clean)):
        findings.append(finding)
        if not as_json:
            finding.print()
    wrong = [finding for finding in findings if not finding.ok]
    if as_json:
        print_json({"ok": not wrong, "checks": [finding.to_json() for finding in findings]})
    else:
        print(f"\n{len(wrong)} of {len(findings)} are wrong" if wrong else "\nall is well")
    if wrong:
        raise Exit(1)


async def _findings(wanted: Wanted) -> AsyncIterator[Finding]:
    try:
        async with broker(unchecked=True) as opened:
            for check in CHECKS:
                try:
                    async for finding in check(opened, wanted):
                        yield finding
                except ServerError as error:
                    yield Finding(check.__name__, False, f"could not be checked: {error}", "may this user ask that?")
    except ConfigurationError as error:
        yield Finding("server", False, str(error))


# -- the server --------------------------------------------------------------------------------------------------


async def server(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    began = time.monotonic()
    info = await _info(opened, "server")
    took = (time.monotonic() - began) * 1000
    where = without_password(opened.url)
    if not info:
        yield Finding("server", True, f"{where} answers; this user may not ask for its version (INFO)")
        return
    valkey = info.get("valkey_version")
    name = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'unknown')}"
    yield Finding("server", True, f"{name} at {where} answers in {took:.1f} ms")


async def memory(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    info = await _info(opened, "memory")
    if not info:
        yield Finding("memory", True, "this user may not ask for it (INFO)")
        return
    policy = info.get("maxmemory_policy", "")
    if policy == "noeviction":
        yield Finding("maxmemory-policy", True, policy)
    else:
        remedy = "CONFIG SET maxmemory-policy noeviction, and write it into the configuration"
        lost = f"{policy}: the server may throw away work that is not done"
        yield Finding("maxmemory-policy", False, lost, remedy)
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        yield Finding("memory", True, f"{in_bytes(used)} used, no limit (maxmemory 0)")
    elif used <= limit * MEMORY_WARNING:
        yield Finding("memory", True, f"{in_bytes(used)} of {in_bytes(limit)} used")
    else:
        full = f"{in_bytes(used)} of {in_bytes(limit)} used: submits are refused"
        yield Finding("memory", False, full, "raise maxmemory, or lower WEFT_RETENTION_SECONDS")


_FSYNC = {
    "always": "a crash of the machine loses nothing that was answered",
    "everysec": "a crash may lose the last second or two",
    "no": "a crash may lose whatever the system had not written",
}


async def persistence(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    asked = _allowed(opened.transport.call("CONFIG", "GET", "appendonly", "appendfsync", "save"))
    found = _pairs(await asked or [])
    if "appendonly" not in found:
        yield Finding("persistence", True, "unknown: this user may not ask for it (CONFIG GET)")
    elif found["appendonly"] != "yes":
        lost = "all since the last snapshot" if found.get("save") else "everything"
        off = f"appendonly is off: a restart of the server loses {lost}"
        yield Finding("persistence", False, off, "CONFIG SET appendonly yes, and write it into the configuration")
    elif (await _info(opened, "persistence")).get("aof_last_write_status", "ok") != "ok":
        broken = "the append-only file cannot be written"
        yield Finding("persistence", False, broken, "look at the server's log and its disk")
    else:
        fsync = found.get("appendfsync", "")
        yield Finding("persistence", True, f"append-only file, appendfsync {fsync}: {_FSYNC.get(fsync, '')}")


async def clock(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    before = time.time()
    apart = abs(await opened.now_ms() / 1000 - (before + time.time()) / 2)
    yield Finding(
        "clock",
        apart <= CLOCK_SECONDS,
        f"the broker's and this machine's are {apart:.3f} s apart",
        "" if apart <= CLOCK_SECONDS else "keep both by NTP: retries, deadlines and times of steps are off by that",
    )


async def functions(opened: Broker, wanted: Wanted) -> AsyncIterator[Finding]:
    own, call = library().name, opened.transport.call
    try:
        reply = cast(list[list[Reply]], await call("FUNCTION", "LIST", "LIBRARYNAME", "weft_*"))
    except ServerError as error:
        yield Finding("functions", False, f"cannot be listed: {error}", "let this user call FUNCTION LIST")
        return
    names = {text(dict(zip(map(text, flat[::2]), flat[1::2], strict=True))["library_name"]) for flat in reply}
    others = ", ".join(sorted(names - {own}))
    loaded = f"{own} is loaded" if own in names else f"{own} is not loaded; the first call loads it"
    yield Finding("functions", True, loaded)
    if others and wanted.clean:
        for name in names - {own}:
            await call("FUNCTION", "DELETE", name)
        yield Finding("functions", True, f"removed {others}; a service that still uses one loads it again by itself")
    elif others:
        also = f"{others} of other releases are loaded too; weft doctor --clean removes them after an update"
        yield Finding("functions", True, also)


# -- the namespace -----------------------------------------------------------------------------------------------


async def namespace(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    name, call = opened.settings.namespace, opened.transport.call
    stored = cast(list[bytes | None], await call("HMGET", namespace_settings(name), "partitions", "format"))
    if stored[0] is None or stored[1] is None:
        remedy = "start services with it, or set WEFT_NAMESPACE to the one that they use"
        yield Finding("namespace", False, f"{name!r} does not exist on this broker", remedy)
        return
    known = int(stored[1]) <= NAMESPACE_FORMAT
    yield Finding(
        "namespace",
        known,
        f"{name!r} has {_counted(int(stored[0]), 'partition')}, format {int(stored[1])}",
        "" if known else f"this release reads up to {NAMESPACE_FORMAT}: update it",
    )
    if overload := await call("HGET", opened.buses[0].keys.meta, "overload"):
        remedy = "let work drain, or raise the limit that is named"
        yield Finding("limits", False, f"submits are refused: {text(overload)}", remedy)


async def ingress(opened: Broker, wanted: Wanted) -> AsyncIterator[Finding]:
    """A stream is ended by an entry with the largest id there is: the server then refuses every `XADD *`."""
    registered = await Publishers(opened.buses[0]).all()
    wrong = False
    for publisher in ("", *(each.name for each in registered)):
        stream = IngressStream(opened.transport, opened.settings.namespace, publisher)
        try:
            ahead = await _last_id_ahead(opened, stream)
        except ServerError as error:
            remedy = f"if it is no stream, remove it: DEL {stream.key}; then publishers make it again"
            yield Finding("ingress", False, f"{stream.key} cannot be read: {error}", remedy)
            wrong = True
            continue
        if ahead and wanted.repair:
            await stream.read(b"", 1, 1)  # removes it where it is empty
            if not await _last_id_ahead(opened, stream):
                mended = f"repaired: {stream.key} was ended by an id in the future, and is removed"
                yield Finding("ingress", True, mended)
                continue
        if ahead:
            ended = f"{stream.key} has the last id {ahead}, in the future: few more entries fit, or none"
            remedy = "once the state-manager has emptied it, weft doctor --repair removes it"
            yield Finding("ingress", False, ended, f"{remedy}; weft dead list shows who sent it")
            wrong = True
    if not wrong:
        names = ", ".join(f"{each.name} ({each.tenant})" for each in registered)
        also = f", and so can those of {names}" if names else "; no publishers are registered"
        yield Finding("ingress", True, f"the shared stream can be read{also}")


async def _last_id_ahead(opened: Broker, stream: IngressStream) -> str:
    """The stream's last id where that lies in the future; else empty."""
    try:
        reply = cast(list[Reply], await opened.transport.call("XINFO", "STREAM", stream.key))
    except ServerError as error:
        if "no such key" in str(error):
            return ""
        raise
    last = text(dict(zip(reply[::2], reply[1::2], strict=True))[b"last-generated-id"])
    return last if position(last)[0] > await opened.now_ms() + AHEAD_MS else ""


# -- who works on it ---------------------------------------------------------------------------------------------


async def consumers(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    """Who says that it lives, per service."""
    for bus in opened.buses:
        counts = Counter([name.partition("@")[0] for name in await _alive(bus)])
        place = _place(opened, bus)
        beat = cast(bytes | None, await bus.transport.call("HGET", bus.keys.meta, "beat_at"))
        silent = await opened.now_ms() - int(beat) if beat is not None else 0
        absent = ", ".join(name for name in NEEDED if name not in counts)
        running = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
        if counts and silent > SILENT_MS:
            late = f"the last heartbeat{place} was {silent / 1000:.0f} s ago: no service runs"
            yield Finding("consumers", False, late, "start the services, as with weft up")
        elif absent:
            yield Finding("consumers", False, f"alive{place}: {running}; none of {absent}", f"start {absent}")
        else:
            yield Finding("consumers", True, f"alive{place}: {running}")


async def engines(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    """Who serves Ray and Spark, and what waits for them."""
    streams = set(ENGINES)
    put_back: Counter[str] = Counter()
    for bus in opened.buses:
        streams |= {text(name) for name in cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.engines))}
        timers = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.timers, 0, -1))
        put_back += Counter([timer.decode().split("|")[1] for timer in timers if timer.startswith(b"e|")])
    said: list[str] = []
    remedies: dict[str, None] = {}
    for stream in sorted(streams):
        live, waiting = [], 0
        for bus in opened.buses:
            gateways = await bus.gateways(stream)
            steps = cast(int, await bus.transport.call("XLEN", bus.keys.stream(stream)))
            live.append(gateways.live)
            waiting += steps
            if steps and not gateways.live:
                remedies[gateways.nobody] = None
        again = f" and {put_back[stream]} to be tried again" if put_back[stream] else ""
        said.append(f"{stream}: {_counted(min(live), 'gateway')}, {_counted(waiting, 'step')}{again}")
    yield Finding("engines", not remedies, "; ".join(said), "; ".join(remedies))


async def apps(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    bus = opened.buses[0]
    stored = cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))
    if not stored:
        none = "no app has published its agents: submits wait"
        yield Finding("apps", False, none, "start an agent-handler with WEFT_APP")
    for data in stored:
        try:
            found = Manifest.from_json(data)
        except InvalidInput as error:
            yield Finding("apps", False, str(error), "it may be of a newer release: update this one")
            continue
        kinds = (("agents", found.agents), ("tools", found.tools), ("engine functions", found.engine_functions))
        names = [f"{kind} {', '.join(sorted(named)) or 'none'}" for kind, named in kinds]
        yield Finding("apps", True, f"{found.app} {found.version}: {'; '.join(names)}")


# -- the work ----------------------------------------------------------------------------------------------------


async def stuck(opened: Broker, wanted: Wanted) -> AsyncIterator[Finding]:
    whole = True
    for bus in opened.buses:
        for found in await find_stuck(bus):
            whole = False
            if wanted.repair and await free(bus, found):
                end = "it may go on" if found.what in ("instance", "mailbox") else "kept as a dead letter (reason lost)"
                yield Finding("stuck", True, f"repaired: {found}: {end}")
            else:
                yield Finding("stuck", False, str(found), "weft doctor --repair frees it")
    if whole:
        yield Finding("stuck", True, "every open run has something that carries it on")


async def deadlock(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    found = await find_circles(opened.buses)
    for circle in found:
        yield Finding("deadlock", False, circle, "cancel one of the tasks: weft task cancel ID")
    if not found:
        yield Finding("deadlock", True, "no runs wait for each other in a circle")


async def letters(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    found = DeadLetters(opened.buses)
    count, sizes = await found.count(), await found.sizes()
    said = "none"
    if count:
        bound = f" of {in_bytes(sizes.bound)}" if sizes.bound else ""
        shares = ", ".join(f"{share} {in_bytes(size)}" for share, size in list(sizes.shares.items())[:5])
        said = f"{count} ({in_bytes(sizes.total)}{bound}: {shares}); look: weft dead list --group-by error"
    if sizes.trimmed:
        said += f"; {sizes.trimmed} were trimmed so far, since they were too many bytes or too old"
    yield Finding("dead letters", True, said)


async def store(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    url = without_password(opened.settings.trajectory_url)
    # Before the store is asked: the recorder, which writes there first, may go on between the two looks.
    published = {bus: await _published(bus) for bus in opened.buses}
    try:
        async with trajectories(opened.settings) as found:
            if found is None:
                yield await _recorded_elsewhere(opened, url, published)
                return
            name = opened.settings.namespace
            cursors = {bus: await found.cursor(name, bus.keys.partition) for bus in opened.buses}
            broken = await found.unreadable(name)
    except WeftError as error:
        yield Finding("trajectories", False, str(error), "check WEFT_TRAJECTORY_URL")
        return
    for bus, cursor in cursors.items():
        told, upto = published[bus], f"{url} is recorded up to {cursor}{_place(opened, bus)}"
        # The store may be ahead of what is published, never behind: what is published may have been trimmed.
        if told is None or position(cursor) >= position(told):
            more = ", and more is on its way" if await _behind(bus, cursor) else ""
            yield Finding("trajectories", True, upto + more)
        else:
            remedy = "the store was replaced or is another one: set WEFT_TRAJECTORY_URL as the recorder has it"
            yield Finding("trajectories", False, f"{upto}, but the broker was told {told}: steps are missing", remedy)
    if broken:
        first = f"the first of task {broken[0].task}: {broken[0].reason}"
        unread = f"{len(broken)} entries could not be read, {first}"
        yield Finding("trajectories", False, unread, "they are kept in the table weft_unreadable")


async def _recorded_elsewhere(opened: Broker, url: str, published: dict[EventBus, str | None]) -> Finding:
    """A recorder on another machine, or in another pod, has its file to itself: the broker knows how far it is."""
    more = False
    for bus, told in published.items():
        if told is None or not any(name.startswith(f"{TRAJECTORY_RECORDER}@") for name in await _alive(bus)):
            remedy = "start a trajectory-recorder, or set WEFT_TRAJECTORY_URL as it has it"
            return Finding("trajectories", False, f"there is no store at {url}", remedy)
        more = more or await _behind(bus, told)
    on_its_way = ", and more is on its way" if more else ""
    nothing = f"there is no store at {url}, so that nothing can be shown from here"
    return Finding("trajectories", True, f"recorded by a trajectory-recorder elsewhere{on_its_way}; {nothing}")


CHECKS: tuple[Check, ...] = (
    server, memory, persistence, clock, namespace, functions, ingress, consumers, engines, apps, stuck, deadlock,
    letters, store,
)  # fmt: skip


async def _published(bus: EventBus) -> str | None:
    recorder = (await groups_of(bus.transport.call, bus.keys.record) or {}).get(TRAJECTORY_RECORDER)
    return None if recorder is None else recorder.read


async def _behind(bus: EventBus, entry: str) -> bool:
    """Whether the record holds more than what comes up to this entry."""
    return bool(await bus.transport.call("XRANGE", bus.keys.record, f"({entry}", "+", "COUNT", 1))


async def _alive(bus: EventBus) -> list[str]:
    """Who has sent heartbeats, as `service@place`."""
    return [text(name) for name in cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.alive, 0, -1))]


async def _info(opened: Broker, section: str) -> dict[str, str]:
    """Empty where this user may not ask."""
    reply = cast(bytes | None, await _allowed(opened.transport.call("INFO", section)))
    return dict(line.split(":", 1) for line in (reply or b"").decode().splitlines() if ":" in line)


async def _allowed(asked: Awaitable[Reply]) -> Reply:
    """The answer, or None where this user may not ask."""
    try:
        return await asked
    except ServerError as error:
        if not str(error).startswith("NOPERM"):
            raise
        return None


def _pairs(reply: Reply) -> dict[str, str]:
    flat = cast(list[Reply], reply)
    return dict(zip(map(text, flat[::2]), map(text, flat[1::2]), strict=True))


def _place(opened: Broker, bus: EventBus) -> str:
    return f" of partition {bus.keys.partition}" if len(opened.buses) > 1 else ""


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
