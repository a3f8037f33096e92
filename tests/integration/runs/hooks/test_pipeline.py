"""Hooks and callbacks of an app: their events, changes, denials and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from runtime_core.consumer.announcements import announce
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.declare.manifest import HookPoint
from runtime_core.errors import ConfigurationError, Denied, InvalidInput, Reject, Rejected, StepError, ToolError
from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.runs.hooks.declared import (
    Allow,
    Ask,
    CallbackResult,
    CallbackResultType,
    Change,
    Deny,
    HookEvent,
    ToolResult,
)
from runtime_core.state_manager.dead_letters import DeadLetters
from tests.fleet import until
from weft import AgentContext, App, Client, SubmitOptions, TaskHandle

Json = Any  # JSON of many shapes


def desk() -> App:
    """An app with one agent that uses a tool, streams and asks a model."""
    app = App("desk")

    @app.tool
    def search(query: str, action: str = "") -> str:
        if query == "nothing":
            raise Reject("found nothing")
        return f"found {query}"

    @app.agent("researcher")
    async def researcher(ctx: AgentContext, topic: str) -> str:
        found: str = await ctx.tool(search, query=topic)
        await ctx.emit(f"about {topic}")
        return f"{topic}: {found}"

    @app.agent("editor")
    async def editor(ctx: AgentContext, topic: str) -> str:
        return f"edited {await ctx.agent('researcher', topic)}"

    return app


async def run(app: App, agent: str, input: Json, hooks: Mapping[str, list[str]] | None = None) -> Json:
    """Return the answer of one task, or raise TaskFailed."""
    async with LocalApp(app) as client:
        task = await client.submit(agent, input, options=SubmitOptions(hooks=hooks))
        return (await task.result(timeout=60)).value()


async def ended(client: Client, agent: str, input: Json, **options: Any) -> tuple[str, Json, list[str]]:
    """Return a task's status, its output or its error's type and message, and its deltas."""
    task = await client.submit(agent, input, stream=True, **options)
    deltas = [event.text async for event in task.stream() if event.type == "weft.output.delta"]
    response = await task.result(timeout=60)
    return response.status, response.output if response.error is None else dict(response.error), deltas


async def question(task: TaskHandle) -> dict[str, Json]:
    """Return the first question of a task."""
    async for event in task.stream():
        if event.type == "weft.human.requested":
            return event.data
    raise AssertionError("the task ended without a question")


async def test_the_points_of_a_task_fire_in_order_around_it_and_around_each_agent() -> None:
    app, seen = desk(), []
    for point in HookPoint:

        @app.hook(point, name="note", always=True)
        def note(event: HookEvent) -> None:
            seen.append((str(event.point), event.run_id, event.name))

    assert await run(app, "editor", "streams") == "edited streams: found streams"
    assert seen == [
        ("task_created", "r", "editor"),
        ("session_started", "r", ""),
        ("user_input_received", "r", "editor"),
        ("pre_task_call", "r", "editor"),
        ("agent_started", "r", "editor"),
        ("agent_started", "r/6", "researcher"),
        ("before_tool_call", "r/6", "search"),
        ("after_tool_call", "r/6", "search"),
        ("output_process", "r/6", "emit"),
        ("agent_stopped", "r/6", "researcher"),
        ("agent_stopped", "r", "editor"),
        ("post_task_call", "r", "editor"),
        ("output_process", "r", "output"),
        ("task_completed", "r", "editor"),
        ("session_finished", "r", ""),
    ]


async def test_hooks_of_a_failed_task_get_the_error_once_after_the_last_attempt() -> None:
    app, seen = App("fails"), []
    points = ("agent_stopped", "post_task_call", "task_failed", "session_failed", "task_completed", "session_finished")
    for point in points:

        @app.hook(point, name="note", always=True)
        def note(event: HookEvent) -> None:
            assert event.error is not None
            seen.append((str(event.point), event.attempt, event.error["message"]))

    @app.agent("agent", retry=RetryPolicy(attempts=2, base_seconds=0.001))
    async def agent(ctx: AgentContext) -> None:
        await ctx.step(str)
        raise ValueError(f"attempt {ctx.attempt}")

    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("agent")
        assert (await task.result(timeout=60)).status == "failed"
        recorded = await local.recorded(task.task_id)
    assert seen == [(point, 2, "attempt 2") for point in points[:4]]
    assert [step.name for step in recorded.steps if step.kind == "hook"] == ["note"]


async def test_the_older_names_of_points_work_in_the_app_and_in_the_submit() -> None:
    app, seen = App("older"), []

    @app.hook("start")
    def init_logging(event: HookEvent) -> None:
        seen.append("init_logging")

    @app.hook("start")
    class init_context:  # named as the submit names it
        async def exec(self, event: HookEvent) -> None:
            seen.append("init_context")

    @app.hook("error")
    async def handle_error(event: HookEvent) -> None:
        assert event.error is not None
        seen.append(f"handle_error {event.error['type']}")

    @app.hook("task_failed")
    async def send_alert(event: HookEvent) -> None:
        seen.append("send_alert")

    @app.agent("agent")
    async def agent(ctx: AgentContext) -> None:
        raise Reject("no")

    hooks = {"start": ["init_logging", "init_context"], "error": ["handle_error", "send_alert"]}
    async with LocalApp(app) as client:
        assert (await ended(client, "agent", None, options=SubmitOptions(hooks=hooks)))[0] == "failed"
    assert seen == ["init_logging", "init_context", "handle_error Reject", "send_alert"]


async def test_only_named_hooks_run_and_they_reach_called_agents() -> None:
    app, seen = desk(), []

    @app.hook("before_tool_call")
    def watch(event: HookEvent) -> None:
        seen.append((event.agent, event.payload["query"], event.session_id, event.metadata))

    async with LocalApp(app) as client:
        await ended(client, "editor", "a")
        assert seen == []
        hooks = {"before_tool_call": ["watch"]}
        await ended(client, "editor", "b", session_id="s", options=SubmitOptions(hooks=hooks, metadata={"order": 7}))
    assert seen == [("researcher", "b", "s", {"order": 7})]


async def test_named_hooks_reach_an_agent_called_after_a_wait() -> None:
    """A resume event has no context, so the run must keep the task's."""
    app, seen = desk(), []

    @app.hook("before_tool_call")
    def watch(event: HookEvent) -> None:
        seen.append(event.run_id)

    @app.agent("late")
    async def late(ctx: AgentContext) -> str:
        await ctx.sleep(0.001)
        answer: str = await ctx.agent("researcher", "x")
        return answer

    await run(app, "late", None, {"before_tool_call": ["watch"]})
    assert len(seen) == 1
    assert seen[0].startswith("r/")


