"""Agents in separate processes: messages that other distributed runtimes lose, hang on or mix up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest

from runtime_core.base.lifeline import tied
from runtime_core.bus.deliveries import QUARANTINE_AFTER
from runtime_core.integrations.actors.protocol import AgentMetadata
from tests.conftest import ROOT
from tests.integration.integrations.actors.agents import (
    DEFAULT,
    ROUNDS,
    Answer,
    Ask,
    Echo,
    Note,
    OwnError,
    Ping,
    Round,
    Sink,
)
from tests.servers.matrix import first_of
from tests.servers.process import Server
from tests.service_forks import SOURCES, Fork
from tests.service_forks import start as start_module
from weft.runtime import (
    AgentId,
    CancellationToken,
    NotAccessibleError,
    RemoteError,
    Runtime,
    TopicId,
    TypeSubscription,
    UndeliverableException,
)

SECONDS = 60
"""A machine that is busy with other tests starts a process in seconds."""


Process: TypeAlias = Fork | subprocess.Popen[bytes]


class Start(Protocol):
    """Start a worker process and wait until it is ready."""

    async def __call__(self, *types: str, url: str = "") -> Process: ...


@pytest.fixture
def start(valkey: Server, namespace: str, tmp_path: Path) -> Iterator[Start]:
    workers: list[Process] = []

    async def begin(*types: str, url: str = "") -> Process:
        environ = {**os.environ, "PYTHONPATH": SOURCES, "WEFT_TEST_FOLDER": str(tmp_path)}
        command = ("tests.integration.integrations.actors.worker", url or valkey.url, namespace, *types)
        log = tmp_path / f"worker-{len(workers)}.log"
        worker = start_module(command, environ, log)
        workers.append(worker)
        async with asyncio.timeout(SECONDS):
            while "ready\n" not in (log.read_text() if log.exists() else ""):
                # What it took over may have killed it before it could say so.
                if worker.poll() is not None:
                    assert worker.returncode == -signal.SIGKILL, f"a worker did not start: {log.read_text()}"
                    break
                await asyncio.sleep(0.02)
        return worker

    yield begin
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for number, worker in enumerate(workers):
        if worker.wait(SECONDS) not in (0, -9):
            pytest.fail(f"a worker ended with {worker.returncode}: {(tmp_path / f'worker-{number}.log').read_text()}")


@pytest.fixture
async def runtime(valkey: Server, namespace: str) -> AsyncIterator[Runtime]:
    """A runtime in the test's process, which runs no agents."""
    async with Runtime(valkey.url, namespace, services=False, lease_seconds=1.0) as runtime:
        yield runtime


async def until_there(folder: Path, pattern: str, but: Path | None = None) -> Path:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            if path != but:
                return path
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {pattern} came within {SECONDS} s")


async def test_a_request_to_an_unknown_type_fails_at_once(runtime: Runtime, start: Start) -> None:
    await start("echo")
    with pytest.raises(UndeliverableException, match="nobody"):
        await asyncio.wait_for(runtime.send_message(Ask("hi"), AgentId("nobody", "a")), SECONDS)


async def test_a_handler_may_answer_none(runtime: Runtime, start: Start) -> None:
    await start("echo")
    answer = await asyncio.wait_for(runtime.send_message(Ask("nothing"), AgentId("echo", "a")), SECONDS)
    assert answer is None


async def test_each_runtime_gets_its_own_answers(
    runtime: Runtime, start: Start, valkey: Server, namespace: str
) -> None:
    await start("echo")
    async with Runtime(valkey.url, namespace, services=False) as other:
        asked = {
            f"{name}-{n}": one.send_message(Ask(f"{name}-{n}"), AgentId("echo", "same"))
            for name, one in (("first", runtime), ("second", other))
            for n in range(50)
        }
        answers = await asyncio.wait_for(asyncio.gather(*asked.values()), SECONDS)
    assert [answer.text for answer in answers] == list(asked)


