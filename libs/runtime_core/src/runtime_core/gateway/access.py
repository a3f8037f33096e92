"""What callers of the gateway read and change: tasks, dead letters, schedules, trajectories and usage.

The routes of the API and the pages of the console do everything through `Access`. It binds each call to the caller's
tenant, so nothing above it compares tenants. Rows are JSON. Methods raise Problem, InvalidInput or BusError.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from runtime_core.base.lifeline import tied
from runtime_core.client.client import Client
from runtime_core.client.doctor import Finding, Installation, findings
from runtime_core.client.task import TaskHandle, open_questions
from runtime_core.client.task_view import Row, TaskFilter, TaskPage, list_tasks, read_task
from runtime_core.consumer.announcements import read_manifests
from runtime_core.errors import ConfigurationError, InvalidInput, Rejected
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    CONFLICT,
    FIELD,
    NO_APP,
    NO_STORE,
    NO_TRAJECTORY,
    OVERLOADED,
    PARAMETER,
    REPLAY,
    Problem,
    no_letter,
    no_schedule,
    no_task,
)
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.dead_letters import By, DeadLetter, DeadLetters, LetterFilter
from runtime_core.state_manager.publishers import Publishers
from runtime_core.state_manager.schedules import ScheduleBounds, Schedules, TenantSchedules, checked_id, parse_set
from runtime_core.telemetry.redaction import redactor
from runtime_core.trajectory.reading import ExportedStep, TaskTrajectory, exported
from runtime_core.wire import codec
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import Submission, SubmitOptions, submission_of
from runtime_core.wire.ids import is_task_id
from runtime_core.wire.step import ENDED

if TYPE_CHECKING:
    from runtime_core.trajectory.store import Filters, TrajectoryStore

SOURCE = "weft/http"
"""The source of submits. No publisher's source begins with `weft`."""
SUBMIT_SECONDS = 10.0
"""How long a submit waits for a broker that is unavailable, and for the first agent-handler."""
PAGE_SECONDS = 0.08
"""How long one page of a list searches for tasks. It may then have fewer tasks than requested."""
REASON_FIELDS_MAX = 200
TRAJECTORIES_AT_ONCE = 4
"""Trajectories that a replica reads at once: each is in memory as a whole."""
CHECKED_SECONDS = 10.0
"""How long the findings of the checks are cached, since many people may open the page."""
USAGE_ROWS_MAX = 200_000
"""Reports of a part of a day that one summary of usage reads."""
UsageBy = Literal["agent", "model", "tenant", "day"]


REPLAYS_AT_ONCE = 2
"""Replays that a replica runs at once, one for each tenant: each may take a gigabyte."""
REPLAY_SECONDS = 30.0
"""How long the process of a replay may take, with the import of the app."""
REPLAY_RESULT_MAX_BYTES = 1024 * 1024


