"""A process's metrics with a series of each."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry

from runtime_core.telemetry import names
from runtime_core.telemetry.metrics import Children, Metrics
from runtime_core.telemetry.names import Sample


def every_metric(service: str) -> Metrics:
    """Return a service's metrics, each with at least one series. Labels that nothing else sets are `x`."""
    metrics = Metrics(CollectorRegistry(), service)
    for children in (value for value in vars(metrics).values() if isinstance(value, Children)):
        for key in ("x", ("x", "x"), ("x", "x", "x")):
            with contextlib.suppress(ValueError):  # another number of labels
                children[key]
    own = [name for name in names.ALL if name.by == names.LEADER]
    metrics.measured.put(0, [Sample(name, 1, ("x",) * (len(name.labels) - 1)) for name in own], lambda: True)
    return metrics