async def test_an_error_keeps_its_class_even_without_a_text(runtime: Runtime, start: Start) -> None:
    await start("echo")
    with pytest.raises(OwnError) as silent:
        await asyncio.wait_for(runtime.send_message(Ask("silent error"), AgentId("echo", "a")), SECONDS)
    assert str(silent.value) == ""
    with pytest.raises(OwnError, match="what went wrong"):
        await asyncio.wait_for(runtime.send_message(Ask("error"), AgentId("echo", "a")), SECONDS)


async def test_a_request_outlives_the_process_that_handles_it(runtime: Runtime, start: Start, tmp_path: Path) -> None:
    first = await start("slow")
    asked = asyncio.create_task(runtime.send_message(Ask("hi"), AgentId("slow", "a")))
    entered = await until_there(tmp_path, "entered-*")
    first.kill()
    first.wait()
    second = await start("slow")
    (tmp_path / "go").touch()
    answer = await asyncio.wait_for(asked, SECONDS)
    assert entered.name == f"entered-{first.pid}"
    assert answer == Answer("hi", by=str(second.pid))
    assert await runtime.agent_save_state(AgentId("slow", "a")) == {"count": 1}


PROGRAM = """
import asyncio, logging, sys
from tests.integration.integrations.actors.agents import Ask, Echo
from weft.runtime import AgentId, Runtime, TopicId

async def main(url, namespace, texts):
    async with Runtime(url, namespace, services=False, lease_seconds=1.0) as runtime:
        await Echo.register(runtime, "echo", Echo)
        for text in texts:
            await runtime.publish_message(Ask(text), TopicId("told", "all"))
        print((await runtime.send_message(Ask("mine"), AgentId("echo", "a"))).text, flush=True)
        await runtime.stop_when_idle()
        print("idle", flush=True)

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""
"""A program that shares a namespace: it answers itself, publishes texts, and waits until nothing is left to do."""


async def read_line(program: subprocess.Popen[bytes]) -> str:
    assert program.stdout is not None
    async with asyncio.timeout(SECONDS):
        return (await asyncio.to_thread(program.stdout.readline)).decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("ends", first_of("its type is dropped", "it comes back"))
async def test_a_program_names_the_messages_of_a_killed_one_and_ends_once_they_are_handled(
    ends: str, valkey: Server, namespace: str, start: Start, tmp_path: Path
) -> None:
    """Two programs in one namespace; the first is killed in the middle of a handler, with more messages behind it."""
    environ = {**os.environ, "PYTHONPATH": SOURCES, "WEFT_REDIS_URL": valkey.url, "WEFT_NAMESPACE": namespace}
    first = await start("slow")

    async def began() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, valkey.url, namespace, "one", "two", "three"]
        return await asyncio.to_thread(
            subprocess.Popen, tied(command, signal.SIGKILL), stdout=subprocess.PIPE, env=environ, cwd=ROOT
        )

    with await began() as second:
        await until_there(tmp_path, "entered-*")
        assert await read_line(second) == "mine"
        first.kill()
        first.wait()
        said = await read_line(second)
        assert said == (
            f"stop_when_idle waits for the namespace {namespace!r}: 3 messages wait for slow: no process runs it; "
            "weft agents drop slow forgets it"
        )
        if ends == "it comes back":
            (tmp_path / "go").touch()
            await start("slow")
        else:
            dropped = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-m", "runtime_core.cli.main", "agents", "drop", "slow"],
                env=environ, cwd=ROOT, capture_output=True, text=True,
            )  # fmt: skip
            assert dropped.stdout == "dropped slow: cancelled 3 tasks\n", dropped.stderr
        assert await read_line(second) == "idle"
        assert second.wait(SECONDS) == 0
    # A third program meets nothing of them.
    with await began() as third:
        (tmp_path / "go").touch()
        lines = [await read_line(third), await read_line(third)]
        assert lines == ["mine", "idle"]


async def ask_while_it_dies(runtime: Runtime, start: Start, deaths: int) -> Answer:
    """Call an agent that kills its process; a single process runs all types."""
    asked = asyncio.create_task(runtime.send_message(Ask(str(deaths)), AgentId("mortal", "a")))
    async with asyncio.timeout(SECONDS):
        while not asked.done():
            worker = await start("echo", "mortal", "who")
            while worker.poll() is None and not asked.done():  # another process
                await asyncio.sleep(0.02)
        answer: Answer = await asked
        return answer


async def test_a_request_that_is_run_alone_may_ask_agents_of_the_same_process(runtime: Runtime, start: Start) -> None:
    """Its process has died so often that it is quarantined. The only process still handles its calls."""
    (await start("echo", "mortal")).kill()  # the type is known
    answer = await ask_while_it_dies(runtime, start, QUARANTINE_AFTER)
    assert answer.by == "echo/asked by a mortal"


async def test_a_request_that_kills_each_process_ends_in_an_error(runtime: Runtime, start: Start) -> None:
    (await start("echo", "mortal")).kill()
    with pytest.raises(RemoteError, match="ended its process"):
        await ask_while_it_dies(runtime, start, 1000)


async def test_requests_and_publications_before_a_kill_are_not_repeated(
    runtime: Runtime, start: Start, tmp_path: Path
) -> None:
    await start("echo", "sink")
    first = await start("teller")
    asked = asyncio.create_task(runtime.send_message(Ask("hi"), AgentId("teller", "a")))
    entered = await until_there(tmp_path, "entered-*")
    first.kill()
    first.wait()
    await start("teller")
    await until_there(tmp_path, "entered-*", but=entered)
    (tmp_path / "go").touch()
    assert (await asyncio.wait_for(asked, SECONDS)).text == "hi"
    assert await runtime.agent_save_state(AgentId("echo", "told")) == {"count": 2}
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    runtime.start()
    assert await runtime.agent_save_state(AgentId("sink", "all")) == {"notes": ["hi"]}


async def test_a_message_published_before_any_subscription_is_kept(runtime: Runtime, start: Start) -> None:
    await runtime.publish_message(Note("early"), DEFAULT)
    await start("sink")
    assert await asyncio.wait_for(runtime.agent_save_state(AgentId("sink", "default")), SECONDS) == {"notes": ["early"]}


async def test_a_request_outlives_a_restart_of_the_broker(
    own_valkey: Server, start: Start, namespace: str, tmp_path: Path
) -> None:
    async with Runtime(own_valkey.url, namespace, services=False, lease_seconds=1.0) as runtime:
        await start("slow", "sink", url=own_valkey.url)
        asked = asyncio.create_task(runtime.send_message(Ask("hi"), AgentId("slow", "a")))
        await until_there(tmp_path, "entered-*")
        own_valkey.restart()
        (tmp_path / "go").touch()
        assert (await asyncio.wait_for(asked, SECONDS)).text == "hi"
        await runtime.publish_message(Note("after"), DEFAULT)
        await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
        runtime.start()
        assert await runtime.agent_save_state(AgentId("sink", "default")) == {"notes": ["after"]}


async def test_several_processes_share_one_type(runtime: Runtime, start: Start) -> None:
    workers = {str((await start("who")).pid) for _ in range(2)}
    seen: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while seen != workers and time.monotonic() < deadline:
        asked = [runtime.send_message(Ask(str(n)), AgentId("who", str(n))) for n in range(100)]
        seen |= {answer.by for answer in await asyncio.wait_for(asyncio.gather(*asked), SECONDS)}
    assert seen == workers


async def test_state_and_description_of_an_agent_elsewhere_are_accessible(runtime: Runtime, start: Start) -> None:
    await start("echo")
    id = AgentId("echo", "far")
    await asyncio.wait_for(runtime.agent_load_state(id, {"count": 41}), SECONDS)
    await asyncio.wait_for(runtime.send_message(Ask("hi"), id), SECONDS)
    assert await runtime.agent_save_state(id) == {"count": 42}
    assert await runtime.agent_metadata(id) == AgentMetadata("echo", "far", "echoes")
    assert (await runtime.save_state())["echo/far"] == {"count": 42}
    with pytest.raises(NotAccessibleError):
        await runtime.try_get_underlying_agent_instance(id)
    with pytest.raises(LookupError):
        await runtime.try_get_underlying_agent_instance(AgentId("nobody", "far"))


async def test_a_cancellation_reaches_the_handler_elsewhere(runtime: Runtime, start: Start, tmp_path: Path) -> None:
    await start("slow")
    token = CancellationToken()
    asked = asyncio.create_task(runtime.send_message(Ask("hi"), AgentId("slow", "a"), cancellation_token=token))
    await until_there(tmp_path, "entered-*")
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until_there(tmp_path, "cancelled")


async def test_a_time_limit_ends_a_request_to_another_partition(runtime: Runtime, start: Start, tmp_path: Path) -> None:
    await start("slow")
    limit = 0.5
    while not list(tmp_path.glob("entered-*")):  # on a busy machine its time is over before the handler begins
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.send_message(Ask("hi"), AgentId("slow", "a"), timeout=limit), SECONDS)
        limit *= 2
    await until_there(tmp_path, "cancelled")


async def test_a_cascade_over_three_processes_counts_exactly(runtime: Runtime, start: Start) -> None:
    types = ["cascade-1", "cascade-2", "cascade-3"]
    for name in types:
        await start(name)
    await runtime.publish_message(Round(0), TopicId("default", "default"))
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    runtime.start()
    counts = [await runtime.agent_save_state(AgentId(name, "default")) for name in types]
    # Each message reaches the two others: 1, 2, 4, … of each round.
    assert counts == [{"count": 2**ROUNDS - 1}] * 3


async def test_an_object_is_updated_with_the_work_of_another_process(
    runtime: Runtime, valkey: Server, namespace: str
) -> None:
    id = AgentId("echo", "a")
    await Echo.register(runtime, "echo", Echo)
    await runtime.send_message(Ask("here"), id)
    mine = await runtime.try_get_underlying_agent_instance(id, Echo)
    await runtime.stop()
    async with Runtime(valkey.url, namespace, services=False) as other:
        await Echo.register(other, "echo", Echo)
        await other.send_message(Ask("there"), id)
        await other.send_message(Ask("there"), id)
    assert (await runtime.save_state())["echo/a"] == {"count": 3}
    assert mine.count == 1
    assert (await runtime.agent_save_state(id)) == {"count": 3}
    assert mine.count == 3
    runtime.start()
    await runtime.send_message(Ask("here"), id)
    assert mine.count == 4


async def test_a_restarted_process_adds_its_subscriptions_again(valkey: Server, namespace: str) -> None:
    for _ in range(2):
        async with Runtime(valkey.url, namespace, services=False) as runtime:
            await Sink.register(runtime, "sink", Sink)
            await runtime.add_subscription(TypeSubscription("default", "sink"))
            await runtime.publish_message(Note("n"), DEFAULT)
            await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
            runtime.start()
            notes = await runtime.agent_save_state(AgentId("sink", "default"))
    assert notes == {"notes": ["n", "n"]}


async def test_a_runtime_without_services_logs_one_warning(
    valkey: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Runtime(valkey.url, namespace) as runtime:
        await Echo.register(runtime, "echo", Echo)
        await runtime.send_message(Ask("hi"), AgentId("echo", "a"))
    assert caplog.text.count("weft up") == 1


async def test_a_reentrant_call_into_another_process_shares_the_state(
    runtime: Runtime, valkey: Server, namespace: str
) -> None:
    """Several reentrant calls reach either process, each with its own object."""
    keys = [str(n) for n in range(20)]
    async with Runtime(valkey.url, namespace, services=False) as other:
        for each in (runtime, other):
            await each.register_factory("ping", lambda: Ping("pong"))
            await each.register_factory("pong", lambda: Ping("ping"))
        asked = [runtime.send_message(5, AgentId("ping", key)) for key in keys]
        assert await asyncio.wait_for(asyncio.gather(*asked), SECONDS) == [15] * len(keys)
        states = [await other.agent_save_state(AgentId("ping", key)) for key in keys]
    assert states == [{"seen": [5, 3, 1]}] * len(keys)