async def test_changes_compose_in_order() -> None:
    app = desk()

    @app.hook("before_tool_call", order=2, always=True)
    def second(event: HookEvent) -> Change:
        return Change({**event.payload, "query": event.payload["query"] + "2"})

    @app.hook("before_tool_call", order=1, always=True)
    def first(event: HookEvent) -> Change:
        event.payload["query"] += "1"
        return Change(event.payload)

    @app.hook("before_tool_call", order=3, always=True)
    def sees_both(event: HookEvent) -> Allow:
        event.payload["query"] = "changed in place, which changes nothing"
        return Allow()

    @app.hook("after_tool_call", always=True)
    def result(event: HookEvent) -> Change:
        assert event.input == {"query": "q12"}
        return Change(event.payload.upper())

    @app.hook("user_input_received", always=True)
    def shorter(event: HookEvent) -> Change:
        return Change(event.payload[:1])

    @app.hook("output_process", always=True)
    def redact(event: HookEvent) -> Change:
        return Change(f"<{event.payload}>")

    async with LocalApp(app) as client:
        assert await ended(client, "researcher", "quite long") == ("completed", "<q: FOUND Q12>", ["<about q>"])


@pytest.mark.parametrize("point", ["task_created", "agent_started", "before_tool_call", "output_process"])
async def test_a_denial_ends_the_denied_action_with_the_reason(point: str) -> None:
    app = desk()

    @app.hook(point, always=True)
    def never(event: HookEvent) -> Deny:
        return Deny("not today")

    async with LocalApp(app) as client:
        status, error, deltas = await ended(client, "researcher", "x")
    assert (status, error["type"]) == ("failed", "Denied")
    assert error["message"] == f"hook 'never' at {point}: not today"
    assert deltas == []


