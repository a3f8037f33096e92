"""The pages that only read."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import quote, urlencode

import msgspec
from starlette.responses import RedirectResponse, Response

from runtime_core.client.task_view import Row, TaskFilter, TaskPage, list_tasks, read_task, task_in_store
from runtime_core.consumer.announcements import announced_names
from runtime_core.errors import InvalidInput
from runtime_core.gateway.access import Access
from runtime_core.gateway.console import views
from runtime_core.gateway.console.actions import fields_of
from runtime_core.gateway.console.site import HEADERS, HOME, Page, Site, Visit
from runtime_core.gateway.console.views import StepRow
from runtime_core.gateway.keys import OPERATE, READ
from runtime_core.gateway.requests import NO_STORE, NO_TRAJECTORY, Problem, no_task
from runtime_core.gateway.tasks import STATUSES, StreamRoutes
from runtime_core.state_manager.dead_letters import LetterFilter
from runtime_core.telemetry import trace_context
from runtime_core.trajectory.tree import decoded, to_tree
from runtime_core.wire.ids import ROOT_RUN, is_task_id
from runtime_core.wire.step import OPEN, Status

FILTERS = ("status", "agent", "session", "key", "tenant", "age", "waits", "q")
"""Parameters of the list of tasks that select tasks."""
AGES = {"1h": 3_600_000, "24h": 86_400_000, "7d": 604_800_000}
PAGE = 50
SEARCH_SECONDS = 1.0
"""How long a page searches for tasks before it offers to search on."""
PREFIX_SECONDS = 0.3
PREFIX_MATCHES = 20
_PREFIX = re.compile(r"[A-Za-z0-9._:@-]{6,64}")
_GENERATED = re.compile(r"(fork-)?[0-9a-f]{6,}")
"""The beginning of an id that nobody chose."""
READ_WAITS = 200
"""Open tasks that a page reads to find those that wait for something."""
QUESTIONS_MAX = 200
LEAST_MS = 0.05
"""A shorter part of a run's time is shown as none."""
FOUND_MAX = 8
"""Tasks and agents that the palette offers."""
LETTERS_MAX = 5
"""Dead letters of a task that its page offers to redrive."""


