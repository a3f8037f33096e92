"""Run agents, swarms and tasks in one call: `await Runners.run("What is a stream?", agent=researcher)`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from runtime_core.client.client import Client, TaskHandle
from runtime_core.errors import ConfigurationError, InvalidInput, Rejected
from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.listeners import Listeners
from runtime_core.integrations.aworld.response import RECORDED_SECONDS, ReadTask, StoreReader
from runtime_core.integrations.aworld.target import RunTarget, TasksApp
from runtime_core.integrations.aworld.task import Task, TaskStatus
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import is_own_engine
from runtime_core.wire.events import CANCELLED, StreamEvent, StreamingMode, TaskResponse
from runtime_core.wire.step import Status

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.integrations.aworld.orchestration import Swarm
    from runtime_core.trajectory.recorder import LocalTrajectories

T = TypeVar("T")

CONCURRENCY = 64
"""How many tasks of one call run concurrently by default."""
LISTENED_SECONDS = 10.0
"""How long a response waits until the task's listeners have its last event."""


class Runners:
    """Runs tasks and waits for them.

    With `client`, tasks run in its namespace. With `url` or WEFT_REDIS_URL, they run on the services of that broker,
    whose app declares the agents; `app` gives the names of objects. Otherwise they run in this process, in an app made
    from the objects in the tasks. Only tasks on services outlive this process.

    With `engine="ray"` or `"spark"`, whole tasks run on a cluster: `workers` of its processes (0: as many as it has
    places for) run the agents and tools. Without services, `conf.engine` of all tasks has the same effect. The broker
    is the one above, or one that exists for the call.
    """

    @staticmethod
    async def run(
        input: Any,  # Any: whatever JSON can hold
        agent: object = None,
        swarm: Swarm | None = None,
        tool_names: Sequence[str] = (),
        session_id: str = "",
        *,
        client: Client | None = None,
        url: str | None = None,
        app: App | None = None,
        engine: str | None = None,
        workers: int = 0,
        trajectory: bool | str = True,
        **fields: Any,  # Any: other fields of Task
    ) -> TaskResponse:
        """Run an agent or a swarm on `input`. `fields` are other fields of Task, such as `conf` and `timeout`."""
        task = _task(input, agent, swarm, tool_names, session_id, fields)
        found = await Runners.run_task(
            task, client=client, url=url, app=app, engine=engine, workers=workers, trajectory=trajectory
        )
        return found[task.id]

    @staticmethod
    async def run_task(
        task: Task | Sequence[Task],
        *,
        client: Client | None = None,
        url: str | None = None,
        app: App | None = None,
        engine: str | None = None,
        workers: int = 0,
        concurrency: int = CONCURRENCY,
        trajectory: bool | str = True,
    ) -> dict[str, TaskResponse]:
        """Run one task or several. Return their responses by task id, in the given order.

        At most `concurrency` tasks run at the same time. A failed task does not affect the others, unless it has
        `conf.exit_on_failure`. Errors that show before the start raise InvalidInput or ConfigurationError.
        """
        tasks = _tasks(task)
        _check(tasks, concurrency, workers)
        at_once = min(len(tasks), concurrency)
        async with _run_target(
            tasks,
            client=client,
            url=url,
            app=app,
            engine=engine,
            workers=workers,
            at_once=at_once,
            trajectory=trajectory,
        ) as target:
            for each in tasks:
                target.check(each)
            if len(tasks) == 1:
                return {tasks[0].id: await _run(target, tasks[0])}
            return await _run_all(target, tasks, concurrency)

    @staticmethod
    def sync_run(input: Any, agent: object = None, swarm: Swarm | None = None, **others: Any) -> TaskResponse:
        """Like `run`, for sync code. Inside a running event loop it blocks that loop. Takes no `client`."""
        return _in_own_loop(Runners.run(input, agent, swarm, **others))

    @staticmethod
    def sync_run_task(task: Task | Sequence[Task], **others: Any) -> dict[str, TaskResponse]:  # Any: as run_task's
        """Like `run_task`, for sync code. Inside a running event loop it blocks that loop."""
        return _in_own_loop(Runners.run_task(task, **others))

    @staticmethod
    async def streaming_run(
        input: Any,  # Any: whatever JSON can hold
        agent: object = None,
        swarm: Swarm | None = None,
        tool_names: Sequence[str] = (),
        session_id: str = "",
        *,
        client: Client | None = None,
        url: str | None = None,
        app: App | None = None,
        engine: str | None = None,
        workers: int = 0,
        trajectory: bool | str = True,
        **fields: Any,  # Any: other fields of Task
    ) -> AsyncGenerator[StreamEvent]:
        """Like `run`, but yield the task's events as they occur."""
        task = _task(input, agent, swarm, tool_names, session_id, fields)
        # Close the inner generator with the caller's loop, not at garbage collection.
        running = Runners.streaming_run_task(
            task, client=client, url=url, app=app, engine=engine, workers=workers, trajectory=trajectory
        )
        async with aclosing(running) as events:
            async for event in events:
                yield event

    @staticmethod
    async def streaming_run_task(
        task: Task,
        *,
        client: Client | None = None,
        url: str | None = None,
        app: App | None = None,
        engine: str | None = None,
        workers: int = 0,
        trajectory: bool | str = True,
    ) -> AsyncGenerator[StreamEvent]:
        """Run a task and yield its events as they occur: those of its `streaming_mode`, or all emitted ones if None.

        The last event always comes and has the task's end in `event.response`, even after a time limit, a
        cancellation or an error in `pre_run`.
        """
        _check([task], 1, workers)
        async with _run_target(
            [task], client=client, url=url, app=app, engine=engine, workers=workers, trajectory=trajectory
        ) as target:
            target.check(task)
            if task.wants_cancel:
                yield StreamEvent(
                    "", CANCELLED, {"task_id": task.id, "status": Status.CANCELLED}, ended=_not_started(task)
                )
                return
            async with _started(target, task, stream=True) as handle:
                listeners = Listeners(task)
                try:
                    async with aclosing(target.events(handle, task.streaming)) as events:
                        async for event in events:
                            if event.response is not None:
                                event = await _ended(target, task, event)
                            await listeners.take(event)
                            yield event
                finally:
                    await listeners.stop()

    @staticmethod
    async def answer(
        task_id: str,
        request_id: str,
        value: Any,  # Any: JSON
        *,
        client: Client | None = None,
        url: str | None = None,
    ) -> None:
        """Answer a question of a task that Runners run in this process, or of any task on a broker.

        Without `client` and `url`, a task that this process runs, in any thread, else the broker of WEFT_REDIS_URL.
        Raises InvalidInput if the task or the question is not open, or if it expects another value.
        """
        running = _RUNNING.get(task_id) if isinstance(task_id, str) and client is None and url is None else None
        if running is not None:
            loop, handle = running
            if loop is asyncio.get_running_loop():
                await handle.signal(request_id, value)
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(handle.signal(request_id, value), loop))
        elif client is not None:
            await (await client.task(task_id)).signal(request_id, value)
        elif url or os.environ.get("WEFT_REDIS_URL"):
            async with Client.connect(url) as connected:
                await (await connected.task(task_id)).signal(request_id, value)
        else:
            known = ", ".join(_RUNNING) or "none"
            raise InvalidInput(
                "task_id", f"no task {task_id!r} runs in this process (running: {known}): pass client= or url="
            )


