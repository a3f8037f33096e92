"""Tasks and runners in this process: the durable runs that test_runners_killed.py checks on services."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.events.handlers import DefaultAgentHandler
from tests.integration.integrations.aworld.small_agents import add, broken, exclaim, failure, join, question, upper
from weft import AgentContext, App, Context, RetryPolicy, TaskResponse
from weft.aworld import (
    ActionModel,
    Message,
    Observation,
    Runner,
    Runners,
    Swarm,
    Task,
    TaskRunner,
    TaskStatus,
)
from weft.errors import InvalidInput, Rejected, ToolError
from weft.hooks import HookEvent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


# ---- Runners -------------------------------------------------------------------------------------------------


async def test_an_agent_runs_by_one_call() -> None:
    response = await Runners.run("hi", agent=upper)
    assert (response.answer, response.success, response.time_cost > 0) == ("HI", True, True)


async def test_several_tasks_give_their_responses_by_id_and_a_failing_one_touches_only_itself() -> None:
    tasks = [Task(id=f"t{n}", input=str(n), agent=broken if n == 3 else exclaim) for n in range(8)]
    found = await Runners.run_task(tasks, concurrency=3)
    assert list(found) == [f"t{n}" for n in range(8)]
    assert [response.answer for response in found.values()] == [f"{n}!" if n != 3 else None for n in range(8)]
    assert failure(found["t3"]) == ("ValueError", "no 3")


async def test_tasks_after_one_that_must_not_fail_do_not_start() -> None:
    tasks = [
        Task(id="a", agent=broken, input="x", conf={"exit_on_failure": True}),
        Task(id="b", agent=upper, input="x"),
    ]
    found = await Runners.run_task(tasks, concurrency=1)
    assert [each.status for each in found.values()] == ["failed", "cancelled"]
    assert "task a failed" in found["b"].msg


async def test_no_more_tasks_run_than_allowed() -> None:
    under_way, most = 0, 0

    async def counted(ctx: AgentContext, text: str) -> str:
        async def work() -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

        await ctx.step(work)
        return text

    await Runners.run_task([Task(input="x", agent=counted) for _ in range(12)], concurrency=2)
    assert 1 <= most <= 2


async def test_cancelling_a_caller_cancels_its_tasks() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def busy(ctx: AgentContext, text: str) -> str:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return text

    async with asyncio.timeout(60):
        run = asyncio.create_task(Runners.run_task([Task(input="x", agent=busy), Task(input="y", agent=sleeper)]))
        await begun.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert stopped.is_set()


async def test_leaving_a_stream_cancels_its_task() -> None:
    stopped = asyncio.Event()

    async def busy(ctx: AgentContext, text: str) -> str:
        await ctx.emit("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return text

    async with asyncio.timeout(60), contextlib.aclosing(Runners.streaming_run("x", agent=busy)) as events:
        async for event in events:
            if event.text == "begun":
                break
    assert stopped.is_set()


def test_code_without_a_loop_runs_tasks() -> None:
    assert Runners.sync_run("hi", agent=upper).answer == "HI"
    task = Task(input="hi", agent=exclaim)
    assert Runners.sync_run_task(task)[task.id].answer == "hi!"


async def test_invalid_tasks_and_runners_are_named() -> None:
    task: Any = Task(id="one", input="hi", agent=upper)
    given: tuple[tuple[Any, str], ...] = (
        (None, "^task: null is neither a Task nor a list of them"),
        ("one", '^task: "one" is neither a Task nor a list of them'),
        ([task, 3], r"^task\.1: 3 is not a Task"),
        ([task, Task(id="two", agent=upper), task], r"^task\.2\.id: 'one' is also the id of task\.0"),
        (Task(agent=upper, runner_cls=dict), "^runner_cls: <class 'dict'> is not a subclass of Runner"),
    )
    for wrong, named in given:
        with pytest.raises(InvalidInput, match=named):
            await Runners.run_task(wrong)


async def test_sync_run_works_inside_a_running_loop_too() -> None:
    assert Runners.sync_run("hi", agent=upper).answer == "HI"
    with pytest.raises(InvalidInput, match=r"^wrong: is not a field of Task"):
        Runners.sync_run("hi", agent=upper, wrong=1)
    tasks = [Task(id="a", input="hi", agent=exclaim), Task(id="b", input="x", agent=broken)]
    found = Runners.sync_run_task(tasks)
    assert found["a"].answer == "hi!"
    assert failure(found["b"]) == ("ValueError", "no x")
    assert [task.task_status for task in tasks] == [TaskStatus.SUCCESS, TaskStatus.FAILED]
    with pytest.raises(InvalidInput, match=r"^concurrency: 0 is not"):
        Runners.sync_run_task(tasks, concurrency=0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(agent="nobody"), "agent: no agent is named 'nobody'"),
        (Task(swarm=Swarm(upper, "nobody")), "swarm: no agent is named 'nobody'"),
        (Task(swarm="nobody"), "swarm: no agent is named 'nobody'"),
        (
            Task(agent=upper, hooks={"start": ["a"]}),
            "hooks.start.0: the app has no hook 'a' at task_created; it has none",
        ),
        (Task(agent=5), "agent: 5 is not an agent: pass async def"),
        (Task(agent=upper, tools=[5]), "tools: 5 is not a tool"),
        (
            Task(agent=upper, tools=[add], tools_conf={"add": {}, "ad": {}}),
            "tools_conf.ad: no tool is named 'ad'; choose from add",
        ),
        (Task(agent=upper, runner_cls="no.such.Runner"), "runner_cls: 'no.such.Runner' cannot be found"),
        (Task(agent=upper, runner_cls="Nowhere"), "runner_cls: no runner is named 'Nowhere'"),
        (Task(agent=upper, runner_cls="asyncio.Queue"), "runner_cls: 'asyncio.Queue' is not a subclass of Runner"),
    ],
)
async def test_an_unknown_name_in_a_task_is_one_clear_error(task: Task, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await Runners.run_task(task)
    assert str(caught.value).startswith(message)


async def test_a_task_without_an_agent_is_refused_unless_its_runner_needs_none() -> None:
    for agentless in (TaskRunner, None):
        with pytest.raises(InvalidInput, match=r"agent: task .* has neither an agent nor a swarm"):
            await Runners.run("hi", runner_cls=agentless)

    class Alone(Runner):
        async def do_run(self, context: object = None) -> TaskResponse:
            return TaskResponse(self.task.id, "completed", self.observation.content)

    class Lost(TaskRunner):
        pass

    assert (await Runners.run("hi", runner_cls=Alone)).output == "hi"
    found = await Runners.run("hi", runner_cls=Lost)
    assert failure(found)[0] == "InvalidInput"
    assert "neither an agent nor a swarm" in found.msg


async def test_two_apps_that_declare_the_same_runner_may_be_joined() -> None:
    one, other = App("one"), App("other")
    for app in (one, other):
        app.add_runner(TaskRunner)
        app.add_runner(Phases)
    one.include(other)
    response = await Runners.run("x", agent=upper, app=one)
    assert response.answer == "X"


# ---- the weaknesses that other runtimes have -----------------------------------------------------------------


async def test_the_output_of_a_runner_arrives_in_order() -> None:
    class Emits(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            for number in range(8):
                await self.ctx.emit(number)
            return TaskResponse(self.task.id, "success")

    events = [event async for event in Runners.streaming_run_task(Task(runner_cls=Emits))]
    assert [event.data.get("value") for event in events[:-1]] == list(range(8))


async def test_a_task_is_retried_as_often_as_configured() -> None:
    calls: list[str] = []

    class Flaky:
        async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
            calls.append(str(observation.content))
            if len(calls) < 3:
                raise ValueError("not yet")
            return [ActionModel(policy_info="done")]

    assert (await Runners.run("x", agent=Flaky(), max_retry_count=3)).answer == "done"
    assert len(calls) == 3
    calls.clear()
    response = await Runners.run("x", agent=Flaky(), max_retry_count=1)
    assert (failure(response), len(calls)) == (("ValueError", "not yet"), 2)
    calls.clear()
    assert not (await Runners.run("x", agent=Flaky())).success
    assert len(calls) == 1


@pytest.mark.parametrize("status", ["cancelled", "interrupted"])
async def test_a_runner_that_cancels_its_task_is_not_retried(status: str) -> None:
    tries: list[str] = []

    class Stops(Runner):
        async def do_run(self, context: object = None) -> TaskResponse:
            tries.append(self.task.id)
            return TaskResponse(task_id=self.task.id, status=status, msg="enough")

    task = Task(id="stops", runner_cls=Stops, max_retry_count=3)
    response = (await Runners.run_task(task))["stops"]
    assert (response.status, failure(response), tries) == ("cancelled", ("Cancelled", "enough"), ["stops"])
    assert task.task_status == "cancelled"


async def test_a_runner_that_reports_a_failure_is_retried_too() -> None:
    class Second(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            tried = self.ctx.state.setdefault("tried", [])
            tried.append(1)
            return TaskResponse(self.task.id, "success" if len(tried) == 2 else "failed", len(tried))

    assert (await Runners.run("x", runner_cls=Second, max_retry_count=5)).answer == 2


async def test_an_error_that_would_repeat_is_not_retried() -> None:
    class Checks(TaskRunner):
        async def pre_run(self) -> None:
            await super().pre_run()

    response = await Runners.run("", runner_cls=Checks, conf={"check_input": True}, max_retry_count=1000)
    assert failure(response)[0] == "InvalidInput"


async def last_of(task: Task) -> TaskResponse:
    async with asyncio.timeout(60):
        events = [event async for event in Runners.streaming_run_task(task)]
    response = events[-1].response
    assert response is not None
    assert [event for event in events if event.response is not None] == events[-1:]
    return response


async def sleeper(ctx: AgentContext, text: str) -> str:
    await ctx.emit("begun")
    await ctx.sleep(600)
    return text


async def test_a_stream_ends_at_the_time_limit() -> None:
    response = await last_of(Task(input="x", agent=sleeper, timeout=0.2))
    assert failure(response)[0] == "TimeLimit"


async def test_a_stream_ends_when_the_task_is_cancelled() -> None:
    app = App("cancels")
    app.agent("sleeper")(sleeper)
    app.add_runner(TaskRunner)
    async with LocalApp(app) as client, asyncio.timeout(60):
        seen = []
        async for event in Runners.streaming_run("x", agent="sleeper", client=client, id="c-1"):
            seen.append(event)
            if event.text == "begun":
                await (await client.task("c-1")).cancel()
    assert (seen[-1].type, seen[-1].response is not None) == ("weft.task.cancelled", True)


async def test_a_stream_ends_when_pre_run_or_the_creation_of_the_runner_fails() -> None:
    class FailsFirst(TaskRunner):
        async def pre_run(self) -> None:
            raise ValueError("not prepared")

    class FailsAtOnce(TaskRunner):
        def __init__(self, task: Task) -> None:
            raise ValueError("not made")

    assert failure(await last_of(Task(input="x", agent=upper, runner_cls=FailsFirst))) == ("ValueError", "not prepared")
    assert failure(await last_of(Task(input="x", agent=upper, runner_cls=FailsAtOnce))) == ("ValueError", "not made")


class Remembers:
    """Keeps its input in itself, and answers with that after it has called a tool."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def async_policy(self, observation: Observation, info: object = None, **kwargs: object) -> list[ActionModel]:
        self.told.append(observation.content)
        if observation.action_result:
            return [ActionModel(policy_info=self.told)]
        return [ActionModel(tool_name="add", params={"a": observation.content, "b": 1})]