class Pages:
    """The pages that only read."""

    def __init__(
        self, site: Site, access: Access, streams: StreamRoutes, trace_url: str = "", log_url: str = ""
    ) -> None:
        """The URLs have `{trace_id}` or `{task_id}` where those belong."""
        self._site = site
        self._access = access
        self._streams = streams
        self._trace_url = trace_url
        self._log_url = log_url

    def pages(self) -> list[Page]:
        return [
            Page("GET", f"{HOME}/tasks", self.tasks, READ),
            Page("GET", f"{HOME}/tasks/{{task_id}}", self.task, READ),
            Page("GET", f"{HOME}/tasks/{{task_id}}/events", self.events, READ),
            Page("POST", f"{HOME}/tasks/{{task_id}}/replay", self.replay, OPERATE),
            Page("GET", f"{HOME}/people", self.people, READ),
            Page("GET", f"{HOME}/find", self.find, READ),
        ]

    # -- tasks -------------------------------------------------------------------------------------------------

    async def tasks(self, visit: Visit) -> Response:
        query = visit.request.query_params
        given = {name: query.get(name, "").strip()[:512] for name in FILTERS}
        problem = ""
        if given["status"] not in ("", *STATUSES):
            given["status"] = ""
        given["waits"] = given["waits"] if given["waits"] in views.WAITS else ""
        if given["waits"]:
            given["status"] = Status.WAITING
        if is_task_id(given["q"]) and await (await self._access.handle(visit.caller, given["q"])).exists():
            return RedirectResponse(f"{HOME}/tasks/{given['q']}", 303, HEADERS)
        named = await self._named(visit, given["q"])
        if len(named) == 1 and _GENERATED.fullmatch(given["q"]):
            return RedirectResponse(f"{HOME}/tasks/{named[0]['task_id']}", 303, HEADERS)
        age = AGES.get(given["age"])
        wanted = TaskFilter(
            status=given["status"], agent=given["agent"], session=given["session"], key=given["key"],
            tenant=given["tenant"], text=given["q"], since_ms=views.now_ms() - age if age else 0.0,
        )  # fmt: skip
        try:
            read = partial(self._access.tasks, visit.caller, wanted)
            page = await search(read, READ_WAITS if given["waits"] else PAGE, query.get("cursor", "")[:400])
            rows, cursor, reached = page.tasks, page.cursor, page.reached_ms
            known = {row["task_id"] for row in named}
            rows = [*named, *(row for row in rows if row["task_id"] not in known)]
        except (Problem, InvalidInput) as error:
            rows, cursor, reached, problem = [], "", 0, error.detail if isinstance(error, Problem) else error.message
        rows = await asyncio.gather(*(self._with_reason(visit, row) for row in rows))
        if given["waits"]:
            rows = [row for row in rows if views.waits_for(row, given["waits"])]
        return self._site.render(
            visit,
            "tasks.html",
            rows=rows,
            sessions=any(row.get("session_id") for row in rows),
            problem=problem,
            given=given,
            statuses=STATUSES,
            ages=AGES,
            waits=list(views.WAITS),
            with_filter=lambda **changed: _query(given, **changed),
            following=_query(given, cursor=cursor) if cursor else "",
            reached=reached if len(rows) < PAGE else 0,
            first=not query.get("cursor"),
            filtered=any(given.values()),
            now=views.now_ms(),
        )

    async def _named(self, visit: Visit, prefix: str) -> list[Row]:
        """Return tasks whose ids begin with a text of at least 6 characters, the newest first, of bounded many."""
        if _PREFIX.fullmatch(prefix) is None:
            return []
        tenant = visit.caller.tenant
        own = f"{tenant}." if tenant else ""
        wanted = TaskFilter(tenant=tenant, prefix=prefix if prefix.startswith(own) else own + prefix)
        found = await list_tasks(self._access.client.buses, wanted, PREFIX_MATCHES, seconds=PREFIX_SECONDS)
        return found.tasks

    async def find(self, visit: Visit) -> Response:
        """Return what the palette offers for a text: tasks by the beginning of their ids, and agents."""
        text = visit.request.query_params.get("q", "").strip()[:200]
        tasks = await self._named(visit, text)
        found = [(f"Task {row['task_id']}, {row['agent']}", f"/tasks/{row['task_id']}") for row in tasks[:FOUND_MAX]]
        if text and not visit.caller.tenant:  # agents are those of all tenants
            bus = self._access.client.buses[0]
            names = await announced_names(bus, "agent")
            fitting = [name for name in names if text.casefold() in name.casefold()]
            found += [
                (f"Agent {name}: its tasks", f"/tasks?{urlencode({'agent': name})}") for name in fitting[:FOUND_MAX]
            ]
        return Response(
            msgspec.json.encode([[label, HOME + path] for label, path in found]), 200, HEADERS, "application/json"
        )

    async def _with_reason(self, visit: Visit, row: Row) -> Row:
        """Return a failed or open task of a list with its error, or with what it waits for, which lists leave out."""
        if row["status"] in (Status.COMPLETED, Status.CANCELLED):
            return row
        try:
            return await self._access.reason(visit.caller, row)
        except Problem:
            return row  # past its retention time

    async def task(self, visit: Visit) -> Response:
        task_id = visit.request.path_params["task_id"]
        view, tree, context = await self._task(visit, task_id)
        query = visit.request.query_params
        line = views.timeline(view, tree)
        failure = root_failure(line) if view["status"] == Status.FAILED else None
        chosen = line.row(query.get("step", "")) or (failure.row if failure else None) or line.rows[0]
        views.decode(chosen)
        now = views.now_ms()
        tokens, cost = views.tokens_and_cost(view.get("usage") or {})
        split = time_split(chosen, line.every) if chosen.kind == "agent" else []
        url = str(visit.request.base_url).rstrip("/")
        return self._site.render(
            visit,
            "task.html",
            view=view,
            line=line,
            failure=failure,
            chosen=chosen,
            split=split,
            split_sum=sum(each[1] for each in split) or 1,
            links=self._links(view["task_id"], context),
            tab=query.get("tab", "timeline") if query.get("tab") in ("output", "events", "data") else "timeline",
            fields_of=fields_of,
            waits=views.waits(view, now),
            snippets=snippets(view, url, keyed=not self._site.opened),
            tokens=tokens,
            cost=cost,
            now=now,
            open=view["status"] in OPEN,
            recorded=tree is not None,
            fork=(tree or {}).get("fork"),
        )

    def _links(self, task_id: str, context: bytes) -> list[tuple[str, str]]:
        """Return links to the task's trace and logs, where the settings say."""
        ids = trace_context.read(trace_context.stated(context)[0])
        ids = ids or trace_context.of_task(self._access.client.namespace, task_id)
        found = []
        for label, template in (("trace", self._trace_url), ("logs", self._log_url)):
            if template:
                filled = template.replace("{trace_id}", f"{ids.trace:032x}").replace(
                    "{task_id}", quote(task_id, safe="")
                )
                found.append((label, filled))
        return found

    async def _task(self, visit: Visit, task_id: str) -> tuple[Row, Mapping[str, Any] | None, bytes]:
        """Return a task, its trajectory as a tree, if one is recorded, and the context of its first event.

        Raises Problem if neither is known.
        """
        handle = await self._access.handle(visit.caller, task_id)
        view = await read_task(handle.bus, handle.task_id, letters=False)
        try:
            recorded = await self._access.trajectory(visit.caller, task_id)
        except Problem as problem:
            if problem.kind not in (NO_TRAJECTORY, NO_STORE):
                raise
            recorded = None
        if view is None and recorded is None:
            raise no_task(handle.task_id)
        if view is None:
            assert recorded is not None
            view = {"created": 0, **task_in_store(recorded), "gone": True}
        tree = None if recorded is None else to_tree(recorded, decode=False)
        if "input" not in view and tree is not None and tree["runs"] and tree["runs"][0]["recorded"]:
            view["input"] = decoded(
                cast(msgspec.Raw, tree["runs"][0]["input"])
            )  # the broker keeps the input of open tasks only
        if view["status"] == Status.FAILED and visit.may(OPERATE):
            letters, _ = await self._access.letters(visit.caller, LetterFilter(task=task_id), LETTERS_MAX)
            view["dead_letters"] = [letter["letter_id"] for letter in letters]
        context = await handle.bus.transport.call("HGET", handle.bus.keys.task(handle.task_id), "x")
        return view, tree, cast(bytes, context or b"")

    async def events(self, visit: Visit) -> Response:
        """Stream the events of a task, as the API does."""
        return await self._streams.events(visit.request, visit.caller)

    async def replay(self, visit: Visit) -> Response:
        """Run the code of the app on the task, and show the result. Nothing changes."""
        found = await self._access.replay(visit.caller, visit.request.path_params["task_id"])
        return self._site.render(visit, "replay.html", found=found)

    async def people(self, visit: Visit) -> Response:
        rows = await self._access.questions(visit.caller, QUESTIONS_MAX)
        return self._site.render(visit, "people.html", rows=rows, fields_of=fields_of, now=views.now_ms())


