"""The metrics of real services, while replicas come and go and the broker is unavailable."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime_core.client.client import Client
from runtime_core.telemetry import names
from runtime_core.telemetry.names import MetricName
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

SECONDS = 90.0
LISTENS = re.compile(r"metrics and health on (http://\S+)")
LEADING = ("state-manager", "trajectory-recorder")
MEASURED = tuple(metric for metric in names.ALL if metric.by == names.LEADER and metric is not names.NAMES_UNSERVED)
"""What a leader shows of each partition, even where all is well."""


class Page:
    """One scrape of a process, parsed by the Prometheus client."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def series(self) -> set[str]:
        """Return our series, each with its labels."""
        return {f"{sample.name} {sample.labels}" for sample in self.samples if sample.name.startswith("weft_")}

    def has(self, *metrics: MetricName) -> bool:
        shown = {sample.name for sample in self.samples}
        return any(metric.name in shown for metric in metrics)

    def sum(self, name: MetricName | str, **labels: str) -> float:
        """Return the value of the series with these labels."""
        wanted = name if isinstance(name, str) else name.name
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == wanted and all(sample.labels.get(label) == value for label, value in labels.items())
        )


async def pages(fleet: Fleet) -> dict[str, Page]:
    """Scrape every process that answers: a new one may not listen yet."""
    found = {}
    for member in fleet.members.values():
        if not (urls := LISTENS.findall(member.text())) or not member.running or member.paused:
            continue
        try:
            text = await asyncio.to_thread(_get, f"{urls[-1]}/metrics")
        except OSError:
            continue
        found[member.name] = Page(text)
    return found


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # a service of this test
        return str(answer.read().decode())


def total(found: Mapping[str, Page], name: MetricName | str, **labels: str) -> float:
    return sum(page.sum(name, **labels) for page in found.values())


def showing(found: Mapping[str, Page]) -> list[str]:
    """Return the processes that export a partition."""
    return [name for name, page in found.items() if page.has(*MEASURED)]


def connected(found: Mapping[str, Page]) -> list[bool]:
    return [page.sum(names.BROKER_CONNECTED, service=name.rpartition("-")[0]) == 1 for name, page in found.items()]


async def seen(fleet: Fleet, check: Callable[[dict[str, Page]], bool], what: str) -> dict[str, Page]:
    """Scrape all running processes until `check` is true."""
    found: dict[str, Page] = {}

    async def look() -> bool:
        found.clear()
        found.update(await pages(fleet))
        return len(found) == sum(not member.paused for member in fleet.members.values()) and check(found)

    await until(look, SECONDS, what)
    return found


def fleet_of(server: Server, namespace: str, folder: Path) -> Fleet:
    return Fleet(
        server.url,
        namespace,
        folder,
        replicas={"agent-handler": 1, "tool-handler": 1, "state-manager": 2, "trajectory-recorder": 2},
        environ={"WEFT_METRICS_PORT": "0"},
    )