async def test_tasks_that_share_an_agent_object_do_not_see_each_others_data() -> None:
    agent = Remembers()
    found = await Runners.run_task([Task(id=f"t{n}", input=n, agent=agent, tools=[add]) for n in range(5)])
    assert [response.answer for response in found.values()] == [[n, n + 1] for n in range(5)]
    assert agent.told == []


async def test_an_agent_object_may_have_slots() -> None:
    class Slots:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
            self.calls += 1
            if observation.action_result:
                return [ActionModel(policy_info=self.calls)]
            return [ActionModel(tool_name="add", params={"a": 1, "b": 1})]

    agent = Slots()
    assert (await Runners.run("x", agent=agent, tools=[add])).answer == 2
    assert agent.calls == 0


async def test_a_failing_member_ends_its_group_with_an_error_that_names_it() -> None:
    swarm = Swarm([exclaim, broken, (upper, broken)], join)
    response = await Runners.run("x", swarm=swarm)
    assert failure(response) == (
        "GroupFailed",
        "2 of 3 members failed: broken: ValueError: no x; broken: ValueError: no X",
    )


async def test_an_object_with_a_step_method_may_be_a_tool() -> None:
    class Calculator:
        name = "calculator"

        async def step(self, args: dict[str, Any]) -> dict[str, int]:  # Any: JSON
            return {"sum": args["a"] + args["b"]}

    class Plain:
        def step(self, args: object) -> object:
            return args

    class Uses(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            tool = self.tools["calculator"]
            sum = await tool.step({"a": 1, "b": 2})
            return TaskResponse(
                self.task.id, content=[sum, await self.tools["Plain"].step({"x": 1}), sorted(self.tools)]
            )

    tools = [Calculator(), Plain(), add]
    response = await Runners.run("x", agent=upper, tools=tools, runner_cls=Uses)
    assert response.answer == [{"sum": 3}, {"x": 1}, ["Plain", "add", "calculator"]]

    class Asks:
        def policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
            if observation.action_result:
                return [ActionModel(policy_info=[result.content for result in observation.action_result])]
            return [ActionModel(tool_name="calculator", params={"a": 1, "b": n}) for n in range(3)]

    response = await Runners.run("x", agent=Asks(), tools=[Calculator()])
    assert response.answer == [{"sum": 1}, {"sum": 2}, {"sum": 3}]


# ---- runners -------------------------------------------------------------------------------------------------


class Phases(Runner):
    """Reports its calls through the stream, and does what the input says."""

    async def pre_run(self) -> None:
        await self.ctx.emit("pre")

    async def do_run(self, context: object = None) -> TaskResponse | None:
        await self.ctx.emit("do")
        if self.observation.content == "raise":
            raise ValueError("in do_run")
        return None

    async def post_run(self) -> None:
        await self.ctx.emit("post")
        if self.observation.content == "post":
            raise ValueError("in post_run")


async def test_a_runner_is_named_by_any_module_that_has_its_class() -> None:
    assert (await Runners.run("x", agent=upper, runner_cls="weft.aworld.TaskRunner")).answer == "X"


async def test_a_runner_without_a_response_answers_with_its_messages() -> None:
    class Silent(TaskRunner):
        async def do_run(self, context: Any = None) -> None:
            for message in await self.first_messages():
                await self.event_manager.emit_message(message)
            await self._do_run()

    assert (await Runners.run("hi", agent=upper, runner_cls=Silent)).answer == "HI"


class RaisingRunner(TaskRunner):
    async def do_run(self, context: object = None) -> TaskResponse:
        raise KeyError("of the runner")


class RaisingHandler(DefaultAgentHandler):
    async def ask(self, message: Message) -> object:
        raise KeyError("of the handler")


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("where", ["runner", "handler", "hook"])
async def test_an_error_of_the_users_code_ends_the_task_and_its_traceback_is_in_the_log(
    where: str, recorded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("raises")
    app.handlers["raising"] = RaisingHandler

    @app.hook("start")
    def raising(event: HookEvent) -> None:
        raise KeyError("of the hook")

    task = Task(
        hooks={"start": ["raising"]} if where == "hook" else {},
        input="x",
        agent=upper,
        runner_cls=RaisingRunner if where == "runner" else None,
        conf={"handlers": {"agent": "raising"}} if where == "handler" else None,
    )
    response = (await Runners.run_task(task, app=app, trajectory=recorded))[task.id]
    assert f"of the {where}" in response.msg
    assert response.error is not None
    assert f'raise KeyError("of the {where}")' in response.error["traceback"]
    logged = [getattr(record, "fields", {}).get("traceback", "") for record in caplog.records]
    assert any(f'raise KeyError("of the {where}")' in each for each in logged)
    # Also with a formatter that does not know Weft's fields.
    assert any(f'raise KeyError("of the {where}")' in record.getMessage() for record in caplog.records)


async def test_without_a_record_the_traceback_is_that_of_the_error_that_ended_the_task() -> None:
    def first(x: str) -> str:
        raise TypeError("first")  # a defect, so it is not tried again

    async def catches(ctx: AgentContext, x: str) -> None:
        with contextlib.suppress(ToolError):
            await ctx.tool(first, x=x)
        raise ValueError("second")

    class Says(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            with contextlib.suppress(ToolError):
                await self.ctx.tool("first", x="x")
            return TaskResponse(self.task.id, status="failed", msg="no more")

    response = await Runners.run("x", agent=catches, tools=[first], trajectory=False)
    assert response.error is not None
    assert 'raise ValueError("second")' in response.error["traceback"]
    response = await Runners.run("x", agent=catches, tools=[first], runner_cls=Says, trajectory=False)
    assert response.error == {"type": "TaskFailed", "message": "no more"}


async def test_an_invalid_sub_task_is_named() -> None:
    class Confused(Runner):
        async def do_run(self, context: Any = None) -> TaskResponse:
            wrong: Any = "hi"
            return await self.run_sub_task(wrong)

    response = await Runners.run("hi", agent=upper, runner_cls=Confused)
    assert failure(response) == ("InvalidInput", "task: 'hi' is not a Task")


async def test_a_runner_runs_sub_tasks() -> None:
    class Parts(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            good = Task(input="x", agent="upper")
            bad = Task(input="x", swarm=Swarm("exclaim", "broken"))
            found = await self.ctx.gather(self.run_sub_task(good), self.run_sub_task(bad))
            return TaskResponse(self.task.id, content=[[each.answer, each.msg] for each in found])

    app = App("parts")
    app.agent("upper")(upper)
    app.agent("exclaim")(exclaim)
    app.agent("broken", retry=RetryPolicy(attempts=1))(broken)
    response = await Runners.run("x", runner_cls=Parts, app=app)
    assert response.value() == [["X", ""], [None, "no x!"]]

    class Late(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            return await self.run_sub_task(Task(timeout=1))

    assert failure(await Runners.run("x", runner_cls=Late, app=app))[1].startswith("timeout: a sub-task has the time")


@pytest.mark.parametrize("detached", ["sub-task", "agent"])
async def test_detached_work_outlives_its_task(detached: str) -> None:
    class Starts(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            if detached == "agent":
                started = await self.swarm.ordered_agents[0].run("x", detach=True)
            else:
                started = await self.run_sub_task(Task(input="x", agent="asks", name="child"), detach=True)
            await self.ctx.emit(started)
            await self.ctx.human("go on?")
            return TaskResponse(self.task.id)

    app = App("starts")

    @app.agent("asks")
    async def asks(ctx: AgentContext, text: str) -> str:
        return f"{text}: {await ctx.human('well?')}"

    app.add_runner(Starts)
    app.add_runner(TaskRunner)
    async with LocalApp(app) as client:
        parent = await client.submit("weft.task.Starts", {"id": "parent", "runner": "Starts", "agent": "asks"})
        async for event in parent.stream():
            if event.text:
                child = await client.task(event.text)
            if event.type == "weft.human.requested":
                await parent.cancel()
        assert (await parent.result(timeout=60)).status == "cancelled"
        async for event in child.stream():
            if event.type == "weft.human.requested":
                await child.signal(event.data["request_id"], "yes")
        assert (await child.result(timeout=60)).answer == "x: yes"


async def test_a_runner_and_its_agents_share_a_context() -> None:
    async def adds(ctx: AgentContext, text: str) -> str:
        ctx.context.put("seen", [*ctx.context.get("seen", []), text])
        return text

    class Shares(TaskRunner):
        async def do_run(self, context: Context) -> TaskResponse:  # type: ignore[override]  # as printed in many places
            await self.swarm.ordered_agents[0].run("one")
            await self.swarm.ordered_agents[0].run("two")
            return TaskResponse(self.task.id, content=[context.get("seen"), self.context.get("user")])

    task = Task(agent=adds, runner_cls=Shares, context={"seen": ["zero"], "user": "u"})
    response = (await Runners.run_task(task))[task.id]
    assert response.value() == [["zero", "one", "two"], "u"]


# ---- events --------------------------------------------------------------------------------------------------


async def test_questions_and_answers_of_a_swarm_are_messages_in_order() -> None:
    class Looks(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            await super().do_run(context)
            way = [[each.category, each.sender, each.receiver] for each in self.event_manager.messages]
            return TaskResponse(self.task.id, content=way)

    response = await Runners.run("x", swarm=Swarm(upper, [exclaim, question], join), runner_cls=Looks)
    assert response.value() == [
        ["agent", "task", "upper"],
        ["agent", "upper", "weft.swarm"],
        ["agent", "exclaim, question", "join"],
        ["agent", "join", "weft.swarm"],
        ["task", "weft.swarm", ""],
    ]


async def test_a_task_chooses_handlers_of_its_app() -> None:
    from weft.aworld import Handler

    class Polite(DefaultAgentHandler):
        async def ask(self, message: Message) -> object:
            return await super().ask(message.replace(payload=f"please, {message.payload}"))

    app = App("handlers")
    app.handlers["polite"] = Polite
    assert issubclass(Polite, Handler)
    chosen = await Runners.run("x", agent=upper, app=app, conf={"handlers": {"agent": "polite"}})
    assert (chosen.answer, (await Runners.run("x", agent=upper, app=app)).answer) == ("PLEASE, X", "X")
    with pytest.raises(InvalidInput, match=r"conf\.handlers\.agent: the app has no handler 'rude'; .* has polite"):
        await Runners.run("x", agent=upper, app=app, conf={"handlers": {"agent": "rude"}})


async def test_a_task_shows_its_progress() -> None:
    tasks = [
        Task(input="x", agent=upper),
        Task(input="x", agent=broken),
        Task(input="x", agent=sleeper, timeout=0.1),
    ]
    assert [task.task_status for task in tasks] == ["init"] * 3
    await Runners.run_task(tasks)
    assert [task.task_status for task in tasks] == ["success", "failed", "timeout"]
    async for _ in Runners.streaming_run_task(again := Task(input="x", agent=upper)):
        assert again.task_status in ("running", "success")
    assert again.task_status == "success"


async def test_hooks_that_a_task_names_run_around_it() -> None:
    app = App("hooked")
    seen: list[tuple[str, str]] = []

    @app.hook("start")
    def init_logging(event: HookEvent) -> None:
        seen.append(("start", event.point))

    @app.hook("error")
    def send_alert(event: HookEvent) -> None:
        assert event.error is not None
        seen.append(("error", event.error["message"]))

    hooks = {"start": ["init_logging"], "error": ["send_alert"]}
    response = await Runners.run("x", agent=broken, app=app, hooks=hooks)
    assert failure(response) == ("ValueError", "no x")
    assert seen == [("start", "task_created"), ("error", "no x")]
    with pytest.raises(InvalidInput, match=r"^hooks.start.0: the app has no hook 'nothing' .* it has init_logging"):
        await Runners.run("x", agent=upper, app=app, hooks={"start": ["nothing"]})
    app.agent("loud")(upper)
    app.add_runner(TaskRunner)
    async with LocalApp(app) as client:  # the namespace refuses it, as on services
        with pytest.raises(Rejected, match=r"^hooks.start: app 'hooked' has no hook 'nothing' .* init_logging"):
            await Runners.run("x", agent="loud", client=client, hooks={"start": ["nothing"]})
