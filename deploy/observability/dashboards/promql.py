"""Queries as text, from the names of metrics. Every aggregation names its labels: replicas add up, or the worst counts.

Counters are summed over processes. Gauges that the leader of a partition shows are taken by `worst`: for one scrape
after a change of the lead two processes may show them, and a sum would count twice.
"""

from __future__ import annotations

from runtime_core.telemetry.names import MetricName, MetricType

WINDOW = "$__rate_interval"
"""Grafana's rate interval, at least four scrapes."""
RANGE = "$__range"
"""All that the page shows."""
QUANTILES = (0.5, 0.95, 0.99)

# What the client library and Prometheus itself show.
CPU_SECONDS = MetricName("process_cpu_seconds_total", MetricType.COUNTER, "")
MEMORY_BYTES = MetricName("process_resident_memory_bytes", MetricType.GAUGE, "")
OPEN_FILES = MetricName("process_open_fds", MetricType.GAUGE, "")
ALERTS = MetricName("ALERTS", MetricType.GAUGE, "")
ALERTS_SINCE = MetricName("ALERTS_FOR_STATE", MetricType.GAUGE, "")
"""When an alert became active, as seconds since 1970; without the label `alertstate`."""


def series(metric: MetricName, where: str = "") -> str:
    """The metric where labels are so, as in `service="tool-handler",instance=~"$instance"`."""
    return f"{metric.name}{{{where}}}" if where else metric.name


def rate(metric: MetricName, where: str = "", by: str = "", window: str = WINDOW) -> str:
    """How often a second, over all processes."""
    return f"sum{_by(by)} (rate({series(metric, where)}[{window}]))"


def increase(metric: MetricName, where: str = "", by: str = "", window: str = RANGE) -> str:
    """How many in this window, for a share. Not a whole number: Prometheus counts on to the edges of the window."""
    return f"sum{_by(by)} (increase({series(metric, where)}[{window}]))"


def number(metric: MetricName, where: str = "", by: str = "") -> str:
    """How many in all that the page shows, as a whole number."""
    return f"round({increase(metric, where, by)})"


def quantile(share: float, metric: MetricName, where: str = "", by: str = "", window: str = WINDOW) -> str:
    """Return a quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    buckets = MetricName(f"{metric.name}_bucket", MetricType.COUNTER, "")
    return f"histogram_quantile({share:g}, {rate(buckets, where, labels, window)})"


def counted(metric: MetricName) -> MetricName:
    """How many observations a histogram has, as a counter."""
    return MetricName(f"{metric.name}_count", MetricType.COUNTER, "")


def worst(metric: MetricName, where: str = "", by: str = "") -> str:
    """The largest value of a gauge over all processes."""
    return f"max{_by(by)} ({series(metric, where)})"


def least(metric: MetricName, where: str = "", by: str = "") -> str:
    """The smallest value of a gauge over all processes."""
    return f"min{_by(by)} ({series(metric, where)})"


def total(metric: MetricName, where: str = "", by: str = "") -> str:
    """The sum of a gauge that each process has for itself."""
    return f"sum{_by(by)} ({series(metric, where)})"


def over_partitions(metric: MetricName, where: str = "") -> str:
    """The sum over partitions of a gauge that the leader of each shows."""
    return f"sum ({worst(metric, where, 'partition')})"


def share(part: str, whole: str) -> str:
    """Return the ratio of a part to the whole, from 0 to 1; no data if the whole is 0."""
    return f"{part} / ({whole} > 0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
