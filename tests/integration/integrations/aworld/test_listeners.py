"""Questions of tasks that Runners run: answered on an event, by a call, in a terminal; or a hint says how."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusUnavailable
from runtime_core.integrations.aworld import listeners
from runtime_core.integrations.aworld.listeners import Hints
from tests.fleet import Fleet
from tests.servers.process import Server
from weft import AgentContext, Client, TaskHandle
from weft.aworld import Outputs, Runners, Task, TaskStatus
from weft.errors import InvalidInput


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


async def asks(ctx: AgentContext, text: str) -> str:
    answer = await ctx.human("Publish?", data={"text": text})
    return f"{text}: {answer}"


async def approves(ctx: AgentContext, text: str) -> str:
    approval = await ctx.approve("Publish?", data=text)
    return approval.verdict


async def test_a_question_is_an_event_that_can_be_answered() -> None:
    answers = []
    async with asyncio.timeout(60):
        async for event in Runners.streaming_run("draft", agent=asks):
            if event.request_id:
                assert (event.data["prompt"], event.data["data"]) == ("Publish?", {"text": "draft"})
                await event.answer({"yes": 1})
                with pytest.raises(InvalidInput, match=r"already answered|no open question|has ended"):
                    await event.answer(2)
            if event.response is not None:
                answers.append(event.response.answer)
                with pytest.raises(InvalidInput, match="is not a question"):
                    await event.answer(3)
    assert answers == ["draft: {'yes': 1}"]


async def test_a_question_is_answered_by_a_call_from_any_thread() -> None:
    task = Task(id="asks", input="draft", agent=asks, outputs=Outputs())

    def other_thread(request: str) -> None:
        asyncio.run(Runners.answer("asks", request, "no"))

    async with asyncio.timeout(60):
        running = asyncio.create_task(Runners.run_task(task))
        async for event in task.outputs.stream_events():
            if event.request_id:
                with pytest.raises(InvalidInput, match="no open question 'r:9'"):
                    await Runners.answer("asks", "r:9", "no")
                await asyncio.to_thread(other_thread, event.request_id)
        assert (await running)["asks"].answer == "draft: no"
    with pytest.raises(InvalidInput, match=r"task_id: no task 'asks' runs in this process \(running: none\)"):
        await Runners.answer("asks", "r:1", "no")


async def test_a_question_without_a_listener_leaves_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    task = Task(id="waits", input="draft", agent=asks)
    async with asyncio.timeout(60):
        running = asyncio.create_task(Runners.run_task(task))
        while not (hints := [each.getMessage() for each in caplog.records if "waits for a human" in each.getMessage()]):
            await asyncio.sleep(0.05)
        assert hints[0].startswith("task waits waits for a human: 'Publish?': call Runners.answer('waits', 'r")
        await Runners.answer("waits", hints[0].split("'")[5], True)
        assert (await running)["waits"].answer == "draft: True"


async def test_one_search_serves_all_tasks_and_its_failure_fails_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No task has its own connection, and a check after a failed one still finds the questions."""
    looks: list[int] = []
    read = Hints._read

    async def fails_first(self: Hints, bus: EventBus, tasks: Sequence[TaskHandle]) -> None:
        looks.append(len(tasks))
        if len(looks) == 1:
            raise BusUnavailable("the broker is away")
        await read(self, bus, tasks)

    async def no_reader(self: Client, bus: EventBus) -> Transport:
        raise AssertionError("a task has opened a connection")

    monkeypatch.setattr(listeners, "HINT_SECONDS", 0.0)
    monkeypatch.setattr(listeners, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(Hints, "_read", fails_first)
    monkeypatch.setattr(Client, "open_reader", no_reader)
    tasks = [Task(id=f"t{number}", input="draft", agent=asks) for number in range(5)]
    async with asyncio.timeout(60):
        running = asyncio.create_task(Runners.run_task(tasks))
        hints: dict[str, str] = {}
        while len(hints) < 5:
            await asyncio.sleep(0.01)
            said = [each.getMessage() for each in caplog.records if "waits for a human" in each.getMessage()]
            hints = {each.split()[1]: each.split("'")[5] for each in said}
        assert max(looks) == 5
        for task, question in hints.items():
            await Runners.answer(task, question, True)
        assert {response.answer for response in (await running).values()} == {"draft: True"}


async def test_an_answer_reaches_a_task_on_services(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runners_app:app") as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = Task(id="far", input="draft", agent="queries")
        running = asyncio.create_task(Runners.run_task(task, client=client))
        handle = None
        async with asyncio.timeout(60):
            while handle is None:
                known = await client.buses[0].transport.call("EXISTS", client.buses[0].keys.task("far"))
                handle = await client.task("far") if known else None
            async for event in handle.stream():
                if event.request_id:
                    fleet.kill("agent-handler-1")
                    await Runners.answer("far", event.request_id, "yes", client=client)
            assert (await running)["far"].answer == "draft: yes"


async def test_a_task_that_no_handler_can_run_leaves_a_hint(
    valkey: Server, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler has run there before, so that the submit is accepted."""

    def hints() -> list[str]:
        return [each.getMessage() for each in caplog.records if "no agent-handler" in each.getMessage()]

    async with (
        Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runners_app:app", replicas=1) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        await fleet.stop()
        running = asyncio.create_task(Runners.run_task(Task(id="alone", input="draft", agent="queries"), client=client))
        async with asyncio.timeout(60):
            while not hints():
                await asyncio.sleep(0.05)
            await fleet.restart()
            handle = await client.task("alone")
            async for event in handle.stream():
                if event.request_id:
                    await Runners.answer("alone", event.request_id, "yes", client=client)
            assert (await running)["alone"].answer == "draft: yes"
    assert hints() == [
        f"task alone waits: no agent-handler runs in namespace {namespace!r}; start one, as `weft up` does"
    ]


PROGRAM = """
import asyncio
import sys
from weft import AgentContext
from weft.aworld import Runners, Task

async def asks(ctx: AgentContext, text: str) -> str:
    first = await ctx.human("Name?", data={"text": text})
    again = (await ctx.approve("Sure?", data=first)).verdict
    return f"{first} {again}"

async def ticks(ctx: AgentContext, text: str) -> str:
    for number in range(3):
        print("tick", number, flush=True)
        await ctx.sleep(0.1)
    return "ticked"

async def main() -> None:
    tasks = [
        Task(id="asks", input="draft", agent=asks, conf={"run_mode": "INTERACTIVE"}),
        Task(id="ticks", input="x", agent=ticks),
    ]
    found = await Runners.run_task(tasks)
    print("ENDED", found["asks"].answer, found["ticks"].answer, flush=True)

asyncio.run(main())
"""


def test_a_terminal_asks_while_other_output_continues(tmp_path: Path) -> None:
    """A real terminal: the answers are typed once the prompt and the other task's output have come."""
    (tmp_path / "program.py").write_text(PROGRAM)
    parent, child = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "WEFT_REDIS_URL"}
    process = subprocess.Popen(
        [sys.executable, "program.py"], stdin=child, stdout=child, stderr=child, cwd=tmp_path, env=env, close_fds=True
    )
    os.close(child)
    seen = bytearray()

    def until(*wanted: str) -> None:
        end = time.monotonic() + 30
        while not all(text.encode() in seen for text in wanted):
            assert time.monotonic() < end, seen.decode(errors="replace")
            if select.select([parent], [], [], 0.2)[0]:
                seen.extend(os.read(parent, 1000))

    try:
        until("Name?", '{"text":"draft"}', "tick 2")
        os.write(parent, b"Ada\n")
        until("Sure?", "(yes or no) >")
        os.write(parent, b"perhaps\n")
        until("is not a verdict")
        os.write(parent, b"yes\n")
        until("ENDED Ada approve ticked")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


async def test_an_end_of_standard_input_leaves_a_hint_and_an_answer_elsewhere_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.close(writing)
        task = Task(id="eof", input="draft", agent=approves, conf={"run_mode": "interactive"}, outputs=Outputs())
        async with asyncio.timeout(60):
            running = asyncio.create_task(Runners.run_task(task))
            while not any("standard input has ended" in each.getMessage() for each in caplog.records):
                await asyncio.sleep(0.05)
            [question] = [event for event in task.outputs.events if event.request_id]
            await Runners.answer("eof", question.request_id, False)
            assert (await running)["eof"].answer == "deny"


async def test_a_question_answered_elsewhere_leaves_the_terminal_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as typed:
        monkeypatch.setattr(sys, "stdin", stdin)
        conf = {"run_mode": "interactive"}
        task = Task(id="first", input="a", agent=approves, conf=conf, outputs=Outputs())
        async with asyncio.timeout(60):
            running = asyncio.create_task(Runners.run_task(task))
            async for event in task.outputs.stream_events():
                if event.request_id:
                    await event.answer(False)
            assert (await running)["first"].answer == "deny"
            typed.write("no\n")
            typed.flush()
            assert (await Runners.run("b", agent=approves, conf=conf)).answer == "deny"


@pytest.mark.parametrize("status", ["cancelled", "INTERRUPTED", TaskStatus.CANCELLED])
async def test_setting_the_status_cancels_the_task(status: str) -> None:
    task = Task(input="draft", agent=asks, outputs=Outputs())
    async with asyncio.timeout(60):
        running = asyncio.create_task(Runners.run_task(task))
        async for event in task.outputs.stream_events():
            if event.request_id:
                await asyncio.to_thread(setattr, task, "task_status", status)
        response = (await running)[task.id]
    assert response.status == "cancelled"
    assert task.task_status == str(status).lower()
    assert "its task_status was set to" in response.msg
    again = Task(input="draft", agent=asks)
    again.task_status = "cancelled"
    assert "not started" in (await Runners.run_task(again))[again.id].msg
    with pytest.raises(InvalidInput, match="task_status: 'done' is not a status; choose from init, running, success"):
        again.task_status = "done"


async def test_a_stream_of_a_task_that_must_not_start_ends_at_once() -> None:
    task = Task(input="draft", agent=asks, task_status="cancelled")
    assert [event.type async for event in Runners.streaming_run_task(task)] == ["weft.task.cancelled"]


async def test_an_output_that_raises_ends_the_call_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks:
        def add_output(self, event: object) -> None:
            raise ValueError("no room")

    caplog.set_level(logging.ERROR)
    with pytest.raises(ValueError, match="no room"):
        await Runners.run_task(Task(input="x", agent=asks, outputs=Breaks()))
