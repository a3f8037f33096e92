"""Run agents, swarms and tasks in one call: `await Runners.run("What is a stream?", agent=researcher)`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from runtime_core.aworld.target import RunTarget, TasksApp
from runtime_core.aworld.task import Task, TaskStatus
from runtime_core.client.client import Client
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.host.local import LocalApp
from runtime_core.wire.commands import is_own_engine
from runtime_core.wire.events import StreamEvent, TaskResponse

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.aworld.swarm import Swarm

T = TypeVar("T")

CONCURRENCY = 64
"""How many tasks of one call run concurrently by default."""


class Runners:
    """Runs tasks and waits for them.

    With `client`, tasks run in its namespace. With `url` or WEFT_REDIS_URL, they run on the services of that broker,
    whose app declares the agents; `app` tells the names of objects. Otherwise they run in this process, in an app made
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
        **fields: Any,  # Any: other fields of Task
    ) -> TaskResponse:
        """Run an agent or a swarm on `input`. `fields` are other fields of Task, such as `conf` and `timeout`."""
        task = _task(input, agent, swarm, tool_names, session_id, fields)
        return (await Runners.run_task(task, client=client, url=url, app=app, engine=engine, workers=workers))[task.id]

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
    ) -> dict[str, TaskResponse]:
        """Run one task or several. Return their responses by task id, in the given order.

        At most `concurrency` tasks run at the same time. A failed task does not affect the others, unless it has
        `conf.exit_on_failure`. Errors that show before the start raise InvalidInput or ConfigurationError.
        """
        tasks = _tasks(task)
        _check(tasks, concurrency, workers)
        at_once = min(len(tasks), concurrency)
        async with _run_target(
            tasks, client=client, url=url, app=app, engine=engine, workers=workers, at_once=at_once
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
        **fields: Any,  # Any: other fields of Task
    ) -> AsyncGenerator[StreamEvent]:
        """Like `run`, but yield the task's events as they occur."""
        task = _task(input, agent, swarm, tool_names, session_id, fields)
        # Close the inner generator with the caller's loop, not at garbage collection.
        running = Runners.streaming_run_task(task, client=client, url=url, app=app, engine=engine, workers=workers)
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
    ) -> AsyncGenerator[StreamEvent]:
        """Run a task and yield its events as they occur: those of its `streaming_mode`, or all emitted ones if None.

        The last event always comes and has the task's end in `event.response`, even after a time limit, a
        cancellation or an error in `pre_run`.
        """
        _check([task], 1, workers)
        async with _run_target([task], client=client, url=url, app=app, engine=engine, workers=workers) as target:
            handle = await target.submit(task, stream=True)
            task.task_status = TaskStatus.RUNNING
            async with aclosing(target.events(handle, task.streaming)) as events:
                async for event in events:
                    if event.response is not None:
                        task.task_status = TaskStatus.of(event.response)
                    yield event


def _task(
    input: Any,  # Any: JSON
    agent: object,
    swarm: Swarm | None,
    tool_names: Sequence[str],
    session_id: str,
    fields: dict[str, Any],  # Any: fields of Task
) -> Task:
    known = {field.name for field in dataclasses.fields(Task)} - {"scope", "task_status"}
    for name in fields.keys() - known:
        raise InvalidInput(name, f"is not a field of Task; known are {', '.join(sorted(known))}")
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


async def _run(target: RunTarget, task: Task) -> TaskResponse:
    began = time.monotonic()
    handle = await target.submit(task)
    task.task_status = TaskStatus.RUNNING
    response = await target.result(handle)
    task.task_status = TaskStatus.of(response)
    return dataclasses.replace(response, time_cost=time.monotonic() - began)


async def _run_all(target: RunTarget, tasks: Sequence[Task], concurrency: int) -> dict[str, TaskResponse]:
    room = asyncio.Semaphore(concurrency)
    stopped_by = ""

    async def one(task: Task) -> TaskResponse:
        nonlocal stopped_by
        async with room:
            if stopped_by:
                message = f"not started: task {stopped_by} failed, and it has conf.exit_on_failure"
                return TaskResponse(task.id, "cancelled", error={"type": "Cancelled", "message": message})
            try:
                response = await _run(target, task)
            except Rejected as error:
                response = TaskResponse(task.id, "failed", error={"type": "Rejected", "message": str(error)})
            except InvalidInput as error:
                response = TaskResponse(task.id, "failed", error={"type": "InvalidInput", "message": str(error)})
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
) -> AsyncIterator[RunTarget]:
    """Yield the target for these tasks: the client's broker, the one at `url` or WEFT_REDIS_URL, or this process.

    With `engine="ray"` or `"spark"`, `workers` processes of the cluster run the handlers, and `at_once` tasks run
    concurrently. None: the tasks' `conf.engine` decides, except on services, where it is only the default of
    `ctx.engine()`.
    """
    services = bool(url or os.environ.get("WEFT_REDIS_URL"))
    if engine is None and client is None and not services:
        engine = _engine_of(tasks)
    elif engine not in (None, "local", *_CLUSTERS):
        raise InvalidInput("engine", f"{quoted(engine)} cannot run whole tasks: use one of local, ray and spark")
    if engine in _CLUSTERS:
        from runtime_core.aworld.ray.target import cluster_target  # here: only this branch needs its imports

        async with cluster_target(
            engine, tasks, client=client, url=url, app=app, workers=workers, at_once=at_once
        ) as target:
            yield target
    elif client is not None:
        yield RunTarget(client, app)
    elif services:
        async with Client.connect(url) as connected:
            yield RunTarget(connected, app)
    else:
        made = TasksApp(app)
        for task in tasks:
            made.take(task)
        async with LocalApp(made.app) as local:
            target = RunTarget(local, made.app, made.names)
            try:
                yield target
            except BaseException:
                # Nobody can receive the answers, so do not wait for them.
                await target.give_up()
                raise
