"""The pages that sum up: overview, dead letters, schedules, agents and tools, usage, and two tasks side by side."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from starlette.responses import Response

from runtime_core.base.text import counted, utc
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_info
from runtime_core.client.task_view import EVERY_TASK, Row
from runtime_core.consumer.announcements import handlers_of_names, read_manifests
from runtime_core.declare.manifest import TOOL_AGENTS
from runtime_core.errors import InvalidInput
from runtime_core.gateway.access import Access, UsageBy
from runtime_core.gateway.console import views
from runtime_core.gateway.console.actions import edited, fields_of, value_of
from runtime_core.gateway.console.site import HOME, Page, Site, Visit, see
from runtime_core.gateway.keys import OPERATE, READ
from runtime_core.gateway.requests import NO_STORE, Problem
from runtime_core.state_manager.backlog import HeldWork, Quarantine, find_quarantines, held_work, waiting_work
from runtime_core.state_manager.dead_letters import LetterFilter
from runtime_core.state_manager.measures import Unserved, find_unserved
from runtime_core.trajectory.reading import first_difference
from runtime_core.trajectory.tree import decoded, to_tree
from runtime_core.wire.codec import quoted
from runtime_core.wire.step import ENDED, Status

SAMPLE = 500
"""The newest tasks, of which the overview is made: reading all of a million would take minutes."""
SHOWN = 8
OLDEST = 24
"""The oldest open tasks, of which the overview shows those that do not wait for people alone."""
FAILED = 5
"""The tasks that failed last, each of which is read with its error."""
GROUPS_MAX = 100
LETTERS = 50
DAYS = {"1": "today", "7": "7 days", "30": "30 days"}
BY: tuple[UsageBy, ...] = ("agent", "model", "tenant", "day")
BUCKETS = 60
HOUR_MS = 3_600_000


class Boards:
    """Reads, and the forms of these pages."""

    def __init__(self, site: Site, access: Access) -> None:
        self._site = site
        self._access = access

    def pages(self) -> list[Page]:
        return [
            Page("GET", HOME, self.overview, READ),
            Page("GET", f"{HOME}/dead", self.letters, READ),
            Page("GET", f"{HOME}/dead/{{letter_id}}", self.letter, READ),
            Page("POST", f"{HOME}/dead/{{letter_id}}/redrive", self.redrive, OPERATE),
            Page("POST", f"{HOME}/dead/{{letter_id}}/drop", self.drop, OPERATE),
            Page("GET", f"{HOME}/schedules", self.schedules, READ),
            Page("POST", f"{HOME}/schedules", self.set_schedule, OPERATE),
            Page("POST", f"{HOME}/schedules/{{schedule_id}}/run", self.run_schedule, OPERATE),
            Page("POST", f"{HOME}/schedules/{{schedule_id}}/delete", self.delete_schedule, OPERATE),
            Page("GET", f"{HOME}/agents", self.agents, READ, every_tenant=True),
            Page("GET", f"{HOME}/system", self.system, READ, every_tenant=True),
            Page("GET", f"{HOME}/usage", self.usage, READ),
            Page("GET", f"{HOME}/compare", self.compare, READ),
        ]

    async def overview(self, visit: Visit) -> Response:
        page = await self._access.tasks(visit.caller, EVERY_TASK, SAMPLE)
        rows, now = page.tasks, views.now_ms()
        groups = await self._access.letter_groups(visit.caller, "error", LetterFilter(), SHOWN)
        oldest = await self._access.open_the_longest(visit.caller, OLDEST)
        held, held_count = await self._held(visit)
        cost = await self._cost_today(visit) if visit.request.query_params.get("cost") else None
        took = sorted(
            row["ended"] - row["created"] for row in rows if row["status"] == Status.COMPLETED and "ended" in row
        )
        return self._site.render(
            visit,
            "overview.html",
            counts=Counter(str(row["status"]) for row in rows),
            open_tasks=None
            if visit.caller.tenant
            else sum(
                [cast(int, await bus.transport.call("ZCARD", bus.keys.open_tasks)) for bus in self._access.client.buses]
            ),
            letters=sum(group["count"] for group in groups),
            sample=len(rows),
            more=bool(page.cursor),
            since=min((row["created"] for row in rows), default=now),
            failed=[await self._with_error(visit, row) for row in _failed_last(rows)],
            waiting=sorted(
                [row for row in oldest if not views.waits_for_people(row)],
                key=lambda row: "without_handler" not in row,
            )[:SHOWN],
            asking=sum(views.waits_for_people(row) for row in oldest),
            held=held,
            held_count=held_count,
            unserved=[] if visit.caller.tenant else await self._unserved(),
            groups=groups,
            questions=len(await self._access.questions(visit.caller, GROUPS_MAX)),
            ended=sum(row["status"] in ENDED for row in rows),
            median=took[len(took) // 2] if took else None,
            slow=took[len(took) * 95 // 100] if took else None,
            buckets=_buckets(rows, now),
            hour=await self._last_hour(visit, rows, now),
            backlog=None if visit.caller.tenant else await self._backlog(),
            quarantines=[] if visit.caller.tenant else await self._quarantines(),
            cost=cost,
            now=now,
        )

    async def _with_error(self, visit: Visit, row: Row) -> Row:
        """Return a failed task of a list with its error, which lists leave out."""
        try:
            return await self._access.show(visit.caller, row["task_id"])
        except Problem:
            return row  # past its retention time

    async def _last_hour(self, visit: Visit, rows: list[Row], now: float) -> tuple[int, bool]:
        """Return how many tasks started in the last hour, and whether that is a lower bound."""
        if visit.caller.tenant:
            return sum(row["created"] >= now - HOUR_MS for row in rows), len(rows) == SAMPLE
        counts = [
            cast(int, await bus.transport.call("ZCOUNT", bus.keys.index, int(now - HOUR_MS), "+inf"))
            for bus in self._access.client.buses
        ]
        return sum(counts), False

    async def _backlog(self) -> int:
        """Return how many entries no process has taken yet, as the page of the system and `weft lag` say."""
        work = await waiting_work(self._access.client.buses, count_mailboxes=False)
        return sum(row["backlog"] for row in work["streams"])

    async def _unserved(self) -> list[Unserved]:
        """Return the work of all partitions that no running handler can do, by agent and tool."""
        found: dict[tuple[str, str], Unserved] = {}
        for bus in self._access.client.buses:
            for each in await find_unserved(bus):
                before = found.setdefault((each.kind, each.name), each)
                if before is not each:
                    found[each.kind, each.name] = replace(before, count=before.count + each.count)
        return list(found.values())

    async def _held(self, visit: Visit) -> tuple[list[HeldWork], int]:
        """Return the oldest work that processes hold, and how much they hold."""
        found: list[HeldWork] = []
        count = 0
        for bus in self._access.client.buses:
            own, more = await held_work(bus, SHOWN, visit.caller.tenant)
            found, count = found + own, count + more
        return sorted(found, key=lambda each: each.since)[:SHOWN], count

    async def _quarantines(self) -> list[Quarantine]:
        """Return the handlers that take no other work until a delivery has run alone."""
        return [each for bus in self._access.client.buses for each in await find_quarantines(bus)]

    async def _cost_today(self, visit: Visit) -> tuple[float, float]:
        """Return the tokens and the cost of tasks that have ended since midnight (UTC)."""
        until = datetime.now(UTC)
        try:
            rows, _ = await self._access.usage(
                visit.caller, ["day"], until.replace(hour=0, minute=0, second=0, microsecond=0), until
            )
        except Problem as problem:
            if problem.kind is not NO_STORE:
                raise
            rows = []
        sums = [views.tokens_and_cost(row["usage"]) for row in rows]
        return sum(tokens for tokens, _ in sums), sum(cost for _, cost in sums)

    # -- dead letters ------------------------------------------------------------------------------------------

    async def letters(self, visit: Visit) -> Response:
        query = visit.request.query_params
        error = query.get("error", "")[:2000]
        groups = await self._access.letter_groups(visit.caller, "error", LetterFilter(), GROUPS_MAX)
        rows, cursor = await self._access.letters(
            visit.caller, LetterFilter(error=error), LETTERS, query.get("cursor", "")[:400]
        )
        return self._site.render(visit, "dead.html", groups=groups, rows=rows, error=error, cursor=cursor)

    async def letter(self, visit: Visit) -> Response:
        found = await self._access.letter(visit.caller, visit.request.path_params["letter_id"])
        return self._site.render(visit, "letter.html", letter=found)

    async def redrive(self, visit: Visit) -> Response:
        letter_id = visit.request.path_params["letter_id"]
        task = await self._access.redrive(visit.caller, letter_id, reopen=True, data=edited(visit.form, "value"))
        return see(f"{HOME}/tasks/{task}" if task else f"{HOME}/dead", "redriven")

    async def drop(self, visit: Visit) -> Response:
        await self._access.drop(visit.caller, visit.request.path_params["letter_id"])
        return see(f"{HOME}/dead", "dropped")

    # -- schedules ---------------------------------------------------------------------------------------------

    async def schedules(self, visit: Visit) -> Response:
        rows = await self._access.schedules(visit.caller, GROUPS_MAX, visit.request.query_params.get("after", "")[:400])
        return self._site.render(visit, "schedules.html", rows=rows, most=GROUPS_MAX)

    async def set_schedule(self, visit: Visit) -> Response:
        """Create a schedule, or replace the one with this id."""
        data: dict[str, object] = {"agent": visit.field("agent"), "input": value_of(visit.form)}
        what, when = visit.field("when"), visit.field("time").strip()
        if what == "every":
            try:
                data["every_seconds"] = float(when)
            except ValueError:
                raise InvalidInput("every_seconds", f"{quoted(when)} is not a number of seconds") from None
        else:
            data["cron" if what == "cron" else "at"] = when
        if what == "cron" and (zone := visit.field("timezone").strip()):
            data["timezone"] = zone
        await self._access.set_schedule(visit.caller, visit.field("id").strip(), data)
        return see(f"{HOME}/schedules", "scheduled")

    async def run_schedule(self, visit: Visit) -> Response:
        task = await self._access.run_schedule(visit.caller, visit.request.path_params["schedule_id"])
        return see(f"{HOME}/tasks/{task}", "started")

    async def delete_schedule(self, visit: Visit) -> Response:
        await self._access.delete_schedule(visit.caller, visit.request.path_params["schedule_id"])
        return see(f"{HOME}/schedules", "deleted")

    # -- agents, usage, two tasks ------------------------------------------------------------------------------

    async def agents(self, visit: Visit) -> Response:
        """Show the manifests of all apps. A tenant's key may not: they name every tenant's agents."""
        bus = self._access.client.buses[0]
        manifests = await read_manifests(bus)
        return self._site.render(
            visit,
            "agents.html",
            apps=manifests,
            callers={
                name[len(TOOL_AGENTS) :] for each in manifests for name in each.agents if name.startswith(TOOL_AGENTS)
            },
            handlers=await handlers_of_names(bus),
            fields_of=fields_of,
        )

    async def system(self, visit: Visit) -> Response:
        """Show the broker, its streams and the processes, in the words of `weft lag`. `?checks=1` also runs the checks
        of `weft doctor`, which may take long.
        """
        buses = self._access.client.buses
        checks = await self._access.checks() if visit.request.query_params.get("checks") else None
        info = await server_info(buses[0].transport)
        return self._site.render(
            visit,
            "system.html",
            work=await waiting_work(buses, count_mailboxes=False),
            quarantines=await self._quarantines(),
            places=[await _processes(bus) for bus in buses],
            info=info,
            used=int(info.get("used_memory", 0)),
            limit=int(info.get("maxmemory", 0)),
            server=f"Valkey {info['valkey_version']}"
            if "valkey_version" in info
            else f"Redis {info.get('redis_version', '')}",
            open=sum([cast(int, await bus.transport.call("ZCARD", bus.keys.open_tasks)) for bus in buses]),
            checks=checks,
            failed=[each for each in checks or () if each.checked and not each.ok],
            unchecked=[each for each in checks or () if not each.checked],
        )

    async def usage(self, visit: Visit) -> Response:
        query = visit.request.query_params
        days = query.get("days", "7") if query.get("days", "7") in DAYS else "7"
        by: UsageBy = next((each for each in BY if each == query.get("by")), "agent")
        until = datetime.now(UTC)
        rows: list[Row] = []
        # Whole days: the store keeps their sums, so these are complete.
        first = until.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=int(days) - 1)
        try:
            rows, _ = await self._access.usage(visit.caller, [by], first, until)
        except Problem as problem:
            if problem.kind is not NO_STORE:
                raise
        shown = [(str(row[by]) or "none", row["tasks"], *views.tokens_and_cost(row["usage"])) for row in rows]
        key = 0 if by == "day" else 3
        shown.sort(key=lambda row: cast(Any, row[key]), reverse=by != "day")  # Any: texts, or numbers
        return self._site.render(
            visit, "usage.html", rows=shown, by=by, every=BY, days=days, spans=DAYS,
            most=max((row[3] for row in shown), default=0) or max((row[2] for row in shown), default=0) or 1,
        )  # fmt: skip

    async def compare(self, visit: Visit) -> Response:
        query = visit.request.query_params
        given = [query.get("one", "").strip()[:200], query.get("other", "").strip()[:200]]
        if not all(given):
            return self._site.render(visit, "compare.html", given=given, lines=[], difference=None)
        one, other = [await self._access.trajectory(visit.caller, task) for task in given]
        lines = [views.timeline({}, to_tree(each, decode=False)) for each in (one, other)]
        found = await asyncio.to_thread(first_difference, one, other)
        difference = None
        if found is not None:
            sides = [
                None if step is None else {
                    "input": decoded(step.input), "output": decoded(step.output), "status": step.status,
                    "kind": step.kind, "name": step.name, "key": step.key,
                    "error": None if step.error is None else f"{step.error.type}: {step.error.message}",
                }
                for step in (found.one, found.other)
            ]  # fmt: skip
            difference = {
                "path": f"{found.run}/{found.step}" if found.step else found.run,
                "members": found.members,
                "sides": sides,
            }
        return self._site.render(visit, "compare.html", given=given, lines=lines, difference=difference)


async def _processes(bus: EventBus) -> Row:
    """Return a partition's processes with heartbeats, and the roles that each leads."""
    call, keys = bus.transport.call, bus.keys
    names = [name.decode() for name in cast(list[bytes], await call("ZRANGE", keys.alive, 0, -1))]
    leads: dict[str, list[str]] = {}
    for role in ("admit", "keep", "record"):
        owner = cast(bytes | None, await call("HGET", f"{keys.base}leader:{role}", "owner"))
        if owner is not None:
            leads.setdefault(owner.decode(), []).append(role)
    rows = [{"service": name.partition("@")[0], "name": name, "leads": leads.get(name, [])} for name in sorted(names)]
    return {"partition": keys.partition, "processes": rows}


def _failed_last(rows: Sequence[Row]) -> list[Row]:
    """Return the tasks that failed last, the newest failure first."""
    failed = [row for row in rows if row["status"] == Status.FAILED]
    return sorted(failed, key=lambda row: row.get("ended") or 0, reverse=True)[:FAILED]


def _buckets(rows: list[Row], now: float) -> list[tuple[float, float, float, str]]:
    """Return bars of tasks over time: place, height of all and of failed ones (of 100), and a label."""
    start = min((row["created"] for row in rows), default=now)
    width = max((now - start) / BUCKETS, 1.0)
    every: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    for row in rows:
        at = min(BUCKETS - 1, int((row["created"] - start) / width))
        every[at] += 1
        failed[at] += row["status"] == Status.FAILED
    most = max(every.values(), default=1)
    return [
        (at * 1000 / BUCKETS, 100 * every[at] / most, 100 * failed[at] / most,
         f"{counted(every[at], 'task')}, {failed[at]} failed, at {utc(start + at * width)}")
        for at in sorted(every)
    ]  # fmt: skip
