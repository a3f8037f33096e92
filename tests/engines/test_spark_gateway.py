"""The spark-gateway as a process, with a real Spark: steps and their results, even across a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.engines_app import LARGE_INPUTS
from tests.engine_backends.world import World, world
from tests.engines.conftest import SparkServer
from tests.engines.spans import are_one_tree
from tests.servers.otlp_receiver import OtlpReceiver
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)


async def test_steps_go_to_spark_and_back_and_outlive_their_gateway(
    spark: SparkServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    with OtlpReceiver() as receiver:
        environ = {"WEFT_SPARK_REMOTE": spark.url, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        async with world(
            valkey, namespace, tmp_path, engine="spark", environ=environ, real=True, lease_seconds=2.0
        ) as here:
            await here.connected("spark-gateway")
            await are_one_tree(here, receiver, "spark")
            await go_and_outlive(here)


async def go_and_outlive(here: World) -> None:
    # A job beside the driver, and a function on an executor.
    job = await here.step("count", "spark", number=7)
    function = await here.step("double", "spark", number=4)
    wrong = await here.step("count", "spark", number="many")
    assert (await here.result(job)).value() == 7
    assert (await here.result(function)).value() == 8
    assert "arguments.number" in str((await here.result(wrong)).error)

    inputs = await here.client.submit("large_inputs", "spark")
    assert (await here.result(inputs)).value() == [*LARGE_INPUTS, 200_000]

    cancelled, held = await here.held("cancelled", "spark"), await here.held("held", "spark")
    await cancelled.cancel()
    await here.until(lambda: here.stopped("cancelled"), "the cancelled one has been stopped")

    here.fleet.kill("spark-gateway-1")
    await here.until(lambda: len(here.lines("held", "held")) == 2, "the other one runs again")
    here.open_gate()
    assert (await here.result(held)).value() == "held"
    first, second = (line.split()[1] for line in here.lines("held", "held"))
    assert first == second, "the idempotency key is the same"