_RUNNING: dict[str, tuple[asyncio.AbstractEventLoop, TaskHandle]] = {}
"""The tasks that Runners of this process wait for, by id."""


@asynccontextmanager
async def _started(target: RunTarget, task: Task, *, stream: bool) -> AsyncIterator[TaskHandle]:
    """Submit a task, and make it known for answers and cancellation while it runs."""
    handle = await target.submit(task, stream=stream)
    task.note_status(TaskStatus.RUNNING)
    _RUNNING[task.id] = asyncio.get_running_loop(), handle
    try:
        yield handle
    finally:
        _RUNNING.pop(task.id, None)
        task.cancel = None


async def _ended(target: RunTarget, task: Task, event: StreamEvent) -> StreamEvent:
    """Return the final event with the whole response."""
    assert event.response is not None
    response = await target.completed(task, event.response)
    task.note_status(TaskStatus.of(response))
    return dataclasses.replace(event, ended=response)


def _not_started(task: Task) -> TaskResponse:
    message = "not started: its task_status was set to " + str(task.task_status)
    return TaskResponse(task.id, Status.CANCELLED, error={"type": "Cancelled", "message": message})


def _task(
    input: Any,  # Any: JSON
    agent: object,
    swarm: Swarm | None,
    tool_names: Sequence[str],
    session_id: str,
    fields: dict[str, Any],  # Any: fields of Task
) -> Task:
    known = {field.name for field in dataclasses.fields(Task)} - {"scope", "task_status", "cancel"}
    for name in fields.keys() - known:
        raise InvalidInput(name, f"is not a field of Task; choose from {', '.join(sorted(known))}")
    names: Any = tool_names  # Any: the task checks it
    return Task(input=input, agent=agent, swarm=swarm, tool_names=names, session_id=session_id, **fields)