async def test_an_agent_may_continue_after_a_denial_and_the_tool_is_not_called() -> None:
    app, calls = App("goes_on"), []

    @app.tool
    def erase(path: str) -> str:
        calls.append(path)
        return "gone"

    @app.hook("before_tool_call", always=True, guard=True)
    def only_temporary(event: HookEvent) -> Deny | None:
        return None if event.payload["path"].startswith("tmp") else Deny("outside of tmp")

    @app.agent("cleaner")
    async def cleaner(ctx: AgentContext, paths: list[str]) -> list[str]:
        answers = await ctx.gather(*(ctx.tool(erase, path=path) for path in paths), return_exceptions=True)
        return [answer if isinstance(answer, str) else type(answer).__name__ for answer in answers]

    assert await run(app, "cleaner", ["tmp/a", "home", "tmp/b"]) == ["gone", "Denied", "gone"]
    assert sorted(calls) == ["tmp/a", "tmp/b"]


def raises(event: HookEvent) -> None:
    raise OSError("no disk")


async def hangs(event: HookEvent) -> None:
    await asyncio.Event().wait()


def talks(event: HookEvent) -> str:
    return "fine"


def wrong_shape(event: HookEvent) -> Change:
    return Change("no object")


def unspeakable(event: HookEvent) -> Change:
    return Change({"query": object()})


def rejects(event: HookEvent) -> None:
    raise Reject("no")


FAILURES = {
    raises: "no disk",
    hangs: "timeout_seconds",
    talks: "return None, Allow",
    wrong_shape: "must be an object",
    unspeakable: "object",
    rejects: "return Deny",
}