async def search(read: Callable[[int, str], Awaitable[TaskPage]], limit: int, cursor: str) -> TaskPage:
    """Return a page of tasks, read in parts: each part ends early, so that it keeps nobody else waiting."""
    until, found = time.monotonic() + SEARCH_SECONDS, list[Row]()
    while True:
        page = await read(limit - len(found), cursor)
        found, cursor = [*found, *page.tasks], page.cursor
        if not cursor or len(found) >= limit or time.monotonic() > until:
            return TaskPage(found, cursor)


def _query(given: Mapping[str, str], **changed: str) -> str:
    merged = {name: value for name, value in {**given, **changed}.items() if value}
    return f"{HOME}/tasks" + (f"?{urlencode(merged)}" if merged else "")


def time_split(row: StepRow, rows: Sequence[StepRow]) -> list[tuple[str, float, str]]:
    """Return how a run's time splits, with words and kinds of bars: gaps, what its direct steps took, and the rest.
    Steps in parallel count once.
    """
    below = [each for each in rows if each.path != row.path and each.path.rpartition("/")[0] == row.path]
    times: dict[str, list[tuple[float, float]]] = {}
    for each in below:
        for bar in each.bars:
            if each.kind != "agent" or bar.kind in ("agent", "commit") or (bar.kind == "queue" and each.wait):
                times.setdefault(bar.kind, []).append((bar.start, bar.end))
    found: list[tuple[str, float, str]] = []
    taken: list[tuple[float, float]] = []
    gaps = [bar for each in rows if f"{each.path}/".startswith(f"{row.path}/") for bar in each.bars]
    for kind in ("dead", "lost"):
        times[kind] = [(bar.start, bar.end) for bar in gaps if bar.kind == kind]
    for word, kind in (
        ("failed, until redriven", "dead"),
        ("not recorded: it was cancelled", "lost"),
        ("in the queue", "queue"),
        ("model", "model"),
        ("tools", "tool"),
        ("engines", "engine"),
        ("commits", "commit"),
        ("agents", "agent"),
        ("other steps", "step"),
        ("waiting", "wait"),
        ("between attempts", "retry"),
    ):
        own = times.get(kind)
        if not own:
            continue
        before, taken = _length(taken), _union([*taken, *own])
        length = _length(taken) - before
        if length >= LEAST_MS:
            found.append((word, length, kind))
    found.sort(key=lambda part: part[2] in ("dead", "lost"))  # they are taken first and shown last
    rest = row.span - _length([(max(start, row.started), min(end, row.ended)) for start, end in taken])
    if (below or found) and rest >= LEAST_MS:
        found.append(("your code, and the rest", rest, "code"))
    return found


