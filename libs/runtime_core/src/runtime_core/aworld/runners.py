"""The short way to run agents, swarms and tasks: `await Runners.run("What is a stream?", agent=researcher)`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from runtime_core.aworld.place import RunPlace
from runtime_core.aworld.task import Task, TaskStatus
from runtime_core.aworld.task_app import TasksApp
from runtime_core.client.client import Client
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.host.local import LocalApp
from runtime_core.wire.results import StreamEvent, TaskResponse

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.aworld.swarm import Swarm

T = TypeVar("T")

CONCURRENCY = 64
"""How many of several tasks are under way at once, where the caller does not say."""


class Runners:
    """Runs tasks and waits for them.

    Where: with `client`, through it; with `url`, or where WEFT_REDIS_URL is set, on the services of that broker, which
    run the app that declares the agents (`app` may be given to find the names of objects); else in this process, in an
    app made of what the tasks hold. The agents are the same in all places; only with services do tasks outlive this
    process.

    With `engine="ray"` (without services also where `conf.engine` of all the tasks says so) whole tasks run on a Ray
    cluster: `workers` processes there (0: as many as it has CPUs) run the agents and tools, on that broker or on one
    of the call's own.
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
        """Run an agent or a swarm on `input`. `fields` are others of Task, as `conf` and `timeout`."""
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
        """Run one task or several; their responses by task id, in the order given.

        Several run side by side, `concurrency` at most; one that fails touches no other, unless its
        `conf.exit_on_failure` says so. Raises InvalidInput and ConfigurationError, before any has begun, for what can
        be seen to be wrong.
        """
        tasks = _tasks(task)
        _check(tasks, concurrency, workers)
        at_once = min(len(tasks), concurrency)
        async with _run_place(
            tasks, client=client, url=url, app=app, engine=engine, workers=workers, at_once=at_once
        ) as place:
            for each in tasks:
                place.check(each)
            if len(tasks) == 1:
                return {tasks[0].id: await _run(place, tasks[0])}
            return await _run_all(place, tasks, concurrency)

    @staticmethod
    def sync_run(input: Any, agent: object = None, swarm: Swarm | None = None, **others: Any) -> TaskResponse:
        """As `run`, for code that is not async; also where a loop runs already, which it then holds up. No `client`."""
        return _in_own_loop(Runners.run(input, agent, swarm, **others))

    @staticmethod
    def sync_run_task(task: Task | Sequence[Task], **others: Any) -> dict[str, TaskResponse]:  # Any: as run_task's
        """As `run_task`, for code that is not async; also where a loop runs already, which it then holds up."""
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
        """As `run`, giving the task's events as they come."""
        task = _task(input, agent, swarm, tool_names, session_id, fields)
        # Closed here with the caller's loop over it, and not by the garbage collector.
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
        """Run a task and give its events as they come: those of its `streaming_mode`; None: all that is emitted.

        The last one says how it ended (`event.response`). It always comes, also after a time limit, a cancellation or
        an error in `pre_run`.
        """
        _check([task], 1, workers)
        async with _run_place([task], client=client, url=url, app=app, engine=engine, workers=workers) as place:
            handle = await place.submit(task, stream=True)
            task.task_status = TaskStatus.RUNNING
            async with aclosing(place.events(handle, task.streaming)) as events:
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
    known = {field.name for field in dataclasses.fields(Task)} - {"surroundings", "task_status"}
    for name in fields.keys() - known:
        raise InvalidInput(name, f"is no field of Task; known are {', '.join(sorted(known))}")
    names: Any = tool_names  # Any: the task checks it
    return Task(input=input, agent=agent, swarm=swarm, tool_names=names, session_id=session_id, **fields)


def _tasks(task: object) -> list[Task]:
    if isinstance(task, Task):
        return [task]
    if isinstance(task, str) or not isinstance(task, Iterable):
        raise InvalidInput("task", f"{quoted(task)} is no Task and no list of them")
    return list(task)