TYPES = {raises: "OSError", hangs: "TimeoutError", talks: "TypeError", rejects: "RuntimeError"}


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
async def test_a_guard_that_fails_denies_and_another_hook_that_fails_ends_its_run(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 0.05 if function is hangs else 60.0
    for guard in (True, False):
        app = desk()
        app.hook("before_tool_call", name="broken", always=True, guard=guard, timeout_seconds=limit)(function)
        local = LocalApp(app, trajectory=True)
        async with local as client:
            task = await client.submit("researcher", "x")
            response = await task.result(timeout=60)
            recorded = await local.recorded(task.task_id)
            shown = local.metrics.exposition().decode()
        assert response.error is not None
        assert response.error["type"] == ("Denied" if guard else TYPES.get(function, "InvalidInput"))
        assert response.error["message"].startswith("hook 'broken' at before_tool_call ")
        assert FAILURES[function] in response.error["message"]
        if function is raises:
            logged = [getattr(record, "fields", {}).get("traceback", "") for record in caplog.records]
            assert any('raise OSError("no disk")' in each for each in logged) is not guard
        [row] = [step for step in recorded.steps if step.kind == "hook"]
        assert (row.name, row.status) == ("broken", "failed")
        assert row.error is not None
        assert FAILURES[function] in row.error.message
        assert 'weft_hook_failures_total{point="before_tool_call",service="local"} 1.0' in shown


async def test_a_verdict_after_the_event_is_reported_as_a_failure() -> None:
    app = desk()

    @app.hook("tool_call_failed", always=True, guard=True)
    def too_late(event: HookEvent) -> Deny:
        assert event.error == {"type": "Reject", "message": "found nothing"}
        assert event.payload == {"query": "nothing"}
        return Deny("no")

    local = LocalApp(app)
    async with local as client:
        status, error, _ = await ended(client, "researcher", "nothing")
        assert (
            'weft_hook_failures_total{point="tool_call_failed",service="local"} 1.0'
            in local.metrics.exposition().decode()
        )
    assert (status, error["type"]) == ("failed", "Reject")


async def test_a_model_call_runs_its_hooks_and_runs_once() -> None:
    app, asked = App("model"), []

    async def complete(request: dict[str, str]) -> dict[str, str]:
        asked.append(request)
        return {"text": f"answer to {request['prompt']}"}

    @app.hook("pre_llm_call")
    def safer(event: HookEvent) -> Change:
        assert event.name == "small"
        return Change({"prompt": event.payload["prompt"] + ", please"})

    @app.hook("post_llm_call")
    def shout(event: HookEvent) -> Change:
        return Change({"text": event.payload["text"].upper()})

    @app.agent("agent")
    async def agent(ctx: AgentContext) -> Json:
        return await ctx.model("small", {"prompt": "help"}, complete)

    hooks = {"before_llm_call": ["safer"], "post_llm_call": ["shout"]}
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("agent", options=SubmitOptions(hooks=hooks))
        assert (await task.result(timeout=60)).value() == {"text": "ANSWER TO HELP, PLEASE"}
        rows = (await local.recorded(task.task_id)).steps
        assert [(row.kind, row.name) for row in rows if row.step] == [
            ("hooks", "selection"),
            ("hook", "safer"),
            ("model", "small"),
            ("hook", "shout"),
        ]
        assert (await (await client.submit("agent")).result(timeout=60)).value() == {"text": "answer to help"}
    assert asked == [{"prompt": "help, please"}, {"prompt": "help"}]


async def test_hooks_run_at_points_that_an_agent_defines() -> None:
    app = App("own")

    @app.hook("before_context_compact")
    def keep_the_first(event: HookEvent) -> Change:
        return Change(event.payload[:1])

    @app.agent("agent")
    async def agent(ctx: AgentContext) -> Json:
        return await ctx.hook("before_context_compact", ["a", "b"], name="history")

    async with LocalApp(app) as client:
        assert (await ended(client, "agent", None))[1] == ["a", "b"]
        assert (
            await ended(
                client, "agent", None, options=SubmitOptions(hooks={"before_context_compact": ["keep_the_first"]})
            )
        )[1] == ["a"]


async def test_a_human_decides_if_a_hook_asks() -> None:
    app = desk()

    @app.hook("before_tool_call", always=True, guard=True)
    def expensive(event: HookEvent) -> Ask | None:
        return Ask(f"Call {event.name}?") if event.payload["query"] != "cheap" else None

    async with LocalApp(app) as client:
        assert (await ended(client, "researcher", "cheap"))[:2] == ("completed", "cheap: found cheap")
        answers: list[tuple[Json, str, str]] = [
            (True, "completed", "x: found x"),
            ({"verdict": "approve"}, "completed", "x: found x"),
            ({"verdict": "edit", "value": {"query": "y"}}, "completed", "x: found y"),
            ({"verdict": "deny", "reason": "too dear"}, "failed", "asked a human, who refused: too dear"),
            (False, "failed", "asked a human, who refused"),
            ({"verdict": "edit", "value": "y"}, "failed", "not an object"),
        ]
        for answer, status, text in answers:
            task = await client.submit("researcher", "x")
            asked = await question(task)
            assert asked["prompt"] == "Call search?"
            assert asked["data"] == {
                "hook": "expensive",
                "point": "before_tool_call",
                "name": "search",
                "payload": {"query": "x"},
            }
            await task.signal(asked["request_id"], answer)
            response = await task.result(timeout=60)
            assert response.status == status
            assert text in (response.output if response.error is None else response.error["message"])


@pytest.mark.parametrize(("default", "status"), [(True, "completed"), (False, "failed"), (..., "failed")])
async def test_an_unanswered_hook_question_gets_its_default_or_is_a_denial(default: Any, status: str) -> None:
    app = desk()

    @app.hook("before_tool_call", always=True)
    def ask(event: HookEvent) -> Ask:
        return Ask("May I?", timeout=0.01, default=default)

    async with LocalApp(app) as client:
        assert (await ended(client, "researcher", "x"))[0] == status


async def test_hooks_change_questions_and_their_answers() -> None:
    app = App("humans")

    @app.hook("human_requested")
    def politer(event: HookEvent) -> Change:
        return Change({"prompt": f"Please: {event.payload['prompt']}", "data": {"masked": True}})

    @app.hook("human_answered")
    def trimmed(event: HookEvent) -> Change | None:
        assert event.input == {"masked": True}
        return Change(event.payload.strip()) if isinstance(event.payload, str) else None

    @app.agent("agent")
    async def agent(ctx: AgentContext) -> Json:
        name = await ctx.human("Your name?", data={"secret": 1})
        approval = await ctx.approve(f"Are you {name}?")
        return [name, approval.verdict, approval.value]

    async with LocalApp(app) as client:
        hooks = {"human_requested": ["politer"], "human_answered": ["trimmed"]}
        task = await client.submit("agent", options=SubmitOptions(hooks=hooks))
        shown, answers = [], iter((" Ann ", True))
        async for event in task.stream():
            if event.type == "weft.human.requested":
                shown.append((event.data["prompt"], event.data["data"]))
                await task.signal(event.data["request_id"], next(answers))
        assert (await task.result(timeout=60)).value() == ["Ann", "approve", {"masked": True}]
    assert shown == [("Please: Your name?", {"masked": True}), ("Please: Are you Ann?", {"masked": True})]


# ---- callbacks -------------------------------------------------------------------------------------------------


async def test_a_callback_may_replace_a_tools_result() -> None:
    app, seen = desk(), []

    @app.callback("search")
    def general(result: ToolResult) -> CallbackResult:
        seen.append((result.tool_name, result.action_name, dict(result.arguments), result.content))
        return CallbackResult(True, "in its place", CallbackResultType.OVERRIDE)

    @app.callback("search__deep")
    async def special(result: ToolResult) -> CallbackResult:
        assert result.action_name == "deep"
        return CallbackResult(result_data="not taken", result_type=CallbackResultType.BYPASS)

    @app.agent("both")
    async def both(ctx: AgentContext) -> Json:
        return await ctx.gather(ctx.tool("search", query="a"), ctx.tool("search", query="b", action="deep"))

    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("both")
        assert (await task.result(timeout=60)).value() == ["in its place", "found b"]
        rows = (await local.recorded(task.task_id)).steps
    assert seen == [("search", "", {"query": "a"}, "found a")]
    assert sorted(row.name for row in rows if row.kind == "callback") == ["search", "search__deep"]


@pytest.mark.parametrize(
    ("point", "ends"),
    [
        ("task_created", True), ("agent_started", True), ("before_tool_call", True), ("after_tool_call", True),
        ("output_process", True), ("agent_stopped", True), ("post_task_call", True), ("task_completed", True),
        ("session_finished", True), ("tool_call_failed", False),
    ],
)  # fmt: skip
async def test_a_hook_that_raises_ends_its_run_unless_it_can_only_observe(point: str, ends: bool) -> None:
    """The agent's own code cannot catch it as the error of a step, and no attempt repeats it."""
    app, seen = App("desk"), []

    @app.tool
    async def search(query: str) -> str:
        if point == "tool_call_failed":
            raise Reject("found nothing")
        return query

    @app.agent("catches", retry=RetryPolicy(attempts=3, base_seconds=0.001))
    async def catches(ctx: AgentContext, text: str) -> str:
        try:
            return str(await ctx.tool("search", query=text))
        except StepError as error:
            return error.type

    app.hook(point, name="broken", always=True)(raises)
    app.hook("error", name="told", always=True)(lambda event: seen.append(event.error))
    async with LocalApp(app) as client:
        status, error, _ = await ended(client, "catches", "x")
    if ends:
        assert (status, error["type"]) == ("failed", "OSError")
        assert error["message"] == f"hook 'broken' at {point} failed: no disk"
        assert len(seen) == 1
    else:
        assert (status, error) == ("completed", "Reject")


async def test_a_callback_without_success_leaves_the_result_and_one_that_fails_ends_its_run() -> None:
    app = desk()

    @app.callback("search")
    def odd(result: ToolResult) -> Json:
        if result.arguments["query"] == "fails":
            raise OSError("no disk")
        return CallbackResult(False, "unused", CallbackResultType.OVERRIDE)

    local = LocalApp(app)
    async with local as client:
        assert (await ended(client, "researcher", "x"))[1] == "x: found x"
        status, error, _ = await ended(client, "researcher", "fails")
        assert (status, error) == ("failed", {"type": "OSError", "message": "callback 'search' failed: no disk"})
        assert 'weft_hook_failures_total{point="callback",service="local"} 1.0' in local.metrics.exposition().decode()


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [3, ["start"], {"start": "alert"}, {"start": [3]}])
async def test_a_submit_whose_hooks_are_no_names_by_point_is_refused(hooks: Any) -> None:
    async with LocalApp(desk()) as client:
        with pytest.raises(InvalidInput, match=r"^data\.hooks"):
            await client.submit("researcher", "x", options=SubmitOptions(hooks=hooks))