def _tasks(task: object) -> list[Task]:
    if isinstance(task, Task):
        return [task]
    if isinstance(task, str) or not isinstance(task, Iterable):
        raise InvalidInput("task", f"{quoted(task)} is neither a Task nor a list of them")
    return list(task)


def _check(tasks: Sequence[Task], concurrency: int, workers: int) -> None:
    for place, each in enumerate(tasks):
        if not isinstance(each, Task):
            raise InvalidInput(f"task.{place}", f"{each!r} is not a Task")
    if not tasks:
        raise InvalidInput("task", "no task was given")
    first: dict[str, int] = {}
    for place, each in enumerate(tasks):
        if first.setdefault(each.id, place) != place:
            raise InvalidInput(
                f"task.{place}.id", f"{each.id!r} is also the id of task.{first[each.id]}: give each task its own"
            )
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidInput("concurrency", f"{concurrency!r} is not a whole number of at least 1")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise InvalidInput("workers", f"{workers!r} is not a whole number; 0 means as many as the engine has CPUs")


async def _heard(
    target: RunTarget, handle: TaskHandle, listen: Coroutine[Any, Any, None], patience: float
) -> TaskResponse:  # Any: asyncio's protocol
    """Wait for a task's end while `listen` follows it. If that fails, cancel the task and raise the error."""
    waiting = asyncio.create_task(target.result(handle), name=f"await task {handle.task_id}")
    listening = asyncio.create_task(listen, name=f"listen to task {handle.task_id}")
    try:
        await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            # Its last events may still be on their way.
            await asyncio.wait((listening,), timeout=patience)
        if listening.done() and (error := listening.exception()) is not None:
            await handle.cancel(f"what listens to it failed: {type(error).__name__}: {error}")
            raise error
        return await waiting
    finally:
        for each in (waiting, listening):
            each.cancel()
        await asyncio.wait((waiting, listening))


async def _run(target: RunTarget, task: Task) -> TaskResponse:
    if task.wants_cancel:
        return _not_started(task)
    began = time.monotonic()
    listeners = Listeners(task)
    async with _started(target, task, stream=listeners.wanted) as handle:
        if listeners.wanted:
            heard = listeners.follow(target.events(handle, task.streaming or StreamingMode.CHUNK_OUTPUT))
        else:
            heard = target.hints.follow(handle)
        try:
            response = await _heard(target, handle, heard, LISTENED_SECONDS if listeners.wanted else 0.0)
        finally:
            await listeners.stop()
        seconds = time.monotonic() - began
        response = await target.completed(task, response)
    task.note_status(TaskStatus.of(response))
    return dataclasses.replace(response, time_cost=seconds)


async def _run_all(target: RunTarget, tasks: Sequence[Task], concurrency: int) -> dict[str, TaskResponse]:
    room = asyncio.Semaphore(concurrency)
    stopped_by = ""

    async def one(task: Task) -> TaskResponse:
        nonlocal stopped_by
        async with room:
            if stopped_by:
                message = f"not started: task {stopped_by} failed, and it has conf.exit_on_failure"
                return TaskResponse(task.id, Status.CANCELLED, error={"type": "Cancelled", "message": message})
            try:
                response = await _run(target, task)
            except Rejected as error:
                response = TaskResponse(task.id, Status.FAILED, error={"type": "Rejected", "message": str(error)})
            except InvalidInput as error:
                response = TaskResponse(task.id, Status.FAILED, error={"type": "InvalidInput", "message": str(error)})
            if not response.success and task.config.exit_on_failure:
                stopped_by = stopped_by or task.id
            return response

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task), name=f"task {task.id}") for task in tasks]
    return {task.id: each.result() for task, each in zip(tasks, running, strict=True)}


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:  # Any: what coroutines send and yield
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # raised again below, in the thread of the caller
            errors.append(error)

    thread = threading.Thread(target=body, name="sync_run")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


_CLUSTERS = ("ray", "spark")


def _engine_of(tasks: Sequence[Task]) -> str:
    """Return the engine that `conf.engine` of all tasks names, for a call without services."""
    # An engine of the user's own runs steps only; whole tasks then run in this process.
    wanted = ["local" if is_own_engine(task.config.engine) else task.config.engine for task in tasks]
    for number, engine in enumerate(wanted):
        if engine != wanted[0]:
            raise InvalidInput(
                f"task.{number}.conf.engine",
                f"is {engine!r}, but that of task.0 is {wanted[0]!r}: use one engine, or pass engine= for all tasks",
            )
    return wanted[0]