def _check(tasks: Sequence[Task], concurrency: int, workers: int) -> None:
    for place, each in enumerate(tasks):
        if not isinstance(each, Task):
            raise InvalidInput(f"task.{place}", f"{each!r} is no Task")
    if not tasks:
        raise InvalidInput("task", "no task was given")
    first: dict[str, int] = {}
    for place, each in enumerate(tasks):
        if first.setdefault(each.id, place) != place:
            raise InvalidInput(
                f"task.{place}.id", f"{each.id!r} is also that of task.{first[each.id]}: give each its own"
            )
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidInput("concurrency", f"{concurrency!r} is not a whole number from 1 up")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise InvalidInput("workers", f"{workers!r} is not a whole number; 0 means as many as the engine has CPUs")


async def _run(place: RunPlace, task: Task) -> TaskResponse:
    began = time.monotonic()
    handle = await place.submit(task)
    task.task_status = TaskStatus.RUNNING
    response = await place.result(handle)
    task.task_status = TaskStatus.of(response)
    return dataclasses.replace(response, time_cost=time.monotonic() - began)


async def _run_all(place: RunPlace, tasks: Sequence[Task], concurrency: int) -> dict[str, TaskResponse]:
    room = asyncio.Semaphore(concurrency)
    stopped_by = ""

    async def one(task: Task) -> TaskResponse:
        nonlocal stopped_by
        async with room:
            if stopped_by:
                message = f"not begun, since task {stopped_by} failed and has conf.exit_on_failure"
                return TaskResponse(task.id, "cancelled", error={"type": "Cancelled", "message": message})
            try:
                response = await _run(place, task)
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


_REMEDY = """those run on 'local' or 'ray'; what Spark shall do is a step of theirs, as in ctx.engine("spark")"""


def _engine_of(tasks: Sequence[Task]) -> str:
    """Where the tasks' `conf.engine` wants all of them to run, without services."""
    wanted = [task.config.engine for task in tasks]
    if "spark" in wanted:
        raise InvalidInput("conf.engine", f"'spark' runs no whole tasks: {_REMEDY}, on services")
    for number, engine in enumerate(wanted):
        if engine != wanted[0]:
            raise InvalidInput(
                f"task.{number}.conf.engine",
                f"{engine!r}, and that of task.0 is {wanted[0]!r}: give all the same, or say engine= for all of them",
            )
    return wanted[0]


@asynccontextmanager
async def _run_place(
    tasks: Sequence[Task],
    *,
    client: Client | None,
    url: str | None,
    app: App | None,
    engine: str | None = None,
    workers: int = 0,
    at_once: int = 1,
) -> AsyncIterator[RunPlace]:
    """The place for these tasks: `client`'s, that of the broker at `url` or WEFT_REDIS_URL, or this process.

    With `engine="ray"` handlers in `workers` processes of Ray work there; `at_once` tasks are under way at once. None:
    as the tasks' `conf.engine` says, but on services, where it is only what `ctx.engine()` stands for.
    """
    services = bool(url or os.environ.get("WEFT_REDIS_URL"))
    if engine is None and client is None and not services:
        engine = _engine_of(tasks)
    elif engine not in (None, "local", "ray"):
        raise InvalidInput("engine", f"{quoted(engine)} runs no whole tasks: {_REMEDY}")
    if engine == "ray":
        from runtime_core.aworld.ray.place import ray_place  # here: it loads what only it needs

        async with ray_place(tasks, client=client, url=url, app=app, workers=workers, at_once=at_once) as place:
            yield place
    elif client is not None:
        yield RunPlace(client, app)
    elif services:
        async with Client.connect(url) as connected:
            yield RunPlace(connected, app)
    else:
        made = TasksApp(app)
        for task in tasks:
            made.take(task)
        async with LocalApp(made.app) as local:
            place = RunPlace(local, made.app, made.names)
            try:
                yield place
            except BaseException:
                # Nobody could have their answers: the place must not wait for them either.
                await place.give_up()
                raise