@pytest.mark.parametrize(
    ("hooks", "field", "message"),
    [
        ({"before_tool_cal": ["watch"]}, "data.hooks.before_tool_cal", "did you mean before_tool_call"),
        ({"whenever": ["watch"]}, "data.hooks.whenever", "choose from task_created"),
        ({"before_tool_call": ["wach"]}, "data.hooks.before_tool_call", "app 'desk' has no hook 'wach'"),
        ({"start": ["watch"]}, "data.hooks.start", "it declares none there"),
    ],
)
async def test_a_submit_with_an_unknown_hook_is_rejected(hooks: dict[str, list[str]], field: str, message: str) -> None:
    app = desk()

    @app.hook("before_tool_call")
    def watch(event: HookEvent) -> None: ...

    async with LocalApp(app) as client:
        with pytest.raises(Rejected, match=message) as refused:
            await client.submit("researcher", "x", options=SubmitOptions(hooks=hooks))
    assert refused.value.field == field


def test_declarations_that_cannot_work_are_refused() -> None:
    app = App("wrong")
    with pytest.raises(ConfigurationError, match="is not a hook point"):
        app.hook("sometimes")(lambda event: None)
    with pytest.raises(ConfigurationError, match="one argument"):
        app.hook("start", name="none")(lambda: None)
    with pytest.raises(ConfigurationError, match="no method exec"):
        app.hook("start")(type("Empty", (), {}))
    with pytest.raises(ConfigurationError, match="above 0"):
        app.hook("start", name="limit", timeout_seconds=0)(lambda event: None)
    with pytest.raises(ConfigurationError, match="whole number"):
        app.hook("start", name="order", order=1.5)(lambda event: None)  # type: ignore[arg-type]  # refused at run time
    app.hook("start", name="twice")(lambda event: None)
    app.hook("finished", name="twice")(lambda event: None)
    with pytest.raises(ConfigurationError, match="declared twice"):
        app.hook("task_created", name="twice")(lambda event: None)
    with pytest.raises(ConfigurationError, match="callback key"):
        app.callback("a b")(lambda result: None)


