"""The checks of `weft doctor`: one function each, from the server up to the trajectory store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.ingress_stream import AHEAD_MS, IngressStream
from runtime_core.bus.keys import (
    GROUPS,
    NAMESPACE_FORMAT,
    STATE_MANAGER,
    TRAJECTORY_RECORDER,
    group_of,
    ingress,
    namespace_settings,
)
from runtime_core.bus.library import library
from runtime_core.bus.reply import position, text
from runtime_core.cli.backlog import engine_streams, groups_of, work_streams
from runtime_core.cli.connection import Broker, has_trajectories, trajectories
from runtime_core.cli.output import in_bytes
from runtime_core.cli.stuck import find_circles, find_stuck, free
from runtime_core.config.values import without_password
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput, ServerError, WeftError
from runtime_core.ingress.publishers import Publishers
from runtime_core.maintenance.dead_letters import DeadLetters

CLOCK_SECONDS = 1.0
"""Clocks further apart than this show wrong ages and times."""
NEWER_COMMANDS = ("XACKDEL", "XDELEX", "HSETEX", "CLUSTERSCAN")
ENGINES = {"ray": "ray", "spark": "pyspark"}
"""Engine → the package that its gateway needs."""
MEMORY_WARNING = 0.8
"""Of `maxmemory`: above it submits are refused."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    ok: bool
    message: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        found: dict[str, Any] = {"check": self.check, "ok": self.ok, "message": self.message}
        if self.remedy:
            found["remedy"] = self.remedy
        return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the doctor may change."""

    repair: bool = False
    clean: bool = False


Check = Callable[[Broker, Wanted], AsyncIterator[Finding]]


async def server(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    began = time.monotonic()
    info = await _info(opened, "server")
    took = (time.monotonic() - began) * 1000
    where = without_password(opened.url)
    if not info:
        yield Finding("server", True, f"{where} answers; this user may not ask for its version (INFO)")
        return
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "unknown")
    known = []
    for command in NEWER_COMMANDS:
        try:
            reply = cast(list[Reply], await opened.transport.call("COMMAND", "INFO", command))
        except ServerError:
            break
        if reply and reply[0]:
            known.append(command)
    newer = ", ".join(known) if known else "none"
    yield Finding("server", True, f"{name} {version} at {where} answers in {took:.1f} ms; newer commands: {newer}")


async def policy(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    memory = await _info(opened, "memory")
    if not memory:
        yield Finding("memory", True, "this user may not ask for it (INFO)")
        return
    found = memory.get("maxmemory_policy", "")
    yield Finding(
        "maxmemory-policy",
        found == "noeviction",
        f"{found}" + ("" if found == "noeviction" else ": the server may throw away work that is not done"),
        "" if found == "noeviction" else "CONFIG SET maxmemory-policy noeviction, and write it into the configuration",
    )
    used, limit = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    if not limit:
        yield Finding("memory", True, f"{_bytes(used)} used, no limit (maxmemory 0)")
    else:
        full = used > limit * MEMORY_WARNING
        yield Finding(
            "memory", not full, f"{_bytes(used)} of {_bytes(limit)} used" + (": submits are refused" if full else ""),
            "raise maxmemory, or lower WEFT_RETENTION_SECONDS" if full else "",
        )  # fmt: skip


async def persistence(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    found = await _config(opened, "appendonly", "appendfsync", "save")
    if "appendonly" not in found:
        yield Finding("persistence", True, "unknown: this user may not ask for it (CONFIG GET)")
        return
    if found["appendonly"] != "yes":
        saves = found.get("save", "")
        lost = "all since the last snapshot" if saves else "everything"
        yield Finding(
            "persistence", False, f"appendonly is off: a restart of the server loses {lost}",
            "CONFIG SET appendonly yes, and write it into the configuration",
        )  # fmt: skip
        return
    fsync = found.get("appendfsync", "")
    loses = {
        "always": "a crash of the machine loses nothing that was answered",
        "everysec": "a crash may lose the last second or two",
        "no": "a crash may lose whatever the system had not written",
    }.get(fsync, "")
    persisting = await _info(opened, "persistence")
    written = persisting.get("aof_last_write_status", "ok") == "ok"
    yield Finding(
        "persistence",
        written,
        f"append-only file, appendfsync {fsync}: {loses}" if written else "the append-only file cannot be written",
        "" if written else "look at the server's log and its disk",
    )


async def namespace(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    name = opened.settings.namespace
    key = namespace_settings(name)
    stored = cast(list[bytes | None], await opened.transport.call("HMGET", key, "partitions", "format"))
    if stored[0] is None or stored[1] is None:
        yield Finding(
            "namespace", False, f"{name!r} does not exist on this broker",
            "start services with it, or set WEFT_NAMESPACE to the one that they use",
        )  # fmt: skip
        return
    partitions, version = int(stored[0]), int(stored[1])
    yield Finding(
        "namespace",
        version <= NAMESPACE_FORMAT,
        f"{name!r} has {partitions} partition{'s' if partitions > 1 else ''}, format {version}",
        "" if version <= NAMESPACE_FORMAT else f"this release reads up to {NAMESPACE_FORMAT}: update it",
    )
    limits = await _hash(opened, opened.buses[0].keys.meta)
    shown = [
        f"{one} {limits[one]}"
        for one in (
            "retention",
            "dedupe_max",
            "mailbox_max",
            "stream_max",
            "ready_max",
            "record_max",
            "output_max",
            "request_timeout_ms",
        )
        if one in limits
    ]
    overload = limits.get("overload", "")
    yield Finding(
        "limits",
        not overload,
        f"submits are refused: {overload}"
        if overload
        else ", ".join(shown) or "defaults; no state-manager has set any",
        "let work drain, or raise the limit that is named" if overload else "",
    )


async def functions(opened: Broker, wanted: Wanted) -> AsyncIterator[Finding]:
    own = library().name
    try:
        reply = cast(list[list[Reply]], await opened.transport.call("FUNCTION", "LIST", "LIBRARYNAME", "weft_*"))
    except ServerError as error:
        yield Finding("functions", False, f"cannot be listed: {error}", "let this user call FUNCTION LIST")
        return
    names = [text(dict(zip(map(text, flat[::2]), flat[1::2], strict=True))["library_name"]) for flat in reply]
    others = sorted(set(names) - {own})
    loaded = f"{own} is loaded" if own in names else f"{own} is not loaded; the first call loads it"
    yield Finding("functions", True, loaded)
    if others and wanted.clean:
        for name in others:
            await opened.transport.call("FUNCTION", "DELETE", name)
        yield Finding(
            "functions", True, f"removed {', '.join(others)}; a service that still uses one loads it again by itself"
        )
    elif others:
        yield Finding(
            "functions",
            True,
            f"{', '.join(others)} of other releases are loaded too; weft doctor --clean removes them after an update",
        )


async def groups(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    missing = []
    home = opened.buses[0]
    places = [(home, ingress(home.keys.namespace), STATE_MANAGER)]
    for bus in opened.buses:
        # Engines have groups only where somebody uses them.
        places += [
            (bus, bus.keys.stream(stream), group_of(stream))
            for stream in await work_streams(bus)
            if group_of(stream) in (GROUPS["agent"], GROUPS["tool"])
        ]
        places += [(bus, bus.keys.record, name) for name in (STATE_MANAGER, TRAJECTORY_RECORDER)]
    for bus, key, wanted in places:
        if wanted not in [group.name for group in await groups_of(bus, key)]:
            missing.append(f"{wanted} of {key}")
    yield Finding(
        "groups",
        not missing,
        f"missing: {', '.join(missing)}" if missing else f"all {len(places)} are there",
        "start the service that reads it: it makes its group" if missing else "",
    )


async def ingress_streams(opened: Broker, wanted: Wanted) -> AsyncIterator[Finding]:
    """A stream is ended by an entry with the largest id there is: the server then refuses every `XADD *`."""
    registered = await Publishers(opened.buses[0]).all()
    wrong = False
    for publisher in ("", *(each.name for each in registered)):
        stream = IngressStream(opened.transport, opened.settings.namespace, publisher)
        try:
            ahead = await _last_id_ahead(opened, stream)
        except ServerError as error:
            wrong = True
            yield Finding(
                "ingress", False, f"{stream.key} cannot be read: {error}",
                f"if it is no stream, remove it: DEL {stream.key}; then publishers make it again",
            )  # fmt: skip
            continue
        if not ahead:
            continue
        if wanted.repair:
            await stream.read(b"", 1, 1)  # removes it where it is empty
            if not await _last_id_ahead(opened, stream):
                yield Finding(
                    "ingress", True, f"repaired: {stream.key} was ended by an id in the future, and is removed"
                )
                continue
        wrong = True
        yield Finding(
            "ingress", False, f"{stream.key} has the last id {ahead}, in the future: few more entries fit, or none",
            "once the state-manager has emptied it, weft doctor --repair removes it; weft dead list shows who sent it",
        )  # fmt: skip
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
    last = cast(bytes, dict(zip(reply[::2], reply[1::2], strict=True))[b"last-generated-id"]).decode()
    return last if int(last.partition("-")[0]) > await opened.now_ms() + AHEAD_MS else ""


async def consumers(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    """Who says that it lives, per service; owners that left entries behind are for others to adopt."""
    for bus in opened.buses:
        names = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.alive, 0, -1))
        counts: dict[str, int] = {}
        for name in names:
            service = name.decode().partition("@")[0]
            counts[service] = counts.get(service, 0) + 1
        needed = (GROUPS["agent"], GROUPS["tool"], STATE_MANAGER, TRAJECTORY_RECORDER)
        absent = [name for name in needed if name not in counts]
        place = f" of partition {bus.keys.partition}" if len(opened.buses) > 1 else ""
        running = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
        beat = await bus.transport.call("HGET", bus.keys.meta, "beat_at")
        silent = await opened.now_ms() - int(cast(bytes, beat)) if beat is not None else 0
        if names and silent > 10_000:
            # Nobody is left to notice: deaths are noticed by the beats of others.
            yield Finding(
                "consumers", False, f"the last heartbeat{place} was {silent / 1000:.0f} s ago: no service runs",
                "start the services, as with weft up",
            )  # fmt: skip
            continue
        yield Finding(
            "consumers",
            not absent,
            f"alive{place}: {running}" + (f"; none of {', '.join(absent)}" if absent else ""),
            f"start {', '.join(absent)}" if absent else "",
        )
        left = await _left_behind(opened, bus.keys.partition, {name.decode() for name in names})
        if left:
            yield Finding(
                "consumers", False, f"entries of dead consumers wait to be adopted{place}: {', '.join(left)}",
                "live consumers of that service adopt within a lease: is one running?",
            )  # fmt: skip


async def engines(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    """Who serves Ray and Spark, what waits for them, and whether this installation has them."""
    streams = set(ENGINES)
    for bus in opened.buses:
        streams |= set(await engine_streams(bus))
    put_back = [stream for bus in opened.buses for stream in await _put_back(bus)]
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
        text = f"{stream}: {_counted(min(live), 'gateway')}, {_counted(waiting, 'step')}"
        if stream in put_back:
            text += f" and {put_back.count(stream)} to be tried again"
        package = ENGINES.get(stream)
        if package:
            text += f", {package} is {'' if find_spec(package) else 'not '}installed here"
        said.append(text)
    yield Finding("engines", not remedies, "; ".join(said), "; ".join(remedies))


async def manifests(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    bus = opened.buses[0]
    stored = cast(list[bytes], await bus.transport.call("HVALS", bus.keys.manifests))
    if not stored:
        yield Finding(
            "apps", False, "no app has published its agents: submits wait", "start an agent-handler with WEFT_APP"
        )
    for data in stored:
        try:
            found = Manifest.from_json(data)
        except InvalidInput as error:
            yield Finding("apps", False, str(error), "it may be of a newer release: update this one")
            continue
        names = [f"agents {_names(found.agents)}", f"tools {_names(found.tools)}"]
        if found.engine_functions:
            names.append(f"engine functions {_names(found.engine_functions)}")
        yield Finding("apps", True, f"{found.app} {found.version}: {'; '.join(names)}")


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


async def circles(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    found = await find_circles(opened.buses)
    for circle in found:
        yield Finding("deadlock", False, circle, "cancel one of the tasks: weft task cancel ID")
    if not found:
        yield Finding("deadlock", True, "no runs wait for each other in a circle")


async def dedupe(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    sizes = [cast(int, await bus.transport.call("HLEN", bus.keys.base + "seen")) for bus in opened.buses]
    limit = await opened.transport.call("HGET", opened.buses[0].keys.meta, "dedupe_max")
    most = int(cast(bytes, limit)) if limit is not None else 1_000_000
    yield Finding("dedupe", True, f"{sum(sizes)} submits are remembered, up to {most} per partition")


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
    told = [
        [group.position for group in await groups_of(bus, bus.keys.record) if group.name == TRAJECTORY_RECORDER]
        for bus in opened.buses
    ]
    if not has_trajectories(opened.settings):
        # A recorder on another machine, or in another pod, has its file to itself: the broker knows how far it is.
        behind = [
            await _behind(bus, published[0]) for bus, published in zip(opened.buses, told, strict=True) if published
        ]
        elsewhere = len(behind) == len(opened.buses) and await _alive(opened, TRAJECTORY_RECORDER)
        yield Finding(
            "trajectories",
            elsewhere,
            f"recorded by a trajectory-recorder elsewhere{', and more is on its way' if any(behind) else ''}; "
            f"there is no store at {url}, so that nothing can be shown from here"
            if elsewhere
            else f"there is no store at {url}",
            "" if elsewhere else "start a trajectory-recorder, or set WEFT_TRAJECTORY_URL as it has it",
        )
        return
    try:
        async with trajectories(opened.settings) as opened_store:
            assert opened_store is not None
            cursors = [await opened_store.cursor(opened.settings.namespace, bus.keys.partition) for bus in opened.buses]
            broken = await opened_store.unreadable(opened.settings.namespace)
    except WeftError as error:
        yield Finding("trajectories", False, str(error), "check WEFT_TRAJECTORY_URL")
        return
    for bus, cursor, published in zip(opened.buses, cursors, told, strict=True):
        place = f" of partition {bus.keys.partition}" if len(opened.buses) > 1 else ""
        # The store may be ahead of what is published, never behind: what is published may have been trimmed.
        ok = not published or position(cursor) >= position(published[0])
        yield Finding(
            "trajectories",
            ok,
            f"{url} is recorded up to {cursor}{place}"
            + (", and more is on its way" if await _behind(bus, cursor) else "")
            if ok
            else f"{url} is recorded up to {cursor}{place}, but the broker was told {published[0]}: steps are missing",
            "" if ok else "the store was replaced or is another one: set WEFT_TRAJECTORY_URL as the recorder has it",
        )
    if broken:
        yield Finding(
            "trajectories", False, f"{len(broken)} entries could not be read, the first of task {broken[0].task}: "
            f"{broken[0].reason}", "they are kept in the table weft_unreadable",
        )  # fmt: skip


async def clock(opened: Broker, _: Wanted) -> AsyncIterator[Finding]:
    before = time.time()
    server_ms = await opened.now_ms()
    apart = server_ms / 1000 - (before + time.time()) / 2
    ok = abs(apart) <= CLOCK_SECONDS
    yield Finding(
        "clock",
        ok,
        f"the broker's and this machine's are {abs(apart):.3f} s apart",
        "" if ok else "keep both by NTP: retries, deadlines and times of steps are off by that much",
    )


CHECKS: tuple[Check, ...] = (
    server, policy, persistence, clock, namespace, functions, groups, ingress_streams, consumers, engines, manifests,
    stuck, circles, dedupe, letters, store,
)  # fmt: skip


async def _behind(bus: EventBus, entry: str) -> bool:
    """Whether the record holds more than what comes up to this entry."""
    return bool(await bus.transport.call("XRANGE", bus.keys.record, f"({entry}", "+", "COUNT", 1))


async def _alive(opened: Broker, service: str) -> bool:
    """Whether each partition has such a service."""
    for bus in opened.buses:
        names = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.alive, 0, -1))
        if not any(name.startswith(f"{service}@".encode()) for name in names):
            return False
    return True


async def _left_behind(opened: Broker, partition: int, alive: set[str]) -> list[str]:
    bus = opened.buses[partition]
    left = []
    for stream in await work_streams(bus):
        try:
            reply = cast(
                list[list[Reply]],
                await bus.transport.call("XINFO", "CONSUMERS", bus.keys.stream(stream), group_of(stream)),
            )
        except ServerError:
            continue  # a stream or group that nobody has made
        for flat in reply:
            named = dict(zip(map(text, flat[::2]), flat[1::2], strict=True))
            if named["pending"] and text(named["name"]) not in alive:
                left.append(f"{cast(int, named['pending'])} on {stream}")
    return left


async def _info(opened: Broker, section: str) -> dict[str, str]:
    return _lines(await _allowed(opened.transport.call("INFO", section)))


async def _config(opened: Broker, *names: str) -> dict[str, str]:
    arguments: list[Argument] = ["CONFIG", "GET", *names]
    flat = cast(list[Reply], await _allowed(opened.transport.call(*arguments)) or [])
    return dict(zip(map(text, flat[::2]), map(text, flat[1::2]), strict=True))


async def _allowed(asked: Awaitable[Reply]) -> Reply:
    """The answer, or None where this user may not ask."""
    try:
        return await asked
    except ServerError as error:
        if not str(error).startswith("NOPERM"):
            raise
        return None


async def _hash(opened: Broker, key: str) -> dict[str, str]:
    flat = cast(list[bytes], await opened.transport.call("HGETALL", key))
    return dict(zip(map(text, flat[::2]), map(text, flat[1::2]), strict=True))


def _lines(reply: Reply) -> dict[str, str]:
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _names(named: dict[str, Any]) -> str:  # Any: entries of a manifest, of several kinds
    return ", ".join(sorted(named)) or "none"


async def _put_back(bus: EventBus) -> list[str]:
    """The stream of each delivery that waits in the timers for another attempt."""
    members = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.timers, 0, -1))
    return [member.decode().split("|")[1] for member in members if member.startswith(b"e|")]


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
