"""One task is one tree of spans over all services, sent to a real receiver; without settings, nothing is sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime_core.telemetry import trace_context
from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.openai_server.driver import OpenAIServer, answer
from tests.servers.otlp_receiver import OtlpReceiver, Span
from tests.servers.process import Server

APP = "tests.apps.traces_app:app"
WAIT = 90.0
PUBLISHER = "b7ad6b7169203331"
SERVICES = {"agent-handler", "tool-handler", "state-manager", "trajectory-recorder"}
PRODUCER, CONSUMER = 4, 5


def traceparent(trace: str, *, sampled: bool = True) -> str:
    return f"00-{trace}-{PUBLISHER}-{'01' if sampled else '00'}"


async def submit(redis: PlainRedis, namespace: str, task: str, agent: str, input: object, **fields: str) -> None:
    data = json.dumps({"agent": agent, "input": input, "task_id": task})
    given = {"type": "weft.task.submit", "id": task, "source": "shop", "data": data, **fields}
    await redis.xadd(f"{namespace}:tasks", given)


async def ended(redis: PlainRedis, namespace: str, *tasks: str) -> None:
    for task in tasks:

        async def is_over(key: str = f"{namespace}:{{0}}:task:{task}") -> bool:
            return await redis.hget(key, "status") in ("completed", "failed")

        await until(is_over, WAIT, f"{task} ends")
        assert await redis.hget(f"{namespace}:{{0}}:task:{task}", "status") == "completed"


async def collected(receiver: OtlpReceiver, trace: str, check: Callable[[Sequence[Span]], None]) -> list[Span]:
    """Return the spans of a trace once `check` passes: each service sends its spans with a delay."""
    deadline = time.monotonic() + WAIT
    while True:
        spans = receiver.spans(trace)
        try:
            check(spans)
            return spans
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


def is_one_tree(spans: Sequence[Span], root: str = "") -> None:
    """Check that each span's parent is among them; `root` is the publisher's span, outside."""
    ids = Counter(span.id for span in spans)
    assert [id for id, count in ids.items() if count > 1] == []
    tops = [span for span in spans if span.parent not in ids]
    assert [(span.name, span.parent) for span in tops if span.parent != root] == []
    assert len(tops) == 1


def line(span: Span, spans: Mapping[str, Span]) -> str:
    parent = spans.get(span.parent)
    return span.name if parent is None else f"{line(parent, spans)} > {span.name}"


@pytest.mark.slow
async def test_a_task_is_one_tree_over_all_services(
    valkey: Server, openai_server: OpenAIServer, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(answer("Rain."))
    told, quiet, killed = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319d", tmp_path / "go"
    with OtlpReceiver() as receiver:
        environ = {
            **openai_server.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "WEFT_LOG_FORMAT": "json",
        }
        async with (
            Fleet(valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=6.0) as fleet,
            plain_redis(valkey.port, text=True) as redis,
        ):
            answers = f"{namespace}-answers"
            await submit(
                redis, namespace, "told", "desk", "Bern", traceparent=traceparent(told), tracestate="a=1",
                replyto=answers,
            )  # fmt: skip
            await submit(redis, namespace, "quiet", "desk", "Ulm", traceparent=traceparent(quiet, sampled=False))
            await submit(redis, namespace, "own", "tracer", "Ulm", traceparent=traceparent(quiet, sampled=False))
            await submit(redis, namespace, "unsaid", "held", str(killed), traceparent="00-what-ever-01")
            await ended(redis, namespace, "told", "quiet", "own")
            spans = await collected(receiver, told, is_right)

            unsaid = f"{trace_context.of_task(namespace, 'unsaid').trace:032x}"

            async def first_turn_is_sent() -> bool:
                return killed.with_suffix(".waits").exists() and any(
                    span.name == "process agent" for span in receiver.spans(unsaid)
                )

            await until(first_turn_is_sent, WAIT, "the first turn of the second task is in the collector")
            fleet.kill("agent-handler-1")
            killed.touch()
            await ended(redis, namespace, "unsaid")
            others = await collected(receiver, unsaid, is_right_after_a_kill)
            replies = [fields for _, fields in await redis.xrange(answers)]
            await redis.delete(answers)
            logs = fleet.logs(1_000_000)
        assert receiver.spans(quiet) == []
        # Without their task's trace, the spans of the app's own code would each be a new one.
        assert {"asks", "looks", "has found"} & {span.name for span in receiver.spans()} == set()
        assert receiver.encodings == {"gzip"}

    assert {span.service for span in others} == SERVICES
    # What clients are told of a traced task is in its trace.
    assert {reply["type"] for reply in replies} == {"weft.task.accepted", "weft.task.completed"}
    admitted = next(span for span in spans if span.name == "process tasks")
    assert {reply["traceparent"] for reply in replies} == {f"00-{told}-{admitted.id}-01"}
    of_users(logs, spans, told, quiet)


def is_right(spans: Sequence[Span]) -> None:
    is_one_tree(spans, PUBLISHER)
    assert {span.service for span in spans} == SERVICES
    known = {span.id: span for span in spans}
    admitted = "process tasks"
    turn, agent = f"{admitted} > process agent", f"{admitted} > process agent > invoke_agent desk"
    tool = f"{agent} > process tool"
    asker = f"{agent} > process agent"
    # Turns that are one after the other: how many there are depends on what comes in together.
    assert {line(span, known) for span in spans} == {
        admitted,
        turn,
        agent,
        tool,
        f"{tool} > execute_tool look",
        asker,
        f"{asker} > invoke_agent asker",
        f"{asker} > invoke_agent asker > chat gpt-test",
        f"{agent} > engine local count",
        f"{admitted} > task desk",
        f"{admitted} > process record",
    }
    made = Counter(span.name for span in spans)
    assert (made["execute_tool look"], made["chat gpt-test"], made["process record"], made["task desk"]) == (2, 1, 1, 1)
    # The turns after the first have links to what has brought their results: two calls of a tool, one agent.
    linked = {known[span].name for each in spans if each.name == "process agent" for _, span in each.links}
    assert linked == {"execute_tool look", "invoke_agent asker"}
    took = next(span for span in spans if span.name == "process tool")
    assert took.kind == CONSUMER
    assert {name: took.attributes[name] for name in sorted(took.attributes) if name != "messaging.client.id"} == {
        "messaging.consumer.group.name": "tool-handler",
        "messaging.destination.name": "tool",
        "messaging.destination.partition.id": "0",
        "messaging.message.conversation_id": "told",
        "messaging.message.id": took.attributes["messaging.message.id"],
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.system": "redis",
        "weft.attempt": 1,
        "weft.deliveries": 1,
        "weft.run": took.attributes["weft.run"],
    }
    assert took.resource["service.instance.id"] == "tool-handler-1"
    assert took.resource["deployment.environment.name"] == "test"
    assert not any(span.error for span in spans)


def is_right_after_a_kill(spans: Sequence[Span]) -> None:
    """A task without a valid trace from its publisher is the root."""
    is_one_tree(spans)
    (root,) = (span for span in spans if not span.parent)
    assert (root.name, root.service, root.attributes["weft.status"]) == ("task held", "state-manager", "completed")
    assert {span.name for span in spans} >= {
        "process tasks",
        "execute_tool look",
        "process record",
        "invoke_agent held",
    }
    again = [
        span for span in spans if span.name == "process agent" and int(str(span.attributes["weft.deliveries"])) > 1
    ]
    assert {(span.attributes["weft.attempt"], len(span.links)) for span in again} == {(1, 1)}


def of_users(logs: str, spans: Sequence[Span], told: str, quiet: str) -> None:
    """Log lines of the app's code have the task and span, even from a tool's thread."""
    lines: list[dict[str, Any]] = [json.loads(each) for each in logs.splitlines() if '"traces_app"' in each]
    found = [each for each in lines if each["task_id"] == "told"]
    at = {span.id: span.name for span in spans}
    assert Counter((each["message"], at[each["span_id"]]) for each in found) == {
        ("asked about Bern", "invoke_agent desk"): 1,
        ("looking for a", "execute_tool look"): 1,
        ("looking for b", "execute_tool look"): 1,
    }
    assert {each["trace_id"] for each in found} == {told}
    assert {each["trace_id"] for each in lines if each["task_id"] == "quiet"} == {quiet}
    assert all(each["run_id"].startswith("r") for each in found)


@pytest.mark.slow
async def test_without_tracing_nothing_is_loaded_or_added(
    own_valkey: Server, openai_server: OpenAIServer, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(answer("Rain."))
    environ = {**openai_server.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    async with (
        Fleet(own_valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=3.0) as fleet,
        plain_redis(own_valkey.port, text=True) as redis,
        redis.monitor() as seen,
    ):
        await submit(redis, namespace, "off", "desk", "Bern")
        calls: list[str] = []
        async with asyncio.timeout(WAIT):
            while not any("\\ncompleted\\n" in call or "completed\\n" in call for call in calls):
                calls.append((await seen.next_command())["command"])
        await ended(redis, namespace, "off")
        logs = fleet.logs(10_000_000)
    assert any("XADD" in call for call in calls)
    assert [call for call in calls if "traceparent" in call] == []
    assert "runtime_core.telemetry.spans" in logs
    for module in ("opentelemetry.sdk.metrics._internal", "opentelemetry.sdk.trace", "opentelemetry.exporter"):
        assert module not in logs


@pytest.mark.slow
async def test_an_unreachable_collector_costs_one_log_line_and_no_task(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    file.touch()
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    environ["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    async with (
        Fleet(valkey.url, namespace, tmp_path / "fleet", app=APP, environ=environ, lease_seconds=3.0) as fleet,
        plain_redis(valkey.port, text=True) as redis,
    ):
        for number in range(3):
            await submit(redis, namespace, f"t{number}", "held", str(file))
        await ended(redis, namespace, "t0", "t1", "t2")

        async def is_told() -> bool:
            return "spans are lost" in fleet.logs(1_000_000)

        await until(is_told, WAIT, "a line says that spans are lost")
    for name in fleet.names():
        lost = [each for each in fleet.members[name].text().splitlines() if "spans are lost" in each]
        assert len(lost) <= 1, lost
    assert "Traceback" not in fleet.logs(1_000_000)
