"""Every query of dashboards and alerts returns series in a real Prometheus that scrapes real services under load.

The gateways are real, and their engine is a folder (tests/engine_backends): they measure the same with any engine.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.observability.dashboards.pages import FOLDER
from runtime_core.client.client import Client
from runtime_core.state_manager.publishers import Publisher, Publishers
from tests.conftest import OwnServer
from tests.engine_backends.files import FOLDER as ENGINE_FOLDER
from tests.engine_backends.files import Files
from tests.engine_backends.folder import INLINE
from tests.fleet import SERVICES, Fleet, plain_redis
from tests.mcp_servers.ledger import VARIABLE
from tests.observability.prometheus import Prometheus
from tests.observability.queries import plain, targets
from tests.observability.rules import FILES, alerts, bare, recorded
from tests.openai_server.driver import OpenAIServer, answer, failing
from tests.servers.process import Server
from weft import SubmitOptions

pytestmark = pytest.mark.timeout(400)

WAIT = 120.0
"""Patience of a test, which decides nothing."""
WINDOW = "1m"
"""In place of Grafana's; no series is older."""
GATEWAYS = {"ray-gateway": "ray", "spark-gateway": "spark"}
EMPTY = {
    "delta(weft_stream_oldest_waiting_seconds": "looks back five minutes",
}
"""What may be without a value in a young Prometheus, by a part of the query, with the reason."""
OF_THE_MACHINE = {"WeftEventLoopBlocked", "WeftHeartbeatOld", "WeftBrokerSlow"}
"""Alerts that a busy machine may bring near to firing."""


@pytest.mark.slow
async def test_every_query_returns_series_and_no_alert_fires_without_a_problem(
    own_server: OwnServer,
    openai_server: OpenAIServer,
    prometheus_command: tuple[str, ...],
    namespace: str,
    tmp_path: Path,
) -> None:
    broker = own_server(options=("--maxmemory", "256mb"))
    openai_server.play(failing(503, times=1), answer("Rain."))
    async with services(broker, openai_server, namespace, tmp_path) as (fleet, client):
        addresses = addresses_of(fleet)
        with Prometheus(prometheus_command, tmp_path / "prometheus", addresses, FILES) as prometheus:
            await nothing_fires(prometheus, len(addresses), "at a fresh start")
            for number in range(10):
                assert (await (await client.submit("idle", str(number))).result(timeout=WAIT)).value() == str(number)
            await nothing_fires(prometheus, len(addresses), "after tasks that went well")

            load = asyncio.create_task(loaded(client, broker, namespace))
            try:
                await all_give_series(prometheus)
                await fires(prometheus, "WeftDeadLetters")
            finally:
                # Again, until it ends: redis-py waits within `asyncio.wait_for`, which may swallow a cancellation.
                while not load.done():
                    load.cancel()
                    await asyncio.wait((load,), timeout=1)


@asynccontextmanager
async def services(
    broker: Server, openai_server: OpenAIServer, namespace: str, folder: Path
) -> AsyncIterator[tuple[Fleet, Client]]:
    """All services and both gateways, two state-managers (one leads), and a client."""
    engine = Files(folder / "engine")
    engine.folder.mkdir()
    engine.up()
    environ = {
        **openai_server.environ,
        "WEFT_METRICS_PORT": "0",
        ENGINE_FOLDER: str(engine.folder),
        INLINE: "1",
        VARIABLE: str(folder / "ledger"),
    }
    fleet = Fleet(
        broker.url,
        namespace,
        folder / "fleet",
        replicas={**dict.fromkeys(SERVICES, 1), "state-manager": 2, **dict.fromkeys(GATEWAYS, 1)},
        # Nobody is declared dead on a machine that is busy.
        lease_seconds=10.0,
        app="tests.observability.busy_app:app",
        environ=environ,
        commands={service: ("tests.engine_backends.gateway", name) for service, name in GATEWAYS.items()},
    )
    async with fleet, Client.connect(broker.url, namespace=namespace) as client:
        yield fleet, client


def addresses_of(fleet: Fleet) -> list[str]:
    return [re.findall(r"metrics and health on http://(\S+)", fleet.members[name].text())[-1] for name in fleet.names()]