def test_included_hooks_are_the_apps_own() -> None:
    base, app = App("base"), App("app")
    base.hook("start", name="log", always=True)(lambda event: None)
    base.callback("search")(lambda result: None)
    app.include(base)
    app.include(base)
    assert [hook.name for hook in app.hooks] == ["log"]
    assert app.hooks.callback("search") is not None
    assert app.manifest().hooks["task_created"]["log"].always


def test_denied_is_an_error_of_a_step() -> None:
    assert not isinstance(Denied("no"), ToolError)
    assert str(Denied("no")) == "Denied: no"


# ---- forks and replays -----------------------------------------------------------------------------------------


async def test_a_replay_meets_the_recorded_hooks_and_a_fork_keeps_them() -> None:
    app, seen = desk(), []

    @app.hook("before_tool_call", guard=True)
    def careful(event: HookEvent) -> Deny | Change:
        seen.append(event.payload["query"])
        return Deny("not this") if event.payload["query"] == "bad" else Change({"query": "changed"})

    @app.hook("error")
    def alert(event: HookEvent) -> None:
        seen.append("alert")

    async def alerted(times: int) -> None:
        """A failed task starts these hooks when it ends, and its result does not wait for them."""

        async def enough() -> bool:
            return seen.count("alert") >= times

        await until(enough, 60, "the alert of each failed task")

    hooks = {"before_tool_call": ["careful"], "error": ["alert"]}
    local = LocalApp(app, trajectory=True)
    async with local as client:
        for input, status in (("good", "completed"), ("bad", "failed")):
            task = await client.submit("researcher", input, options=SubmitOptions(hooks=hooks))
            assert (await task.result(timeout=60)).status == status
            await alerted(1 if status == "failed" else 0)
            recorded = await local.recorded(task.task_id)
            before = list(seen)
            replayed = (await replay(recorded, task.task_id, app)).run
            assert (replayed.status, replayed.same, seen) == (status, True, before)
        seen.clear()
        for at in (None, "1"):
            fork = await client.fork(task.task_id, at=at, input=..., store=local.trajectories)
            assert (await fork.result(timeout=60)).status == "failed"
        await alerted(2)
    assert sorted(seen) == sorted(["bad", "alert"] * 2)


