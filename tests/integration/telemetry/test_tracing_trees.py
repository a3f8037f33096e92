"""A task's spans stay one tree across partitions, timers, a redrive and a fenced process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.telemetry import trace_context
from runtime_core.wire.ids import instance_address, partition_of
from tests.fleet import Fleet, plain_redis, until
from tests.integration.telemetry.test_tracing import APP, WAIT, collected, ended, is_one_tree, line
from tests.servers.otlp_receiver import OtlpReceiver, Span
from tests.servers.process import Server
from weft import SubmitOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARTITIONS = 3


def trace_of(namespace: str, task: str) -> str:
    return f"{trace_context.of_task(namespace, task).trace:032x}"


async def test_a_task_is_one_tree_over_partitions(valkey: Server, namespace: str, tmp_path: Path) -> None:
    home = partition_of("spread", PARTITIONS)
    others = [place for place in range(PARTITIONS) if place != home]
    keys = [
        next(key for key in map(str, range(1000)) if partition_of(instance_address("clerk", key), PARTITIONS) == place)
        for place in others
    ]
    with OtlpReceiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "WEFT_PARTITIONS": str(PARTITIONS)}
        async with (
            Fleet(valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=6.0),
            Client.connect(valkey.url, namespace=namespace, partitions=PARTITIONS) as client,
        ):
            task = await client.submit("manager", keys, task_id="spread")
            assert (await task.result(timeout=WAIT)).status == "completed"

            def is_right(spans: Sequence[Span]) -> None:
                is_one_tree(spans)
                known = {span.id: span for span in spans}
                agent = "task manager > process agent > invoke_agent manager"
                clerk = f"{agent} > process agent"
                own = {f"{agent} > task clerk", f"{agent} > process record"}
                assert {line(span, known) for span in spans} == {
                    "task manager",
                    "task manager > process agent",
                    agent,
                    clerk,
                    f"{clerk} > invoke_agent clerk",
                    f"{clerk} > invoke_agent clerk > process tool",
                    f"{clerk} > invoke_agent clerk > process tool > execute_tool look",
                    *own,
                    "task manager > process record",
                }
                asked = [span for span in spans if span.name == "execute_tool look"]
                assert len(asked) == len(keys) + 1
                places = {span.attributes.get("messaging.destination.partition.id") for span in spans}
                assert places >= {str(place) for place in range(PARTITIONS)}
                # The turns that clerks have woken have links to those who answered in another partition.
                roots = {span.id for span in spans if not span.parent}
                woken = [each for each in spans if each.name == "process agent" and each.parent in roots]
                assert {known[span].name for each in woken for _, span in each.links} == {"invoke_agent clerk"}

            await collected(receiver, trace_of(namespace, "spread"), is_right)


async def test_a_reopened_task_is_still_one_tree(valkey: Server, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with OtlpReceiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        async with (
            Fleet(valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=6.0),
            Client.connect(valkey.url, namespace=namespace) as client,
        ):
            task = await client.submit(
                "reader", str(file), task_id="again", options=SubmitOptions(hooks={"error": ["alert"]})
            )
            assert (await task.result(timeout=WAIT)).status == "failed"
            file.write_text("found")
            letters = DeadLetters(client.buses)
            (letter,) = [each for each in await letters.newest(10) if each.task == "again"]
            await letters.redrive(letter.letter_id, reopen=True)
            assert (await (await client.task("again")).result(timeout=WAIT)).value() == "found"

            def is_right(spans: Sequence[Span]) -> None:
                is_one_tree(spans)
                (root,) = (span for span in spans if not span.parent)
                ends = [span for span in spans if span.name == "task reader"]
                assert Counter((span.parent, span.attributes["weft.status"]) for span in ends) == {
                    ("", "failed"): 1,
                    (root.id, "completed"): 1,
                }
                made = Counter(span.name for span in spans)
                # Attempts are under the turn that asks: two that failed, and the one that was driven again.
                assert (made["execute_tool read"], made["process record"]) == (3, 2)
                assert len({span.parent for span in spans if span.name == "process tool"}) == 1
                # The hooks of its first end are a separate task, which says whose end it was.
                hooks = [span for span in receiver.spans() if (root.trace, root.id) in span.links]
                assert Counter(span.name for span in hooks)["process agent"] == 1

            await collected(receiver, trace_of(namespace, "again"), is_right)


async def test_a_turn_that_was_fenced_sends_no_second_span_of_its_id(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    replicas = {"agent-handler": 2, "tool-handler": 1, "state-manager": 1, "trajectory-recorder": 1}
    with OtlpReceiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        trace = trace_of(namespace, "held")
        async with (
            Fleet(
                valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=2.0,
                replicas=replicas,
            ) as fleet,
            Client.connect(valkey.url, namespace=namespace) as client,
            plain_redis(valkey.port, text=True) as redis,
        ):  # fmt: skip
            await client.submit("held", str(file), task_id="held")
            waits = file.with_suffix(".waits")

            async def both_wait() -> bool:
                return waits.exists() and len(set(waits.read_text().split())) == 2

            async def one_waits() -> bool:
                return waits.exists() and bool(waits.read_text())

            await until(one_waits, WAIT, "the turn waits in one process")
            first = waits.read_text().split()[0]
            fleet.pause(first)
            await until(both_wait, WAIT, "another process does the turn again")
            file.touch()
            await ended(redis, namespace, "held")
            fleet.resume(first)

            def is_right(spans: Sequence[Span]) -> None:
                is_one_tree(spans)
                again = {span.attributes.get("weft.deliveries") for span in spans if span.name == "process agent"}
                assert 2 in again
                lost = [span for span in spans if span.name == "process agent" and span.error]
                assert len(lost) == 1, "the process that was fenced has told of it"

            await collected(receiver, trace, is_right)
        # All have sent what they had.
        is_one_tree(receiver.spans(trace))