class Replays:
    """Runs recorded tasks through the code of the app, each in a separate process that ends before this one."""

    def __init__(self, app: str, seconds: float = REPLAY_SECONDS) -> None:
        """`app` is `package.module:app`; empty: none is set."""
        self._app = app
        self._seconds = seconds
        self._tenants: list[str] = []
        """Those of the replays that run."""

    async def check(self, caller: Caller, recorded: TaskTrajectory) -> Row:
        """Return whether the code follows the record, and where it first does not. Raises Problem."""
        if not self._app:
            raise Problem(NO_APP, "set WEFT_APP of the gateway to the app that the handlers run, as in desk:app")
        if len(self._tenants) >= REPLAYS_AT_ONCE or (caller.tenant and caller.tenant in self._tenants):
            raise Problem(OVERLOADED, "other replays are running", "", REPLAY_SECONDS)
        self._tenants.append(caller.tenant)
        try:
            found = cast(Row, msgspec.json.decode(await self._run(msgspec.json.encode(recorded))))
        finally:
            self._tenants.remove(caller.tenant)
        if "error" in found:
            raise Problem(REPLAY, redactor().text(str(found["error"])))
        differences, runs = [_shown(each) for each in found["differences"]], found["runs"]
        return {
            "task_id": recorded.task, "follows": not differences if runs else None, "runs": runs,
            "difference": differences[0] if differences else None,
            "further": [_shown(each) for each in found["further"]], "skipped": found["skipped"],
        }  # fmt: skip

    async def _run(self, record: bytes) -> bytes:
        """Return what the process writes. Raises Problem if it writes nothing, or too much, or takes too long."""
        # -P: the user's folder must not shadow our modules. The loader adds it for the app itself.
        command = [sys.executable, "-P", "-m", "runtime_core.app.loading", self._app, "--replay"]
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        environ = {name: os.environ[name] for name in os.environ if name[:5] != "WEFT_" or name[:9] == "WEFT_APP_"}
        process = await asyncio.create_subprocess_exec(
            *tied(command, signal.SIGKILL), stdin=pipe, stdout=pipe, stderr=nothing, env=environ, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._seconds):
                with contextlib.suppress(ConnectionError):  # it has died
                    process.stdin.write(record)
                    await process.stdin.drain()
                process.stdin.close()
                await process.stdout.readexactly(REPLAY_RESULT_MAX_BYTES)
            raise Problem(REPLAY, f"the differences take more than {REPLAY_RESULT_MAX_BYTES} bytes")
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise Problem(REPLAY, f"its process ended with status {await process.wait()}") from None
            return error.partial
        except TimeoutError:
            raise Problem(REPLAY, f"it did not end within {self._seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that the code has started
            await process.wait()


def _shown(difference: Row) -> Row:
    """Return a difference without the task's id, and without secrets that the code has and the record does not."""
    return {name: redactor().text(str(value)) for name, value in difference.items() if name != "task"}


class Access:
    """Reads and changes what a caller reaches."""

    def __init__(
        self,
        client: Client,
        *,
        blobs: str = "",
        trajectory_url: str = "",
        installation: Installation | None = None,
        schedule_bounds: ScheduleBounds = ScheduleBounds(),  # noqa: B008 - it is frozen
        app: str = "",
    ) -> None:
        """`blobs` is the URL of the namespace's blobs, if it has any; `trajectory_url` that of the recorder's store.

        `installation` is what `checks` examines; `app` names the code of replays.
        """
        self.client = client
        self._blobs = blobs
        self._trajectory_url = trajectory_url
        self._store: TrajectoryStore | None = None
        self._opening = asyncio.Lock()
        self._reading = asyncio.Semaphore(TRAJECTORIES_AT_ONCE)
        self._installation = installation
        self._checking = asyncio.Lock()
        self._checked: tuple[float, list[Finding]] = (float("-inf"), [])
        self._bounds = schedule_bounds
        self._replays = Replays(app)
        self._setting = asyncio.Lock()
        """Two schedules of one tenant are counted one after the other."""

    async def warm_up(self) -> None:
        """Open the trajectory store, if there is one, so that the first caller does not wait for it."""
        with contextlib.suppress(Problem):
            await self._opened()

    async def close(self) -> None:
        """Close the trajectory store."""
        if self._store is not None:
            await self._store.close()
            self._store = None

    # -- tasks -------------------------------------------------------------------------------------------------

    async def submit(self, caller: Caller, data: dict[str, object], event_id: str, trace: str = "") -> TaskHandle:
        """Start a task; `data` is that of a `weft.task.submit`."""
        # Each tenant has its own Idempotency-Keys.
        source = f"{SOURCE}/{caller.tenant}" if caller.tenant else SOURCE
        return await self.start(
            caller, submission_of(data, source=source, event_id=event_id, tenant=caller.tenant, traceparent=trace)
        )

    async def start(self, caller: Caller, new: Submission) -> TaskHandle:
        """Start a task for the caller. `new` has the caller's tenant, and names that are not bound yet."""
        bound = caller.bind(new, self._blobs)
        with self._public(caller, new.agent):
            return await self.client.start(bound, timeout=SUBMIT_SECONDS, expects_answer=False)

    async def handle(self, caller: Caller, task_id: str) -> TaskHandle:
        """Return a handle of a task, which may not exist. Raises Problem if there can be none.

        A tenant's caller reaches that tenant's tasks only: every other id gets the tenant's prefix.
        """
        if not is_task_id(task_id):
            raise no_task(task_id[:200])
        try:
            return await self.client.task(caller.bound_task(task_id))
        except InvalidInput:
            raise no_task(task_id) from None

    async def known(self, caller: Caller, task_id: str) -> TaskHandle:
        """Return a handle of a task. Raises Problem if there is none."""
        handle = await self.handle(caller, task_id)
        if not await handle.exists():
            raise no_task(handle.task_id)
        return handle

    async def show(self, caller: Caller, task_id: str) -> Row:
        """Return a task as `read_task` describes it."""
        handle = await self.handle(caller, task_id)
        view = await read_task(handle.bus, handle.task_id, letters=False)
        if view is None:
            raise no_task(handle.task_id)
        return view

    async def reason(self, caller: Caller, row: Row) -> Row:
        """Return a task of a list as `show` does, with its error or what it waits for.

        A list shows many: a task with more than `REASON_FIELDS_MAX` calls and results stays as it is.
        """
        handle = await self.handle(caller, row["task_id"])
        size = cast(int, await handle.bus.transport.call("HLEN", handle.bus.keys.task(handle.task_id)))
        return row if size > REASON_FIELDS_MAX else {**row, **await self.show(caller, row["task_id"])}

    async def tasks(self, caller: Caller, wanted: TaskFilter, limit: int, cursor: str = "") -> TaskPage:
        """Return a page of tasks, the newest first."""
        if caller.tenant and wanted.tenant not in ("", caller.tenant):
            raise Problem(PARAMETER, f"{quoted(wanted.tenant)} is not the tenant of this key; leave it out", "tenant")
        # The prefix excludes tasks that trusted programs have started for this tenant under free ids.
        bound = replace(wanted, tenant=caller.tenant, prefix=f"{caller.tenant}.") if caller.tenant else wanted
        store = await self._opened() if wanted.text else None
        inputs = None if store is None else partial(store.inputs, self.client.namespace)
        return await list_tasks(self.client.buses, bound, limit, cursor, inputs, PAGE_SECONDS)

    async def questions(self, caller: Caller, limit: int) -> list[Row]:
        """Return open questions of the oldest tasks."""
        return (await self.question_page(caller, limit))[0]

    async def question_page(self, caller: Caller, limit: int, cursor: str = "") -> tuple[list[Row], str]:
        """Return a page of open questions, and the cursor of the next one (empty: the end)."""
        return await open_questions(self.client.buses, limit, caller.tenant, cursor)

    async def open_the_longest(self, caller: Caller, limit: int) -> list[Row]:
        """Return the open tasks that started first, as `show` does."""
        found: list[Row] = []
        own = f"{caller.tenant}." if caller.tenant else ""
        for bus in self.client.buses:
            index = bus.keys.open_tasks_of(caller.tenant) if own else bus.keys.open_tasks
            # Some may have ended since; others have ids that a tenant's key cannot name.
            oldest = cast(list[bytes], await bus.transport.call("ZRANGE", index, 0, 2 * limit - 1))
            views = [
                await read_task(bus, task.decode(), letters=False) for task in oldest if task.startswith(own.encode())
            ]
            found += [view for view in views if view is not None and view["status"] not in ENDED]
        return sorted(found, key=lambda view: cast(int, view["created"]))[:limit]

    async def cancel(self, caller: Caller, task_id: str, reason: str) -> str:
        """Cancel a task, and return the status that it has ended with."""
        handle = await self.known(caller, task_id)
        status = await handle.cancel(reason)
        if status == "unknown":
            raise no_task(handle.task_id)
        return status

    async def answer(self, caller: Caller, task_id: str, request_id: str, value: object) -> None:
        """Answer a question of a task. Raises Problem if it is not open."""
        handle = await self.known(caller, task_id)
        caller.check_references("value", codec.encode(value), self._blobs)
        try:
            await handle.signal(request_id, value)
        except InvalidInput as error:
            if error.field.partition(".")[0] == "value":
                raise
            raise Problem(CONFLICT, error.message, error.field) from None

    async def send(self, caller: Caller, task_id: str, name: str, value: object, event_id: str = "") -> None:
        """Send a message to a running task. Raises Problem if it has ended or cannot keep another one.

        A repeat with the same `event_id` sends nothing.
        """
        handle = await self.known(caller, task_id)
        caller.check_references("value", codec.encode(value), self._blobs)
        try:
            await handle.send(name, value, id=event_id)
        except InvalidInput as error:
            if error.field not in ("task_id", "id"):
                raise
            field = "Idempotency-Key" if error.field == "id" else error.field
            raise Problem(CONFLICT, error.message, field) from None

    async def fork(
        self,
        caller: Caller,
        task_id: str,
        *,
        at: str | None = None,
        input: object = ...,
        new_id: str | None = None,
        session_id: str | None = None,
        event_id: str = "",
    ) -> TaskHandle:
        """Start a new task with the results that a task had before a step, as `Client.fork`.

        Without `at` the task runs again from its beginning. A repeat with the same `event_id` starts nothing.
        """
        from runtime_core.client.fork import plan_fork

        origin = await self.handle(caller, task_id)
        if not isinstance(input, EllipsisType):
            caller.check_references("input", codec.encode(input), self._blobs)
        store = await self._opened()
        try:
            async with self._reading:
                plan = await plan_fork(
                    origin.bus, self.client.namespace, origin.task_id, at=at, input=input, store=store
                )
        except InvalidInput as error:
            if error.field == "task_id":
                raise no_task(origin.task_id) from None
            raise
        name = hashlib.sha256(f"{caller.tenant}\n{event_id}".encode()).hexdigest() if event_id else secrets.token_hex(8)
        options = SubmitOptions(tenant=caller.tenant) if caller.tenant else SubmitOptions()
        return await self.start(
            caller,
            plan.submission(task_id=new_id or f"fork-{name[:16]}", session_id=session_id, options=options),
        )

    async def agents(self, caller: Caller) -> list[Row]:
        """Return the agents to which the caller may submit, by name, with the JSON schemas of their inputs."""
        found = [
            {"name": name, "app": manifest.app, "description": entry.description, "input": entry.input}
            for manifest in await read_manifests(self.client.buses[0])
            for name, entry in manifest.agents.items()
            if not entry.internal and caller.sees_agent(name)
        ]
        return sorted(found, key=lambda row: (str(row["name"]), str(row["app"])))

    # -- dead letters ------------------------------------------------------------------------------------------

    async def letters(
        self, caller: Caller, wanted: LetterFilter, limit: int, cursor: str = ""
    ) -> tuple[list[Row], str]:
        """Return dead letters, the newest first, and the cursor of the next page (empty: the end)."""
        page = await self._letters().page(limit, await self._bound(caller, wanted), cursor)
        return [_public_letter(letter.without_secrets().summary()) for letter in page.letters], page.cursor

    async def letter_groups(self, caller: Caller, by: By, wanted: LetterFilter, limit: int) -> list[Row]:
        """Return dead letters counted by a common property, the most frequent first."""
        groups = await self._letters().counted(by, await self._bound(caller, wanted))
        return [
            {
                by: group.newest.shown_group(by), "count": group.count, "bytes": group.size,
                "newest": _public_id(group.newest.letter_id),
            }
            for group in groups[:limit]
        ]  # fmt: skip

    async def letter(self, caller: Caller, letter_id: str) -> Row:
        """Return a dead letter with its event and all errors."""
        return _public_letter((await self._letter(caller, letter_id)).without_secrets().details())

    async def redrive(self, caller: Caller, letter_id: str, *, reopen: bool = False, data: object = ...) -> str:
        """Return a dead letter's delivery to its consumer, and return its task; `data` replaces the old data."""
        letter = await self._letter(caller, letter_id)
        replacement = b"" if isinstance(data, EllipsisType) else codec.encode(data)
        if replacement:
            caller.check_references("data", replacement, self._blobs)
        try:
            return await self._letters().redrive(letter.letter_id, reopen=reopen, data=replacement)
        except Rejected as error:
            raise Problem(FIELD, error.message, error.field) from None
        except InvalidInput as error:
            message = error.message.replace("--reopen continues it", "`reopen` continues it")
            raise Problem(CONFLICT, message, error.field) from None

    async def drop(self, caller: Caller, letter_id: str) -> None:
        """Delete a dead letter permanently."""
        letter = await self._letter(caller, letter_id)
        try:
            await self._letters().drop(letter.letter_id)
        except InvalidInput:
            raise no_letter(letter_id) from None

    def _letters(self) -> DeadLetters:
        return DeadLetters(self.client.buses)

    async def _letter(self, caller: Caller, letter_id: str) -> DeadLetter:
        try:
            letter = await self._letters().get(letter_id)
        except InvalidInput:
            raise no_letter(letter_id) from None
        if letter not in await self._bound(caller, LetterFilter()):
            raise no_letter(letter_id)
        return letter

    async def _bound(self, caller: Caller, wanted: LetterFilter) -> LetterFilter:
        if not caller.tenant:
            return wanted
        registered = await Publishers(self.client.buses[0]).all()
        own = frozenset(each.name for each in registered if each.tenant == caller.tenant)
        try:
            task = caller.bound_task(wanted.task) if wanted.task else ""
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, "task_id") from None
        return replace(wanted, task=task, tenant=caller.tenant, publishers=own)

    # -- schedules ---------------------------------------------------------------------------------------------

    async def schedules(self, caller: Caller, limit: int, after: str = "") -> list[Row]:
        """Return the schedules that follow the id `after`, sorted by id."""
        own = f"{caller.tenant}." if caller.tenant else ""
        return [each.describe() for each in await self._schedules().all(own, after, limit)]

    async def schedule(self, caller: Caller, schedule_id: str) -> Row:
        bound = self._schedule_id(caller, schedule_id)
        try:
            return (await self._schedules().get(bound)).describe()
        except InvalidInput:
            raise no_schedule(bound) from None

    async def set_schedule(self, caller: Caller, schedule_id: str, data: Mapping[str, object]) -> Row:
        """Create or replace a schedule; `data` is that of a `weft.schedule.set` without its id."""
        now = await self.client.buses[0].time_ms()
        given = {"schedule_id": schedule_id, **data}
        schedule = parse_set(given, now, caller.tenant)
        caller.check_agent(schedule.agent)
        with self._public(caller, schedule.agent):
            if caller.scope is None:
                return (await self._schedules().set(schedule)).describe()
            scoped = parse_set(caller.scope.schedule(given, self._blobs), now, caller.tenant)
            async with self._setting:
                # Counted each time, since other replicas and the leader also set schedules.
                await TenantSchedules(self._schedules(), self._bounds).set(scoped, "")
            return await self.schedule(caller, scoped.schedule_id)

    async def delete_schedule(self, caller: Caller, schedule_id: str) -> None:
        """Remove a schedule. Tasks that it has started continue."""
        bound = self._schedule_id(caller, schedule_id)
        if not await self._schedules().delete(bound):
            raise no_schedule(bound)

    async def run_schedule(self, caller: Caller, schedule_id: str) -> str:
        """Start a task of a schedule now, and return its id."""
        found = await self.schedule(caller, schedule_id)
        caller.check_agent(str(found["agent"]))
        with self._public(caller, str(found["agent"])):
            return (await self._schedules().run_now(str(found["schedule_id"]))).task

    def _schedules(self) -> Schedules:
        return Schedules(self.client.buses[0], Admission(self.client.buses))

    def _schedule_id(self, caller: Caller, schedule_id: str) -> str:
        try:
            checked = checked_id(schedule_id)
            return checked if caller.scope is None else caller.scope.schedule_id(checked)
        except InvalidInput:
            raise no_schedule(schedule_id[:200]) from None

    # -- trajectories and usage --------------------------------------------------------------------------------

    async def store(self) -> TrajectoryStore:
        """Return the trajectory store. Raises Problem if there is none."""
        found = await self._opened()
        if found is None:
            raise Problem(
                NO_STORE, "set WEFT_TRAJECTORY_URL of the gateway to the value that the trajectory-recorder uses"
            )
        return found

    async def trajectory(self, caller: Caller, task_id: str) -> TaskTrajectory:
        """Return the recorded steps of a task. Raises Problem if none are recorded yet."""
        if not is_task_id(task_id):
            raise no_task(task_id[:200])
        bound, store = caller.bound_task(task_id), await self.store()
        async with self._reading:
            found = await store.task(self.client.namespace, bound)
        if found is None:
            if not await (await self.handle(caller, task_id)).exists():
                raise no_task(bound)
            raise Problem(NO_TRAJECTORY, f"no steps of task {bound!r} are recorded yet", "task_id")
        return found

    async def replay(self, caller: Caller, task_id: str) -> Row:
        """Run a recorded task through the code of the app. Raises Problem unless all of it is recorded."""
        recorded = await self.trajectory(caller, task_id)
        if recorded.end is None:
            raise Problem(CONFLICT, "it has not ended; its input is recorded with its end", "task_id")
        if not recorded.complete:
            raise Problem(NO_TRAJECTORY, f"only {len(recorded.steps)} of {recorded.end.steps} steps are recorded")
        return await self._replays.check(caller, recorded)

    async def steps(self, caller: Caller, filters: Filters) -> AsyncIterator[ExportedStep]:
        """Yield the recorded steps of tasks, in the form of exports."""
        store = await self.store()
        bound = filters.copy()
        if caller.tenant:
            bound["prefix"] = f"{caller.tenant}."
        if named := filters.get("tasks"):
            bound["tasks"] = [caller.bound_task(task) for task in named]
        async for stored in store.steps(self.client.namespace, **bound):
            yield exported(self.client.namespace, stored)

    async def usage(
        self, caller: Caller, by: Collection[UsageBy], since: datetime, until: datetime, tenant: str = ""
    ) -> tuple[list[Row], bool]:
        """Return the usage of tasks that ended in a span of time, by agent, model, tenant and day (UTC).

        Also returns whether it is complete, as `TrajectoryStore.usage_sums`. A task belongs to the tenant that its id
        begins with.
        """
        if caller.tenant and tenant not in ("", caller.tenant):
            raise Problem(PARAMETER, f"{quoted(tenant)} is not the tenant of this key; leave it out", "tenant")
        store, bound = await self.store(), caller.tenant or tenant
        async with self._reading:
            sums, complete = await store.usage_sums(
                self.client.namespace, by, since, until, tenant=bound, most=USAGE_ROWS_MAX
            )
        rows = [{**dict(zip(by, each.group, strict=True)), "tasks": each.tasks, "usage": each.amounts} for each in sums]
        return rows, complete

    # -- the system --------------------------------------------------------------------------------------------

    async def checks(self) -> list[Finding]:
        """Return the findings of `weft doctor`, at most `CHECKED_SECONDS` old. They concern all tenants."""
        if self._installation is None:
            return []
        async with self._checking:
            at, found = self._checked
            if time.monotonic() - at > CHECKED_SECONDS:
                await self.warm_up()  # imports what the checks import, in a thread
                found = [each async for each in findings(self._installation)]
                self._checked = (time.monotonic(), found)
        return found

    async def _opened(self) -> TrajectoryStore | None:
        if self._store is None and self._trajectory_url:
            async with self._opening:
                if self._store is None:
                    # In a thread: importing SQLAlchemy takes half a second.
                    module = await asyncio.to_thread(importlib.import_module, "runtime_core.trajectory.store")
                    try:
                        self._store = await module.TrajectoryStore.open_existing(self._trajectory_url)
                    except ConfigurationError as error:
                        raise Problem(NO_STORE, str(error)) from None
        return self._store

    @contextlib.contextmanager
    def _public(self, caller: Caller, agent: str) -> Iterator[None]:
        """Raise errors about an agent without the names of agents that other tenants use."""
        try:
            yield
        except Rejected as error:
            if caller.scope is not None and error.field == "data.agent":
                raise caller.scope.unknown_agent(agent) from None
            raise


def _public_id(letter_id: str) -> str:
    """Return the id of a dead letter without a slash, so that it fits into a path. `DeadLetters` takes both."""
    return letter_id.replace("/", ":")


def _public_letter(row: Row) -> Row:
    return {**row, "letter_id": _public_id(row["letter_id"])}