@asynccontextmanager
async def _run_target(
    tasks: Sequence[Task],
    *,
    client: Client | None,
    url: str | None,
    app: App | None,
    engine: str | None = None,
    workers: int = 0,
    at_once: int = 1,
    trajectory: bool | str = True,
) -> AsyncIterator[RunTarget]:
    """Yield the target for these tasks: the client's broker, the one at `url` or WEFT_REDIS_URL, or this process.

    With `engine="ray"` or `"spark"`, `workers` processes of the cluster run the handlers, and `at_once` tasks run
    concurrently. None: the tasks' `conf.engine` decides, except on services, where it is only the default of
    `ctx.engine()`.
    """
    if not isinstance(trajectory, bool | str) or trajectory == "":
        raise InvalidInput("trajectory", f"{quoted(trajectory)} is not True, False or the URL of a store")
    if isinstance(trajectory, str):
        _check_store(trajectory)
    if client is not None and not isinstance(client, Client):
        raise InvalidInput("client", f"{client!r} is not a weft.Client")
    services = bool(url or os.environ.get("WEFT_REDIS_URL"))
    if engine is None and client is None and not services:
        engine = _engine_of(tasks)
    elif engine not in (None, "local", *_CLUSTERS):
        raise InvalidInput("engine", f"{quoted(engine)} cannot run whole tasks: use one of local, ray and spark")
    if engine in _CLUSTERS:
        from runtime_core.integrations.aworld.engines.target import (
            cluster_target,  # here: only this branch needs its imports
        )

        async with cluster_target(
            engine, tasks, client=client, url=url, app=app, workers=workers, at_once=at_once
        ) as target:
            yield target
    elif client is not None:
        async with _reader(trajectory, client) as read:
            yield RunTarget(client, app, read=read)
    elif services:
        async with Client.connect(url) as connected, _reader(trajectory, connected) as read:
            yield RunTarget(connected, app, read=read)
    else:
        async with _in_this_process(tasks, app, trajectory) as target:
            yield target


def _check_store(url: str) -> None:
    from runtime_core.trajectory.database import parse  # here: SQLAlchemy loads in half a second

    try:
        parse(url)
    except ConfigurationError as error:
        raise InvalidInput("trajectory", str(error)) from None


@asynccontextmanager
async def _reader(trajectory: bool | str, client: Client) -> AsyncIterator[ReadTask | None]:
    """Yield the reader of the records of services; None if this process does not know their store."""
    url = trajectory if isinstance(trajectory, str) else os.environ.get("WEFT_TRAJECTORY_URL") if trajectory else None
    if not url:
        yield None
        return
    reader = StoreReader(url, client.namespace)
    try:
        yield reader
    finally:
        await reader.close()


@asynccontextmanager
async def _in_this_process(tasks: Sequence[Task], app: App | None, trajectory: bool | str) -> AsyncIterator[RunTarget]:
    made = TasksApp(app)
    for task in tasks:
        made.take(task)
    record = _local_record(trajectory) if trajectory else None
    local = LocalApp(made.app, trajectory=record or False)
    async with local as client:
        if record is None:
            target = RunTarget(client, made.app, made.names, own_app=True)
        else:
            read = partial(record.recorded, timeout=RECORDED_SECONDS)
            target = RunTarget(client, made.app, made.names, own_app=True, read=read, before=record.forget)
        try:
            yield target
        except BaseException:
            # Nobody can receive the answers, so do not wait for them.
            await target.give_up()
            raise


def _local_record(trajectory: bool | str) -> LocalTrajectories:
    """Return the record of tasks in this process, in the store that `weft trajectory` reads."""
    # Imported here: SQLAlchemy loads in half a second.
    from runtime_core.settings import Settings
    from runtime_core.trajectory.recorder import LocalTrajectories

    settings = Settings.from_environment(os.environ)
    url = trajectory if isinstance(trajectory, str) else settings.trajectory_url
    if trajectory is True and url.startswith("sqlite"):
        try:
            settings.make_data_dir()
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; or pass trajectory=False to record nothing") from None
    # A separate partition number keeps the recorders of several processes apart.
    return LocalTrajectories(settings.namespace, url, store_partition=2**20 + secrets.randbelow(2**30))
