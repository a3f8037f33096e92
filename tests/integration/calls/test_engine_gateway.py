"""Gateways as processes, with an engine that is a folder: steps and results through kills, pauses and absences."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.apps.engines_app import LARGE_INPUTS
from tests.engine_backends.files import SLOW
from tests.engine_backends.folder import INLINE, alive
from tests.engine_backends.gateway import SPANS
from tests.engine_backends.world import WAIT, parent_of, world
from tests.servers.matrix import is_full
from tests.servers.process import Server
from weft import SubmitOptions

pytestmark = pytest.mark.timeout(300)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MIB = 1024 * 1024


async def test_a_step_runs_on_the_engine_and_each_way_to_fail_is_one_clear_error(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    spans_file = tmp_path / "spans"
    async with world(valkey, namespace, tmp_path, environ={SPANS: str(spans_file)}) as here:
        task = await here.client.submit("all", str(here.files.folder), options=SubmitOptions(traceparent=TRACEPARENT))
        value, unknown, wrong, unspeakable, third, refused, died, large = (await here.result(task)).value()
        assert value == 42
        assert unknown == "UnknownName: there is no engine function 'nobody_has_it'"
        assert wrong.startswith("InvalidInput: arguments.number: ")
        assert unspeakable.startswith("Invalid")
        assert "result" in unspeakable
        assert third == 3
        assert refused == "Unfit: not these numbers"
        assert died.startswith("WorkerDied: ")
        assert large["weft.reference"].startswith(f"file://{here.fleet.folder}/")
        raised = [line.split() for line in here.lines("raised")]
        assert [attempt for attempt, _ in raised] == ["1", "2", "3"]
        assert len({key for _, key in raised}) == 1, "the idempotency key is the same in each attempt"
        assert len(here.lines("died")) == 3
        # Each attempt that had ended was forgotten, so that none found the end of an earlier one.
        began = [line.split()[1] for line in here.lines("journal", "began")]
        assert len(set(began)) == len(began) == 11
        await here.until(
            lambda: {line.split()[1] for line in here.lines("journal", "forgot")} == set(began), "all is forgotten"
        )
        assert here.lines("journal", "attached") == []

    spans = [json.loads(line) for line in spans_file.read_text().splitlines()]
    taken = {span["context"]["span_id"]: span for span in spans if span["name"] == "process ray"}
    assert {span["parent_id"] for span in taken.values()} == {"0xb7ad6b7169203331"}
    assert {span["parent_id"] for span in spans if span["name"].startswith("engine ray")} <= taken.keys()
    [double] = [
        span for span in spans if span["name"] == "engine ray double" and "error.type" not in span["attributes"]
    ]
    assert double["attributes"] == {"weft.engine": "ray", "weft.engine.function": "double", "weft.run": "r/1"}
    refusal = next(span for span in spans if span["name"] == "engine ray refuses")
    assert refusal["attributes"]["error.type"] == "Unfit"


async def test_a_map_returns_the_results_of_its_items(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path) as here:
        task = await here.client.submit("maps", None)
        whole, some, failed, empty, large, unknown = (await here.result(task)).value()
        assert whole == [1, 2, 3]
        assert some == [1, "ValueError: 3 is odd", 2]
        assert failed == "ValueError: item 1: 3 is odd (2 of 3 failed)"
        assert empty == []
        # Each item by reference where it is large.
        assert (large[0], "weft.reference" in large[1], "weft.reference" in large[2]) == ("x", True, True)
        assert unknown == "UnknownName: there is no engine function 'nobody_has_it'"


async def test_large_inputs_go_by_reference(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path) as here:
        task = await here.client.submit("large_inputs", "ray")
        assert (await here.result(task)).value() == LARGE_INPUTS


async def test_the_cancel_of_a_task_stops_its_step_on_the_engine_and_no_other(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with world(valkey, namespace, tmp_path) as here:
        first, second = await here.held("first"), await here.held("second")
        await first.cancel()
        pid = int(here.lines("held", "first")[0].split()[2])
        await here.until(lambda: not alive(pid), "its worker has been stopped")
        await here.until(lambda: here.lines("journal", "forgot"), "it is forgotten")
        assert len(here.lines("journal", "stopped")) == 1
        here.open_gate()
        assert (await here.result(second)).value() == "second"


async def test_the_cancel_of_a_job_stops_its_step_on_the_engine_and_neither_its_task_nor_another_step(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with world(valkey, namespace, tmp_path) as here:
        other = await here.held("other")
        task = await here.client.submit("job", str(here.files.folder))
        await here.until(lambda: here.lines("held", "job"), "the job runs")
        pid = int(here.lines("held", "job")[0].split()[2])
        await task.send("cancel", None)
        await here.until(lambda: not alive(pid), "its worker has been stopped")
        await here.until(lambda: here.lines("journal", "forgot"), "it is forgotten")
        assert len(here.lines("journal", "stopped")) == 1
        await task.send("end", None)
        assert (await here.result(task)).value() == "the agent went on"
        here.open_gate()
        assert (await here.result(other)).value() == "other"
        assert len(here.lines("held", "job")) == 1, "it is not begun again"


async def test_a_step_outlives_the_driver_that_began_it(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path) as here:
        task = await here.held("held")
        os.kill(here.drivers()[-1], signal.SIGKILL)
        await here.until(lambda: here.lines("journal", "attached"), "another driver has found the step")
        here.open_gate()
        assert (await here.result(task)).value() == "held"
        assert len(here.lines("held")) == 1, "it ran once"
        assert len(here.drivers()) == 2


async def test_a_step_outlives_the_gateway_that_began_it(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path, gateways=2) as here:
        task = await here.held("held")
        driver = int(here.lines("journal", "began")[0].split()[2])
        [name] = [each for each in here.fleet.names("ray-gateway") if parent_of(driver) == here.fleet.members[each].pid]
        here.fleet.kill(name)
        await here.until(lambda: here.lines("journal", "attached"), "another gateway has found the step")
        await here.until(lambda: not alive(driver), "the driver has ended with its gateway")
        here.open_gate()
        assert (await here.result(task)).value() == "held"
        assert len(here.lines("held")) == 1, "it ran once"
        assert here.lines("journal", "stopped") == []


async def test_a_stopping_gateway_leaves_its_steps_to_others(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path, gateways=2, environ={"WEFT_SHUTDOWN_SECONDS": "5"}) as here:
        task = await here.held("held")
        driver = int(here.lines("journal", "began")[0].split()[2])
        [name] = [each for each in here.fleet.names("ray-gateway") if parent_of(driver) == here.fleet.members[each].pid]
        member = here.fleet.members[name]
        member.killed = True  # its end is no surprise
        os.kill(member.pid, signal.SIGTERM)
        await here.until(lambda: here.lines("journal", "attached"), "another gateway has found the step")
        await here.until(lambda: member.ended_with, "it has ended")
        assert member.ended_with == [0]
        assert here.lines("journal", "stopped") == []
        here.open_gate()
        assert (await here.result(task)).value() == "held"
        assert len(here.lines("held")) == 1, "it ran once"


async def test_a_gateway_that_was_declared_dead_stops_nothing(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path, gateways=2) as here:
        task = await here.held("held")
        driver = int(here.lines("journal", "began")[0].split()[2])
        [name] = [each for each in here.fleet.names("ray-gateway") if parent_of(driver) == here.fleet.members[each].pid]
        here.fleet.pause(name)
        await here.until(lambda: here.lines("journal", "attached"), "another gateway has found the step")
        here.fleet.resume(name)
        member = here.fleet.members[name]
        await here.until(lambda: "declared dead" in member.text(), "it knows that it was declared dead")
        here.open_gate()
        assert (await here.result(task)).value() == "held"
        assert here.lines("journal", "stopped") == []
        assert len(here.lines("held")) == 1, "it ran once"


async def test_steps_wait_for_an_unavailable_engine_and_report_it(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with world(valkey, namespace, tmp_path, up=False) as here:
        task = await here.step("double", number=4)
        events = []
        async with asyncio.timeout(WAIT):
            async for event in task.stream():
                events.append(event)
                if "waiting" in str(event.data):
                    here.files.up()
        told = [event.data for event in events if "waiting" in str(event.data)]
        assert len(told) == 1, told
        assert "touch the file up" in str(told[0]) or "driver" in str(told[0]) or "connected" in str(told[0])
        assert (await here.result(task)).value() == 8
        gateway = here.fleet.members["ray-gateway-1"]
        await here.until(lambda: "connected to Ray: version 1.0, at a folder" in gateway.text(), "the log tells of it")


async def test_a_step_fails_after_the_wait_that_its_task_allows(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with world(valkey, namespace, tmp_path, up=False) as here:
        gateway = here.fleet.members["ray-gateway-1"]
        await here.until(lambda: "touch the file up" in gateway.text(), "the log says why")
        wanted = {"function": "double", "arguments": {"number": 4}}
        task = await here.client.submit("step", wanted, options=SubmitOptions(engine_wait_seconds=0.0))
        ended = await here.result(task)
        assert ended.error is not None
        assert "EngineUnavailable" in str(ended.error)
        assert "touch the file up" in ended.error["message"]


async def test_a_starting_engine_does_not_count_as_disconnected(valkey: Server, namespace: str, tmp_path: Path) -> None:
    environ = {SLOW: "1", "WEFT_METRICS_PORT": "0"}
    async with world(valkey, namespace, tmp_path, up=False, environ=environ) as here:
        wanted = {"function": "double", "arguments": {"number": 4}}
        task = await here.client.submit("step", wanted, options=SubmitOptions(engine_wait_seconds=0.2))
        gateway = here.fleet.members["ray-gateway-1"]
        waits = 'weft_engine_steps_total{end="waits",engine="ray"}'
        await here.until(lambda: metrics(gateway.text()).get(waits, 0) >= 3, "it has waited three times as long")
        here.files.up()
        assert (await here.result(task)).value() == 8


async def test_a_lost_spark_step_is_retried_once_and_then_reported(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with world(valkey, namespace, tmp_path, engine="spark") as here:
        task = await here.held("held", "spark")
        os.kill(here.drivers()[-1], signal.SIGKILL)
        await here.until(lambda: here.lines("journal", "attached"), "it is driven again")
        os.kill(here.drivers()[-1], signal.SIGKILL)
        ended = await here.result(task)
        assert ended.error is not None
        assert "EngineLost" in str(ended.error)
        assert len(here.lines("journal", "attached")) == 1
        # A second task is served by the third driver.
        assert (await here.result(await here.step("double", "spark", number=3))).value() == 6


@pytest.mark.slow
async def test_thousands_of_steps_leave_nothing_behind(valkey: Server, namespace: str, tmp_path: Path) -> None:
    environ = {INLINE: "1", "WEFT_METRICS_PORT": "0", "WEFT_PARTITIONS": "2"}
    async with world(valkey, namespace, tmp_path, environ=environ) as here:
        gateway = here.fleet.members["ray-gateway-1"]

        async def steps(thousands: int) -> tuple[int, float]:
            """Return how much memory the gateway and its driver use after this many steps."""
            for _ in range(thousands):
                task = await here.client.submit("fan", 1000)
                assert (await here.result(task)).value() == 999_000
            shown = metrics(gateway.text())
            assert shown['weft_engine_connected{engine="ray"}'] == 1
            assert shown['weft_engine_driver_starts_total{engine="ray"}'] == 1
            assert shown['weft_engine_running{engine="ray"}'] == 0
            memory = shown['weft_engine_driver_memory_bytes{engine="ray"}'] + shown["process_resident_memory_bytes"]
            return int(shown['weft_engine_steps_total{end="completed",engine="ray"}']), memory

        count, before = await steps(2)
        assert count == 2_000
        more = 8 if is_full() else 2
        count, after = await steps(more)
        assert count == 2_000 + 1_000 * more
        assert after - before < 24 * MIB


def metrics(log: str) -> dict[str, float]:
    """Return the metrics of a service, by the address in its log. It must be healthy and ready, too."""
    found = re.findall(r"metrics and health on (http://\S+)", log)[-1]
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{found}/{path}", timeout=WAIT) as answer:
            assert answer.status == 200
    with urllib.request.urlopen(f"{found}/metrics", timeout=WAIT) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
