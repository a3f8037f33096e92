"""Code for AWorld runs after its imports got the prefix `weft`; docs/aworld.md lists the names."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft import AgentContext, App
from weft.aworld import Observation, Runners, TaskConfig, TaskRunner, WorkflowSwarm
from weft.hooks import HookEvent

PAGE = Path(__file__).parents[4] / "docs" / "aworld.md"


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading: the names in each cell."""
    lines = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return [
        [name for cell in row[1:] for name in [row[0].strip("`"), *re.findall(r"`([\w.]+)`", cell)]] for row in rows
    ]


@pytest.mark.parametrize(("module", "names"), [(row[0], row[1:]) for row in table("Import names")])
def test_a_module_has_the_names_that_the_table_lists(module: str, names: list[str]) -> None:
    loaded = importlib.import_module(f"weft.aworld.{module}")
    assert sorted(loaded.__all__) == names


def test_the_names_are_in_weft_aworld_too_or_where_the_page_says() -> None:
    weft, engines, every = (importlib.import_module(name) for name in ("weft", "weft.engines", "weft.aworld"))
    for module, *names in table("Import names"):
        for name in names:
            own = getattr(importlib.import_module(f"weft.aworld.{module}"), name)
            if name.endswith("Runtime"):
                assert isinstance(engines.engine_named(name.removesuffix("Runtime").lower()), own)
                continue
            place = weft if name in ("Context", "StreamingMode", "TaskResponse") else every
            place = engines if name in ("RunConfig", "RuntimeEngine") else place
            assert getattr(place, name) is own, f"{module}.{name}"


def test_the_table_lists_every_module() -> None:
    folder = Path(importlib.import_module("weft.aworld").__file__ or "").parent
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
        if ("__all__" in path.read_text(encoding="utf-8") and path.parent != folder) or path.name == "runner.py"
    }
    assert {row[0] for row in table("Import names")} == found


def test_the_other_names_are_names_of_weft() -> None:
    for _, *named in table("Other names"):
        for name in (each for each in named if each.startswith("weft.")):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


# ---- the code of the documents ------------------------------------------------------------------------------

TASK = """
from aworld.core.task import Task
from aworld.core.common import StreamingMode

task = Task(
    name="complex_task",
    input=user_input,
    swarm=multi_agent,
    conf={"max_steps": 20, "run_mode": "interactive", "check_input": True},
    hooks={"start": ["init_logging", "init_context"], "error": ["handle_error", "send_alert"]},
    streaming_mode=StreamingMode.CORE,
)
"""

CUSTOM = """
from aworld.runners.task_runner import TaskRunner
from aworld.core.task import Task, TaskResponse
from aworld.core.context.base import Context

class MyCustomRunner(TaskRunner):
    def __init__(self, task: Task, *args, **kwargs):
        super().__init__(task, *args, **kwargs)
        self.custom_state = {}

    async def pre_run(self):
        await super().pre_run()
        logger.info("Custom runner preparing...")

    async def do_run(self, context: Context = None) -> TaskResponse:
        observation = self.observation
        try:
            result = await self._execute_custom_logic(observation)
            return TaskResponse(task_id=self.task.id, content=result, status="success")
        except Exception as e:
            logger.error(f"Execution failed: {e}")
            return TaskResponse(task_id=self.task.id, content=str(e), status="failed")

    async def _execute_custom_logic(self, observation):
        if not observation.content:
            raise ValueError("no content")
        return f"custom {observation.content}"

    async def post_run(self):
        await super().post_run()
        logger.info("Custom runner cleaning up...")
"""

