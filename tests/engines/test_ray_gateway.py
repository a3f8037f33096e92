"""The ray-gateway as a process, with a real Ray: steps and their results, even across a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.engines_app import LARGE_INPUTS
from tests.engine_backends.world import World, world
from tests.engines.ray_cluster import RayCluster
from tests.engines.spans import are_one_tree
from tests.servers.otlp_receiver import OtlpReceiver
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)


async def test_steps_go_to_ray_and_back_and_run_on_without_their_gateway(
    ray_cluster: RayCluster, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    with OtlpReceiver() as receiver:
        environ = {**ray_cluster.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        async with world(valkey, namespace, tmp_path, environ=environ, real=True, lease_seconds=2.0) as here:
            await here.connected("ray-gateway")
            await are_one_tree(here, receiver, "ray")
            await go_and_run_on(here)


async def go_and_run_on(here: World) -> None:
    maps = await here.client.submit("maps", None)
    wrong = await here.step("double", number="many")
    assert "arguments.number" in str((await here.result(wrong)).error)
    whole, some, failed, empty, large, unknown = (await here.result(maps)).value()
    assert (whole, some, empty) == ([1, 2, 3], [1, "ValueError: 3 is odd", 2], [])
    assert failed == "ValueError: item 1: 3 is odd (2 of 3 failed)"
    assert (large[0], "weft.reference" in large[1], "weft.reference" in large[2]) == ("x", True, True)
    assert unknown.startswith("UnknownName: ")

    inputs = await here.client.submit("large_inputs", "ray")
    assert (await here.result(inputs)).value() == LARGE_INPUTS

    cancelled, held = await here.held("cancelled"), await here.held("held")
    await cancelled.cancel()
    await here.until(lambda: here.stopped("cancelled"), "the cancelled one has been stopped")

    here.fleet.kill("ray-gateway-1")
    gateway = here.fleet.members["ray-gateway-1"]
    await here.until(lambda: gateway.text().count("connected to Ray") == 2, "the next gateway is connected")
    here.open_gate()
    assert (await here.result(held)).value() == "held"
    assert len(here.lines("held", "held")) == 1, "it ran once"