async def test_a_hook_that_was_announced_a_moment_ago_may_be_named() -> None:
    """Admission caches an app's manifest for two seconds; an unknown name makes it read again."""
    app = desk()
    async with LocalApp(app) as client:
        await ended(client, "researcher", "x", options=SubmitOptions(hooks={"start": []}))
        app.hook("before_tool_call", name="new")(lambda event: Deny("new"))
        await announce(client.buses, app.manifest())
        status, error, _ = await ended(
            client, "researcher", "x", options=SubmitOptions(hooks={"before_tool_call": ["new"]})
        )
    assert (status, error["type"]) == ("failed", "Denied")


async def test_steps_of_a_failed_turn_are_recorded_once_even_after_a_redrive() -> None:
    app, broken = App("redriven"), [True]
    alerts: list[int] = []
    done: list[int] = []

    @app.hook("agent_stopped", always=True)
    def alert(event: HookEvent) -> None:
        alerts.append(1 if event.error else 0)

    @app.agent("agent", retry=RetryPolicy(attempts=1))
    async def agent(ctx: AgentContext) -> str:
        await ctx.step(done.append, 1, name="once")
        if broken[0]:
            raise OSError("out of order")
        return "done"

    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("agent")
        assert (await task.result(timeout=60)).status == "failed"
        rows = (await local.recorded(task.task_id)).steps
        assert [row.name for row in rows] == ["agent", "selection", "once", "alert"]
        broken[0] = False
        letters = DeadLetters(client.buses)
        async for letter in letters.all():
            await letters.redrive(letter.letter_id, reopen=True)
        again = await client.task(task.task_id)
        assert (await again.result(timeout=60)).value() == "done"

        async def both_ends() -> bool:
            found = await local.trajectories.task("local", task.task_id)
            return found is not None and found.end is not None and found.end.status == "completed"

        await until(both_ends, 60, "the second end is recorded")
        recorded = await local.recorded(task.task_id)
    assert (alerts, done) == ([1, 0], [1])
    assert [row.name for row in recorded.steps] == ["agent", "selection", "once", "alert", "alert"]