def _union(parts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the intervals that cover the same times, in order and apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def _length(parts: Sequence[tuple[float, float]]) -> float:
    """Return the length of intervals that are apart."""
    return sum(max(0.0, end - start) for start, end in parts)


@dataclass(frozen=True, slots=True)
class FailurePath:
    """Why a task failed: the deepest failed step, and the runs that failed because of it."""

    row: StepRow
    error: views.Json
    dragged: list[StepRow]


def root_failure(line: views.Timeline) -> FailurePath | None:
    """Return the first failure of a failed task; None if no failed step is recorded."""
    failed = [row for row in line.every if row.status == Status.FAILED and row.node.get("error")]
    # A run fails when its step does, so the deepest row of the chain below the first run is the cause.
    chain = [row for row in failed if row.path == ROOT_RUN]
    while chain:
        below = [row for row in failed if row.path != chain[-1].path and row.path.startswith(chain[-1].path + "/")]
        same = [row for row in below if row.node["error"]["message"] in chain[-1].node["error"]["message"]] or []
        if not same:
            break
        chain.append(min(same, key=lambda row: (row.depth, row.ended)))
    if not chain:
        return None
    root = chain[-1]
    return FailurePath(root, root.node["error"], chain[-2::-1])


def snippets(view: Mapping[str, views.Json], url: str, keyed: bool) -> dict[str, str]:
    """Return how to start the same task by curl, by the command, and in Python, and how to replay it."""
    agent, given = str(view.get("agent", "")), view.get("input")
    body = msgspec.json.encode({"agent": agent, "input": given}).decode()
    header = ' \\\n  -H "Authorization: Bearer $WEFT_KEY"' if keyed else ""
    text = msgspec.json.encode(given).decode()
    literal = repr(given)
    return {
        "curl": f"curl -X POST {shlex.quote(url + '/v1/tasks')}{header} \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}",
        "CLI": f"weft submit {shlex.quote(agent)} {shlex.quote(text)}",
        "Python": "import asyncio\n\nfrom weft import Client\n\n\nasync def main() -> None:\n"
        f"    async with Client.connect() as client:\n        task = await client.submit({agent!r}, {literal})\n"
        "        print(await task.result())\n\n\nasyncio.run(main())",
        "Replay": f"weft replay check --app MODULE:app --agent {shlex.quote(agent)}",
    }