async def loaded(client: Client, broker: Server, namespace: str) -> None:
    """Submit tasks of every kind, until it is cancelled."""
    number = 0
    await Publishers(client.buses[0]).set(Publisher(name="shop", tenant="acme"))
    async with plain_redis(broker.port) as redis:
        while True:
            number += 1
            cancelled = await client.submit("naps", 600.0)
            started = [
                await client.submit("well", "ray"),
                await client.submit("well", "spark"),
                await client.submit("idle", "x", options=SubmitOptions(hooks={"agent_started": ["fails_itself"]})),
                await client.submit("asks", f"Question {number}"),
                await client.submit("badly", None),
                await client.submit("desk", {"type": "str", "data": "a"}, key="one"),
            ]
            for body in ({"agent": "idle", "input": "x"}, {"agent": "nobody", "input": "x"}):
                event = {
                    "specversion": "1.0", "id": f"{body['agent']}-{number}", "type": "weft.task.submit",
                    "source": "/test", "data": body,
                }  # fmt: skip
                await redis.xadd(f"{namespace}:tasks", {"data": json.dumps(event)})
                answered = json.dumps({**event, "replyto": "shop:answers"})
                await redis.xadd(f"{namespace}:tasks:shop", {"data": answered})
            await cancelled.cancel()
            for task in started:
                await task.result(timeout=WAIT)


async def nothing_fires(prometheus: Prometheus, services: int, when: str) -> None:
    """Wait until all services are scraped and all alerts are evaluated. None may fire, even for a moment."""
    deadline = time.monotonic() + WAIT
    while True:
        seen = await asyncio.to_thread(
            prometheus.query, "count(weft_build_info) and on() weft_measured_timestamp_seconds"
        )
        states = {rule["name"]: rule for rule in await asyncio.to_thread(prometheus.rules_now)}
        loud = {name for name, rule in states.items() if rule["state"] != "inactive"} - OF_THE_MACHINE
        judged = {name for name, rule in states.items() if rule["health"] == "ok"}
        if judged == alerts().keys() and seen and float(seen[0]["value"][1]) == services and not loud:
            break
        assert time.monotonic() < deadline, f"{when}: {loud} of {len(judged)}; seen: {seen}; {prometheus.log()}"
        await asyncio.sleep(0.2)
    ever = await asyncio.to_thread(prometheus.query, 'count_over_time(ALERTS{alertstate="firing"}[10m])')
    assert [each["metric"] for each in ever] == [], when


async def all_give_series(prometheus: Prometheus) -> None:
    wanted = dict(asked())
    deadline = time.monotonic() + WAIT
    while wanted:
        for place, expr in list(wanted.items()):
            if has_value(await asyncio.to_thread(prometheus.query, expr)):
                del wanted[place]
        assert time.monotonic() < deadline or not wanted, "no series:\n" + "\n".join(
            f"{place}: {expr}" for place, expr in wanted.items()
        )
        await asyncio.sleep(0.5)  # about as often as it scrapes


def asked() -> Iterable[tuple[str, str]]:
    """Every query by its place: of panels, of the variables of dashboards, of alerts and of recorded series."""
    for target in targets():
        yield target.place, plain(target.expr, WINDOW)
    for path in FOLDER.glob("*.json"):
        for variable in json.loads(path.read_text(encoding="utf-8"))["templating"]["list"][1:]:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found is not None, variable["name"]
            query, label = found.groups()
            # A series without the label is none to choose by.
            selected = re.sub(r"\}?$", f',{label}!=""}}' if query.endswith("}") else f'{{{label}!=""}}', query, count=1)
            yield f"{path.stem} / ${variable['name']}", selected
    for name, rule in {**alerts(), **recorded()}.items():
        expr = bare(rule["expr"])
        if not any(part in expr for part in EMPTY):
            yield name, expr


def has_value(samples: list[dict[str, object]]) -> bool:
    """Whether one of them has a numeric value."""
    return any(not math.isnan(float(sample["value"][1])) for sample in samples)  # type: ignore[index]


async def fires(prometheus: Prometheus, name: str) -> None:
    """Wait until the load makes an alert fire, and check its text."""
    deadline = time.monotonic() + WAIT
    while not (firing := [rule for rule in await asyncio.to_thread(prometheus.rules_now) if rule["name"] == name])[0][
        "alerts"
    ]:
        assert time.monotonic() < deadline, f"{name} does not fire"
        await asyncio.sleep(0.2)
    described = firing[0]["alerts"][0]["annotations"]["description"]
    assert re.fullmatch(r"About \d+ deliveries of [a-z-]+ were given up in ten minutes, as [a-z_]+\.", described)