TREE = """
from aworld.core.task import Runner, Task, TaskResponse
from aworld.core.context.base import Context

class TreeSearchRunner(Runner):
    def __init__(self, task: Task, *args, **kwargs):
        super().__init__(task, *args, **kwargs)
        self.max_depth = self.conf.get('max_depth', 3)
        self.max_breadth = self.conf.get('max_breadth', 3)
        self.search_tree = {}

    async def do_run(self, context: Context = None) -> TaskResponse:
        best_result = await self._dfs(self.observation, depth=0)
        return TaskResponse(task_id=self.task.id, content=best_result, status="success")

    async def _dfs(self, state, depth):
        if depth >= self.max_depth:
            return state
        agent = self.swarm.ordered_agents[0]
        actions = await self._get_possible_actions(agent, state)
        best_result = state
        best_score = self._evaluate(state)
        for action in actions[:self.max_breadth]:
            next_state = await self._execute_action(action, state)
            result = await self._dfs(next_state, depth + 1)
            score = self._evaluate(result)
            if score > best_score:
                best_score = score
                best_result = result
        return best_result

    async def _get_possible_actions(self, agent, state):
        obs = Observation(content=str(state))
        output = await agent.run(obs)
        return output.get('actions', [])

    async def _execute_action(self, action, state):
        tool = self.tools.get(action['tool'])
        result = await tool.step(action['args'])
        return result.get('next_state', state)

    def _evaluate(self, state):
        return len(str(state))
"""

ENGINE = """
from typing import Callable, List
from aworld.runners.runtime_engine import RuntimeEngine

class OwnEngine(RuntimeEngine):
    async def execute(self, funcs: List[Callable], *args, **kwargs):
        return [func(*args, **kwargs) for func in funcs]

    def _prepare(self, call):
        return call

    async def _run(self, prepared, timeout_seconds):
        return prepared.function(*prepared.args)
"""

CALLS = """
from aworld.runners import Runners

async def calls(agent, tasks):
    answers = [(await Runners.run("a", agent=agent)).answer]
    answers += [response.answer for response in (await Runners.run_task(tasks)).values()]
    async for event in Runners.streaming_run("c", agent=agent):
        if event.response is not None:
            answers.append(event.response.answer)
    async for event in Runners.streaming_run_task(tasks[0].__class__(input="d", agent=agent)):
        if event.response is not None:
            answers.append(event.response.answer)
    return answers
"""


EVENTS = """
async def do_run(self):
    # send init msg
    await self.event_mng.emit_message(msg)
    # core process
    await self._do_run()
    # gen trajectory
    await self._save_trajectories()
    # build response
    resp = self._response()
"""

DESIGNED = """
from aworld.core.task import TaskResponse
from aworld.runners.task_runner import TaskRunner

class WellDesignedRunner(TaskRunner):
    async def do_run(self, context):
        return await self._main_execution(context)

    async def _main_execution(self, context):
        observation = self.observation
        results = []
        processed_obs = await self._preprocess(observation)
        for step in range(self.max_steps):
            output = await self._execute_step(processed_obs, step)
            results.append(output)
            if self._should_stop(output):
                break
            processed_obs = self._update_observation(processed_obs, output)
        final_result = await self._postprocess(results)
        return TaskResponse(task_id=self.task.id, content=final_result, status="success")

    async def _execute_step(self, obs, step):
        return await self.swarm.ordered_agents[0].run(obs)

    def _should_stop(self, output):
        return len(output) > 3

    def _update_observation(self, ob, output):
        return output + ob

    async def _preprocess(self, observation):
        return observation.content

    async def _postprocess(self, results):
        return results
"""


def run_block(code: str, **names: object) -> dict[str, Any]:  # Any: whatever the code defines
    """Execute a block with the changed prefix. `names` are those that the document takes as given."""
    space: dict[str, Any] = {"__name__": "document", **names}
    exec(compile(code.replace("from aworld.", "from weft.aworld."), "document", "exec"), space)
    return space


async def shout(ctx: AgentContext, text: str) -> str:
    return text.upper()


async def branches(ctx: AgentContext, state: str) -> dict[str, Any]:
    return {"actions": [{"tool": "grow", "args": {"state": state, "by": by}} for by in ("x", "yy", "zzz", "wwww")]}


def grow(state: str, by: str) -> dict[str, str]:
    return {"next_state": state + by}


def test_the_block_with_a_task() -> None:
    task = run_block(TASK, user_input="hi", multi_agent=WorkflowSwarm("planner", "writer"))["task"]
    assert (task.config["max_steps"], task.config.run_mode, task.config.check_input) == (20, "interactive", True)
    assert isinstance(task.conf, TaskConfig)
    assert task.hooks["error"] == ["handle_error", "send_alert"]
    assert task.streaming_mode.name == "CORE"


