"""Prometheus' own tool accepts the metrics that services expose."""

from __future__ import annotations

import subprocess

import pytest

from tests.observability.every_metric import every_metric

SERVICES = ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder", "ray-gateway", "spark-gateway")


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_reads_the_metrics_of_each_service(service: str, promtool_command: tuple[str, ...]) -> None:
    shown = every_metric(service).exposition()
    done = subprocess.run(
        [*promtool_command, "check", "metrics"], input=shown, capture_output=True, timeout=100, check=False
    )
    said = (done.stdout + done.stderr).decode()
    assert (done.returncode, said) == (0, "")
