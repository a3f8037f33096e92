"""Messages that wait for a busy agent or for one that no process runs: the log, `weft doctor` and `weft agents`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.cli.main import main
from runtime_core.errors import InvalidInput
from runtime_core.integrations.actors import host, watch
from runtime_core.state_manager import backlog, stuck
from runtime_core.state_manager.backlog import agents_of_runtimes, drop_agent, find_lasting_waits
from tests.integration.integrations.actors.agents import DEFAULT, Answer, Ask, Echo, Gate, Note, Sink
from tests.servers.process import Server
from tests.servers.users import documented_users
from weft.runtime import AgentId, Runtime, TypeSubscription

SECONDS = 60
ECHO, GATE = AgentId("echo", "one"), AgentId("gate", "one")
Make = Callable[[], Runtime]


@pytest.fixture
async def make(valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Runtimes of one namespace that speak of waits soon."""
    for module, name in ((host, "LOOK_SECONDS"), (watch, "WAIT_SECONDS"), (watch, "FIRST_CHECK_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(backlog, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("runtime_core.integrations.actors.runtime.WAIT_SECONDS", 0.05)
    made: list[Runtime] = []

    def one() -> Runtime:
        made.append(Runtime(valkey.url, namespace, services=False, lease_seconds=1.0))
        return made[-1]

    yield one
    for runtime in made:
        await runtime.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == watch.__name__]


async def until_said(caplog: pytest.LogCaptureFixture, count: int = 1) -> list[str]:
    async with asyncio.timeout(SECONDS):
        while len(said(caplog)) < count:
            await asyncio.sleep(0.01)
    return said(caplog)


async def test_the_log_and_the_doctor_name_who_waits_for_whom(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runtime = make()
    await Gate.register(runtime, "gate", Gate)
    runtime.start()
    gate = await runtime.try_get_underlying_agent_instance(GATE, Gate)
    first = asyncio.create_task(runtime.send_message(Ask("first"), GATE))
    await asyncio.wait_for(gate.entered.wait(), SECONDS)
    second = asyncio.create_task(runtime.send_message(Ask("second"), GATE, sender=AgentId("other", "key")))
    (line,) = await until_said(caplog)
    assert line.startswith("1 message waits for gate/one: it handles Ask (task ")
    assert "The first one is Ask of other/key (task " in line
    assert "let the type interleave" in line
    (wait,) = await find_lasting_waits(await runtime.broker())
    assert (wait.agent, wait.count, wait.unserved) == ("gate/one", 1, False)
    gate.released.set()
    await asyncio.wait_for(asyncio.gather(first, second), SECONDS)
    assert await find_lasting_waits(await runtime.broker()) == []
    assert said(caplog) == [line]


async def test_the_log_says_that_no_process_runs_a_recipient(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    first, client, second = make(), make(), make()
    await Echo.register(first, "echo", Echo)
    first.start()
    assert await first.send_message(Ask("hi"), ECHO) == Answer("hi", by="echo/one")
    await first.close()
    asked = asyncio.create_task(client.send_message(Ask("hi"), ECHO))
    (line,) = await until_said(caplog)
    assert line.startswith("a request waits for echo in the namespace")
    await Echo.register(second, "echo", Echo)
    second.start()
    assert await asyncio.wait_for(asked, SECONDS) == Answer("hi", by="echo/one")


async def left_behind(make: Make) -> Runtime:
    """A program that waits to be idle, for a message to a type that another one has left."""
    gone, runtime = make(), make()
    await Sink.register(gone, "sink", Sink)
    await gone.add_subscription(TypeSubscription("default", "sink"))
    await gone.publish_message(Note("left"), DEFAULT)
    await gone.close()
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    assert await runtime.send_message(Ask("hi"), ECHO) == Answer("hi", by="echo/one")  # so it reads its stream by now
    return runtime


async def test_messages_that_keep_a_runtime_busy_are_named_and_can_be_dropped(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    runtime = await left_behind(make)
    idle = asyncio.create_task(runtime.stop_when_idle())
    (line,) = await until_said(caplog)
    assert line.startswith("stop_when_idle waits for the namespace")
    assert line.endswith("1 message waits for sink: no process runs it; weft agents drop sink forgets it")
    buses = await runtime.broker()
    assert [(each.name, each.processes, each.messages) for each in await agents_of_runtimes(buses)] == [
        ("echo", 1, 0),
        ("sink", 0, 1),
    ]
    (wait,) = await find_lasting_waits(buses)
    assert (wait.agent, wait.unserved) == ("sink", True)
    with pytest.raises(InvalidInput, match="'echo' runs in 1 process: stop it there first"):
        await drop_agent(buses, "echo")
    with pytest.raises(InvalidInput, match="there is no agent type 'snik': choose from echo, sink"):
        await drop_agent(buses, "snik")
    assert await drop_agent(buses, "sink") == 1
    await asyncio.wait_for(idle, SECONDS)
    assert [each.name for each in await agents_of_runtimes(buses)] == ["echo"]
    await runtime.publish_message(Note("for nobody"), DEFAULT)
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)


async def test_a_type_whose_mailbox_was_dropped_starts_empty(make: Make) -> None:
    gone, runtime = make(), make()
    await Echo.register(gone, "echo", Echo)
    for text in ("one", "two"):
        await gone.publish_message(Ask(text), DEFAULT)
    asked = [asyncio.create_task(gone.send_message(Ask(text), ECHO)) for text in ("one", "two")]
    async with asyncio.timeout(SECONDS):
        while [each.messages for each in await agents_of_runtimes(await gone.broker())] != [2]:
            await asyncio.sleep(0.01)
    assert await drop_agent(await gone.broker(), "echo") == 2
    for each in asked:
        with pytest.raises(Exception, match="was dropped"):
            await asyncio.wait_for(each, SECONDS)
    await Echo.register(runtime, "echo", Echo)
    runtime.start()
    assert await asyncio.wait_for(runtime.send_message(Ask("three"), ECHO), SECONDS) == Answer("three", by="echo/one")


async def notes_of(runtime: Runtime) -> list[str]:
    return (await runtime.try_get_underlying_agent_instance(AgentId("sink", "default"), Sink)).notes


@pytest.mark.parametrize("start_first", [True, False])
async def test_a_type_dropped_by_another_program_returns_when_its_own_starts(make: Make, start_first: bool) -> None:
    """A program that has registered a type and does not run yet looks like one that is gone."""
    later, other = make(), make()
    await Sink.register(later, "sink", Sink)
    await later.add_subscription(TypeSubscription("default", "sink"))
    buses = await other.broker()
    if start_first:
        later.start()
    outcomes = await asyncio.gather(*(drop_agent(buses, "sink") for _ in range(3)), return_exceptions=True)
    assert all(each == 0 or isinstance(each, InvalidInput) for each in outcomes), outcomes
    if not start_first:
        later.start()
    async with asyncio.timeout(SECONDS):
        while (
            [each.processes for each in await agents_of_runtimes(buses) if each.name == "sink"] != [1]
            or {each.topic for each in await buses[0].subscriptions()} != {"default", "sink:"}
        ):  # fmt: skip
            await asyncio.sleep(0.05)
    other.start()
    await other.publish_message(Note("to the later one"), DEFAULT)
    await asyncio.wait_for(other.stop_when_idle(), SECONDS)
    assert await notes_of(later) == ["to the later one"]
    (sink,) = [each for each in await agents_of_runtimes(buses) if each.name == "sink"]
    assert (sink.processes, sink.messages) == (1, 0)


async def test_messages_to_a_returning_type_survive_the_end_of_its_drop(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is registered and used again before the drop has cancelled what waited for the gone program."""
    gone, later = make(), make()
    await Sink.register(gone, "sink", Sink)
    await gone.add_subscription(TypeSubscription("default", "sink"))
    await gone.publish_message(Note("old"), DEFAULT)
    await gone.close()
    buses = await later.broker()
    listed = stuck.open_runs

    async def comes_back(bus: EventBus) -> dict[tuple[str, str], dict[bytes, bytes]]:
        await asyncio.sleep(0.01)  # ids of entries are milliseconds
        await Sink.register(later, "sink", Sink)
        await later.add_subscription(TypeSubscription("default", "sink"))
        await later.publish_message(Note("new"), DEFAULT)
        return await listed(bus)

    monkeypatch.setattr(backlog, "open_runs", comes_back)
    assert await drop_agent(buses, "sink") == 1
    later.start()
    await asyncio.wait_for(later.stop_when_idle(), SECONDS)
    assert await notes_of(later) == ["new"]


async def test_the_operator_may_list_and_drop_types(
    make: Make, valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = await left_behind(make)
    monkeypatch.setenv("WEFT_NAMESPACE", namespace)
    async with documented_users(valkey, namespace, "operator") as urls:
        monkeypatch.setenv("WEFT_REDIS_URL", urls["operator"])
        assert await asyncio.to_thread(main, ["agents", "list", "--json"]) == 0
        assert [row["agent"] for row in json.loads(capsys.readouterr().out)] == ["echo", "sink"]
        assert await asyncio.to_thread(main, ["agents", "drop", "echo"]) == 1
        assert "'echo' runs in 1 process: stop it there first" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["agents", "drop", "--gone"]) == 0
        assert capsys.readouterr().out == "dropped sink: cancelled 1 task\n"
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)


async def test_the_command_lists_and_drops_types(
    make: Make, valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = await left_behind(make)
    monkeypatch.setenv("WEFT_REDIS_URL", valkey.url)
    monkeypatch.setenv("WEFT_NAMESPACE", namespace)
    assert await asyncio.to_thread(main, ["agents", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"agent": "echo", "processes": 1, "messages": 0, "subscriptions": ["echo:*"]},
        {"agent": "sink", "processes": 0, "messages": 1, "subscriptions": ["default", "sink:*"]},
    ]
    await asyncio.to_thread(main, ["doctor", "--json"])
    checks = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert not checks["waits"]["ok"]
    assert checks["waits"]["message"].startswith("1 message waits for sink: no process runs it")
    assert await asyncio.to_thread(main, ["agents", "drop"]) == 2
    assert "give either agent types or --gone" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["agents", "drop", "--gone"]) == 0
    assert capsys.readouterr().out == "dropped sink: cancelled 1 task\n"
    await asyncio.to_thread(main, ["doctor", "--json"])
    checks = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["waits"] == {
        "check": "waits", "ok": True, "message": "no message to an agent of a runtime has waited long"
    }  # fmt: skip
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