async def test_the_task_of_the_block_runs_with_its_hooks_and_asks_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"yes\n")
    monkeypatch.setattr("sys.stdin", os.fdopen(reading))

    async def asks(ctx: AgentContext, text: str) -> str:
        if text == "FAIL":
            raise ValueError(text)
        return f"{text} {await ctx.human('Publish?')}"

    app, fired = App("document"), []

    def noted(name: str) -> Callable[[HookEvent], None]:
        return lambda event: fired.append(name)

    for point, names in (("start", ("init_logging", "init_context")), ("error", ("handle_error", "send_alert"))):
        for name in names:
            app.hook(point, name=name)(noted(name))
    statuses = []
    for given in ("hi", "fail", ""):
        task = run_block(TASK, user_input=given, multi_agent=WorkflowSwarm(shout, asks))["task"]
        events = [event async for event in Runners.streaming_run_task(task, app=app)]
        response = events[-1].response
        assert response is not None
        statuses.append((response.status, response.answer or response.msg))
    os.close(writing)
    sys.stdin.close()
    started = ["init_logging", "init_context"]
    assert statuses[:2] == [("completed", "HI yes"), ("failed", "FAIL")]
    assert "has no input, and conf.check_input requires one" in statuses[2][1]
    assert fired == [*started, *(2 * [*started, "handle_error", "send_alert"])]


async def test_the_blocks_whose_do_run_is_empty_complete_without_an_answer() -> None:
    empty = """
from aworld.runners.task_runner import TaskRunner

class PoorlyDesignedRunner(TaskRunner):
    async def do_run(self, context):
        pass
"""
    response = await Runners.run("hi", agent=shout, runner_cls=run_block(empty)["PoorlyDesignedRunner"])
    assert (response.status, response.answer) == ("completed", None)


@pytest.mark.parametrize(("given", "status", "shown"), [("hi", "completed", "custom hi"), ("", "failed", "no content")])
async def test_the_block_with_a_custom_runner(given: str, status: str, shown: str) -> None:
    space = run_block(CUSTOM, logger=logging.getLogger("document"))
    runners = importlib.import_module("weft.aworld.runner").Runners
    response = await runners.run(given, agent=shout, runner_cls=space["MyCustomRunner"])
    assert (response.status, response.content or response.msg) == (status, shown)


async def test_the_block_with_a_tree_search() -> None:
    space = run_block(TREE, Observation=Observation)
    runners = importlib.import_module("weft.aworld.runner").Runners
    response = await runners.run(
        "", agent=branches, tools=[grow], runner_cls=space["TreeSearchRunner"], conf={"max_depth": 2}
    )
    assert response.status == "completed", response.error
    assert str(response.answer).endswith("zzzzzz"), "the longest of three branches, twice"


async def test_the_block_with_the_event_loop_of_a_runner() -> None:
    space = run_block(EVENTS)

    class OfTheDocument(TaskRunner):
        async def do_run(self, context: Any = None) -> None:
            [space["msg"]] = await self.first_messages()
            await space["do_run"](self)

    response = await Runners.run("hi", agent=shout, runner_cls=OfTheDocument)
    assert (response.status, response.answer) == ("completed", "HI")


async def test_the_block_with_a_runner_in_parts() -> None:
    runner = run_block(DESIGNED)["WellDesignedRunner"]
    response = await Runners.run("a", agent=shout, runner_cls=runner, conf={"max_steps": 9})
    assert response.answer == ["A", "AA", "AAAA"]


def test_the_page_lists_the_blocks_that_are_no_programs() -> None:
    """The others run above. A name that the page gives for one exists."""
    rows = table("Code of AWorld's documents")
    assert len(rows) == 6
    for _, *named in rows:
        for name in (each for each in named if each.startswith("weft.")):
            module, _, attribute = name.rpartition(".")
            owner, _, method = module.rpartition(".")
            found = getattr(importlib.import_module(owner), method) if method[:1].isupper() else None
            assert hasattr(found or importlib.import_module(module), attribute), name


async def test_the_block_with_an_engine() -> None:
    engine = run_block(ENGINE)["OwnEngine"]()
    assert await engine.execute([len, str.upper], "abc") == [3, "ABC"]


async def test_the_block_with_all_calls_of_runners() -> None:
    task = importlib.import_module("weft.aworld.core.task").Task
    calls = run_block(CALLS)["calls"]
    assert await calls(shout, [task(id="b", input="b", agent=shout)]) == ["A", "B", "C", "D"]
