"""What the leader of a partition has measured on the broker, shown for as long as it leads and the values are fresh.

Objects of the Prometheus client keep their last value for ever. Of two replicas both would show a partition then, and
one that has lost its broker would show work that is long done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime_core.telemetry.names import Kind, MetricName

FRESH_SECONDS = 15.0
"""How long a partition's values are shown after the look that gave them: a few looks may fail."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series; `labels` in the order of the metric's own, without the partition, which comes first."""

    metric: MetricName
    value: float
    labels: tuple[str, ...] = ()


class Measured(Collector):
    """The latest values of each partition that this process leads; `monotonic` gives seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._taken: dict[int, tuple[float, Callable[[], bool], Sequence[Sample]]] = {}

    def put(self, partition: int, samples: Sequence[Sample], leads: Callable[[], bool]) -> None:
        """Show these values instead of the last ones, while `leads()`."""
        self._taken[partition] = (self._monotonic(), leads, samples)

    def drop(self, partition: int) -> None:
        """Show nothing of this partition any more."""
        self._taken.pop(partition, None)

    def collect(self) -> Iterable[Metric]:
        """For the registry: one family for each metric that has values."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for partition, sample in self._shown():
            family = families.get(sample.metric.name)
            if family is None:
                family = families[sample.metric.name] = _family(sample.metric)
            family.add_metric((str(partition), *sample.labels), sample.value)
        return families.values()

    def _shown(self) -> Iterator[tuple[int, Sample]]:
        now = self._monotonic()
        for partition, (taken, leads, samples) in self._taken.items():
            if now - taken <= FRESH_SECONDS and leads():
                for sample in samples:
                    yield partition, sample


def _family(metric: MetricName) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)