async def test_the_metrics_of_services_match_the_events(own_server: OwnServer, namespace: str, tmp_path: Path) -> None:
    server = own_server(append="always")
    async with (
        fleet_of(server, namespace, tmp_path) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
        plain_redis(server.port) as redis,
    ):
        for number in range(5):
            await (await client.submit("use", {"tool": "slow", "arguments": {"seconds": 0}})).result(timeout=SECONDS)
            await (await client.submit("echo", number)).result(timeout=SECONDS)
        failing = await client.submit("use", {"tool": "hangs", "arguments": {}})
        assert (await failing.result(timeout=SECONDS)).status == "failed"
        asked = await client.submit("asks", "well?")

        def all_told(found: dict[str, Page]) -> bool:
            return (
                total(found, names.TASKS_ENDED) == 11
                and total(found, names.TASKS_ADMITTED) == 12
                and total(found, names.TASKS_OPEN) == 1
                and total(found, names.AGENT_TURNS, agent="asks", outcome="suspended") >= 1
                and total(found, names.DEAD_LETTERS_KEPT) == 1
                and total(found, names.STREAM_LAG) == 0
                and total(found, names.RECORDED_ENTRIES) >= 11
                and total(found, names.STREAM_READERS, stream="agent") == 1
                and all(connected(found))
                and all(total(found, names.IS_LEADER, service=service) == 1 for service in LEADING)
            )

        found = await seen(fleet, all_told, "all that has happened is shown")
        [leader] = showing(found)
        assert leader.startswith("state-manager")
        assert all(found[leader].has(metric) for metric in MEASURED)
        assert found[leader].sum(names.IS_LEADER) == 1
        for name, page in found.items():
            service = name.rpartition("-")[0]
            assert page.sum(names.BUILD_INFO, service=service) == 1
            assert page.sum(names.HEARTBEAT_AGE) < SECONDS
            assert page.has(names.STALLED)
            assert page.has(names.EVENTS_HANDLED)
        assert total(found, names.TASKS_ENDED, agent="use", status="failed") == 1
        assert total(found, names.TASKS_ENDED, agent="echo", status="completed") == 5
        # Those of agents that no app has declared, too: a series that begins with its first failure shows no increase.
        assert ("other", "failed") in {
            (sample.labels["agent"], sample.labels["status"])
            for sample in found[leader].samples
            if sample.name == names.TASKS_ENDED.name
        }
        assert total(found, f"{names.TASK_SECONDS.name}_count", status="completed") == 10
        assert total(found, names.AGENT_TURNS, agent="echo", outcome="completed") == 5
        assert total(found, names.AGENT_TURNS, agent="asks", outcome="suspended") >= 1
        assert total(found, names.AGENT_TURNS, agent="use", outcome="failed") == 1
        assert total(found, f"{names.AGENT_TURN_SECONDS.name}_count", agent="echo") == 5
        assert total(found, names.TOOL_CALLS, tool="slow", outcome="completed") == 5
        assert total(found, names.TOOL_CALLS, tool="hangs", outcome="retried") == 2
        assert total(found, names.TOOL_CALLS, tool="hangs", outcome="failed") == 1
        assert total(found, f"{names.TOOL_CALL_SECONDS.name}_count", tool="hangs") == 3
        assert total(found, f"{names.RECORDER_COMMIT_SECONDS.name}_count") >= 1
        assert total(found, names.DEAD_LETTERS) == total(found, names.DEAD_LETTERS, service="tool-handler") == 1
        assert total(found, names.BROKER_APPEND_ONLY_OK) == 1
        # Where nothing has happened yet there is a 0 that it can rise from.
        assert {sample.labels["reason"] for page in found.values() for sample in page.samples
                if sample.name == names.DEAD_LETTERS.name} >= {"attempts_used_up", "poison", "rejected"}  # fmt: skip
        assert {sample.labels["reason"] for sample in found[leader].samples
                if sample.name == names.TASKS_REFUSED.name} == set(names.REFUSALS)  # fmt: skip

        # Names, keys and ids that anybody may send make no series.
        before = set[str]().union(*(page.series() for page in found.values()))
        many = 500
        for number in range(many):
            agent = f"nobody-{number}" if number % 2 else "echo"
            data = f'{{"agent":"{agent}","input":1,"task_id":"t-{number}","key":"key-{number}"}}'
            event = ("id", f"event-{number}", "type", "weft.task.submit", "source", f"source-{number}")
            await redis.execute_command("XADD", f"{namespace}:tasks", "*", *event, "data", data)

        for data in ("[]", '{"agent":"echo","input":"other"}'):
            event = ("id", "event-0", "type", "weft.task.submit", "source", "source-0")
            await redis.execute_command("XADD", f"{namespace}:tasks", "*", *event, "data", data)

        def counted(found: dict[str, Page]) -> bool:
            refused = total(found, names.TASKS_REFUSED, reason="unknown_agent")
            return (
                refused == many / 2
                and total(found, names.TASKS_REFUSED, reason="invalid") == 1
                and total(found, names.TASKS_REFUSED, reason="duplicate_id") == 1
                and total(found, names.TASKS_ENDED, agent="echo") == 5 + many / 2
                and len(showing(found)) == 1
            )

        found = await seen(fleet, counted, "each was refused or done")
        added = set[str]().union(*(page.series() for page in found.values())) - before
        # An outcome may be the first of its kind: a counter, or a histogram with all its buckets.
        assert len(added) < many / 10, added
        assert not [series for series in added if re.search(r"'(nobody|event|t|key|source)-\d", series)]
        # A turn within its time limit is no stall, however slow it is.
        assert total(found, names.STALLED, service="agent-handler") == 0
        await asked.cancel()


async def test_one_replica_exports_a_partition_and_none_without_a_broker(
    own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    server = own_server(append="always")
    async with (
        fleet_of(server, namespace, tmp_path) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        await (await client.submit("echo", 1)).result(timeout=SECONDS)

        def one(found: dict[str, Page]) -> bool:
            """Return whether one process exports the partition, with the broker's count continued."""
            return len(showing(found)) == 1 and total(found, names.TASKS_ADMITTED) == 1

        [first] = showing(await seen(fleet, one, "one replica shows the partition"))

        def by_the_other(found: dict[str, Page]) -> bool:
            return one(found) and showing(found) != [first]

        # Paused, it is declared dead; awake again it must notice that by itself.
        fleet.pause(first)
        await seen(fleet, by_the_other, "the other replica shows the partition")
        fleet.resume(first)
        [second] = showing(await seen(fleet, by_the_other, "the one that has lost the lead shows nothing"))
        fleet.kill(second)  # it is started again, and either may lead then
        await seen(fleet, one, "one replica shows the partition again")

        server.kill()
        found = await seen(
            fleet, lambda found: not any(connected(found)) and not showing(found), "what cannot be known is not shown"
        )
        assert total(found, names.IS_LEADER) == 0
        server.start()
        await seen(fleet, lambda found: all(connected(found)) and one(found), "all is shown again")
