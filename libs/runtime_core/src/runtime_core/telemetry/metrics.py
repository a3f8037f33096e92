"""The metrics of one process, with its own registry."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime_core.telemetry import names
from runtime_core.telemetry.names import MetricName, MetricType, Sample

FRESH_SECONDS = 15.0
"""How long a partition's values are exported after a measurement: a few measurements may fail."""


class PartitionMetrics(Collector):
    """The latest values of each partition that this process leads. `monotonic` returns seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._taken: dict[int, tuple[float, Callable[[], bool], Sequence[Sample]]] = {}

    def put(self, partition: int, samples: Sequence[Sample], leads: Callable[[], bool]) -> None:
        """Export these values instead of the last ones, while `leads()` is true."""
        self._taken[partition] = (self._monotonic(), leads, samples)

    def drop(self, partition: int) -> None:
        """Stop exporting this partition."""
        self._taken.pop(partition, None)

    def collect(self) -> Iterable[Metric]:
        """Yield one family per metric with values, for the registry."""
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
    make = CounterMetricFamily if metric.kind is MetricType.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MOST_TOOLS = 500
"""Tools with their own series in one process."""

Key = TypeVar("Key")
Child = TypeVar("Child")


class Children(dict[Key, Child], Generic[Key, Child]):
    """The children of a metric by label value: the first use of a value creates one, later uses look it up.

    `metrics.events_handled["completed"].inc()` costs a quarter of `labels(…).inc()`.
    """

    def __init__(self, make: Callable[[Key], Child]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Child:
        child = self[key] = self._make(key)
        return child


class Count:
    """A counter of one series, for the event loop's thread only: unlike the library's, it takes no lock."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Times:
    """A histogram of one series, in seconds, for the event loop's thread only, like `Count`."""

    __slots__ = ("_buckets", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._buckets = [0] * (len(names.SECONDS_BUCKETS) + 1)

    def observe(self, seconds: float) -> None:
        self._sum += seconds
        self._buckets[bisect_left(names.SECONDS_BUCKETS, seconds)] += 1

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this series to a scrape."""
        total, buckets = 0, []
        for bound, count in zip(_BOUNDS, self._buckets, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(labels, buckets, self._sum)


_BOUNDS: list[str] = [
    floatToGoString(bound)  # type: ignore[no-untyped-call]  # the library gives it no types
    for bound in (*names.SECONDS_BUCKETS, float("inf"))
]


class Series(Collector):
    """The series of one counter or histogram. Updating the library's objects would cost up to nine more calls."""

    def __init__(self, metric: MetricName) -> None:
        self._metric = metric
        self._counts: dict[tuple[str, ...], Count] = {}
        self._times: dict[tuple[str, ...], Times] = {}

    def count(self, *labels: object) -> Count:
        """Return the counter of these labels. Raises ValueError if their number is wrong."""
        return self._counts.setdefault(self._checked(labels), Count())

    def times(self, *labels: object) -> Times:
        """Return the histogram of these labels. Raises ValueError if their number is wrong."""
        return self._times.setdefault(self._checked(labels), Times())

    def _checked(self, labels: tuple[object, ...]) -> tuple[str, ...]:
        if len(labels) != len(self._metric.labels):
            raise ValueError(f"{self._metric.name} has the labels {self._metric.labels}, not {labels!r}")
        return tuple(map(str, labels))

    def collect(self) -> Iterable[Metric]:
        """Yield the series at a scrape, for the registry."""
        metric = self._metric
        if metric.kind is MetricType.COUNTER:
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, count in list(self._counts.items()):
                counter.add_metric(labels, count.value)
            return [counter]
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, times in list(self._times.items()):
            times.add_to(histogram, labels)
        return [histogram]


class Leading(Protocol):
    """A leader of a role."""

    @property
    def leads(self) -> bool: ...


class Metrics:
    """The metrics of a service. Each object has its own registry.

    Durations are in seconds. Functions given to `set_function(…)` are called at every scrape.
    """

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        # A global setting of the library. The `_created` series would double the size of a scrape.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library gives it no types
        self.registry = registry
        self.service = service

        def series(name: MetricName) -> Series:
            made = Series(name)
            registry.register(made)
            return made

        def gauge(name: MetricName) -> Gauge:
            return Gauge(name.name, name.help, name.labels, registry=registry)

        handled, dead = series(names.EVENTS_HANDLED), series(names.DEAD_LETTERS)
        self.events_handled: Children[str, Count] = Children(lambda outcome: handled.count(service, outcome))
        self.dead_letters: Children[str, Count] = Children(lambda reason: dead.count(service, reason))
        hooks = series(names.HOOK_FAILURES)
        self.hook_failures: Children[str, Count] = Children(lambda point: hooks.count(service, point))
        self.handler_seconds = series(names.HANDLER_SECONDS).times(service)
        self.commit_seconds = series(names.COMMIT_SECONDS).times(service)
        self.retries = series(names.RETRIES).count(service)
        self.fenced_commits = series(names.FENCED_COMMITS).count(service)
        self.duplicates_suppressed = series(names.DUPLICATES_SUPPRESSED).count(service)
        self.adopted_deliveries = series(names.ADOPTED_DELIVERIES).count(service)
        self.in_flight = gauge(names.IN_FLIGHT).labels(service)
        self.heartbeat_age = gauge(names.HEARTBEAT_AGE).labels(service)
        self.broker_connected = gauge(names.BROKER_CONNECTED).labels(service)
        self.stalled = gauge(names.STALLED).labels(service)
        self.quarantine = gauge(names.QUARANTINE).labels(service)
        self.loop_lag = gauge(names.LOOP_LAG).labels(service)
        dropped = names.SPANS_DROPPED
        self.spans_dropped = Counter(dropped.name, dropped.help, dropped.labels, registry=registry).labels(service)
        """A counter of the library: the span exporter counts in a thread."""
        lead = gauge(names.IS_LEADER)
        self.lead: Children[str, Gauge] = Children(lambda partition: lead.labels(service, partition))

        turns, turn_seconds = series(names.AGENT_TURNS), series(names.AGENT_TURN_SECONDS)
        self.agent_turns: Children[tuple[str, str], Count] = Children(lambda key: turns.count(*key))
        """By (agent, outcome)."""
        self.agent_turn_seconds: Children[str, Times] = Children(lambda agent: turn_seconds.times(agent))
        tool_calls, tool_seconds = series(names.TOOL_CALLS), series(names.TOOL_CALL_SECONDS)
        self.tool_calls: Children[tuple[str, str], Count] = Children(lambda key: tool_calls.count(*key))
        """By (tool, outcome)."""
        self.tool_call_seconds: Children[str, Times] = Children(lambda tool: tool_seconds.times(tool))

        self._tools: set[str] = set()
        self.measured = PartitionMetrics()
        """Measurements of the partitions that this process leads."""
        registry.register(self.measured)
        ended, task_seconds = series(names.TASKS_ENDED), series(names.TASK_SECONDS)
        self.tasks_ended: Children[tuple[str, str], Count] = Children(lambda key: ended.count(*key))
        """By (agent, status)."""
        self.task_seconds: Children[str, Times] = Children(lambda status: task_seconds.times(status))
        refused, recorded = series(names.TASKS_REFUSED), series(names.RECORDED_ENTRIES)
        self.tasks_refused: Children[tuple[str, str], Count] = Children(lambda key: refused.count(*key))
        """By (partition, reason)."""
        self.recorded_entries: Children[str, Count] = Children(lambda partition: recorded.count(partition))
        trimmed = series(names.ANSWERS_TRIMMED)
        self.answers_trimmed: Children[str, Count] = Children(lambda publisher: trimmed.count(publisher))
        commits = series(names.RECORDER_COMMIT_SECONDS)
        self.recorder_commit_seconds: Children[str, Times] = Children(lambda partition: commits.times(partition))

        up, lost, calls = gauge(names.MCP_SERVER_UP), series(names.MCP_RESTARTS), series(names.MCP_CALLS)
        self.mcp_server_up: Children[str, Gauge] = Children(lambda server: up.labels(server))
        self.mcp_restarts: Children[str, Count] = Children(lambda server: lost.count(server))
        self.mcp_calls: Children[tuple[str, str], Count] = Children(lambda key: calls.count(*key))
        """By (server, outcome)."""
        model_calls, call_seconds = series(names.MODEL_CALLS), series(names.MODEL_CALL_SECONDS)
        self.model_calls: Children[tuple[str, str, str], Count] = Children(lambda key: model_calls.count(*key))
        """By (provider, model, outcome)."""
        self.model_call_seconds: Children[tuple[str, str], Times] = Children(lambda key: call_seconds.times(*key))
        """By (provider, model), as is the next one."""
        first = series(names.MODEL_FIRST_CHUNK_SECONDS)
        self.model_first_chunk_seconds: Children[tuple[str, str], Times] = Children(lambda key: first.times(*key))
        tokens, cost = series(names.MODEL_TOKENS), series(names.MODEL_COST)
        self.model_tokens: Children[tuple[str, str], Count] = Children(lambda key: tokens.count(*key))
        """By (model, `input`, `output`, `cached` or `reasoning`)."""
        self.model_cost: Children[str, Count] = Children(lambda model: cost.count(model))

        steps, step_seconds = series(names.ENGINE_STEPS), series(names.ENGINE_STEP_SECONDS)
        self.engine_steps: Children[tuple[str, str], Count] = Children(lambda key: steps.count(*key))
        """By (engine, end)."""
        self.engine_step_seconds: Children[str, Times] = Children(lambda engine: step_seconds.times(engine))
        running, connected = gauge(names.ENGINE_RUNNING), gauge(names.ENGINE_CONNECTED)
        self.engine_running: Children[str, Gauge] = Children(lambda engine: running.labels(engine))
        self.engine_connected: Children[str, Gauge] = Children(lambda engine: connected.labels(engine))
        starts, memory = series(names.ENGINE_DRIVER_STARTS), gauge(names.ENGINE_DRIVER_MEMORY)
        self.engine_driver_starts: Children[str, Count] = Children(lambda engine: starts.count(engine))
        self.engine_driver_memory: Children[str, Gauge] = Children(lambda engine: memory.labels(engine))

        for outcome in names.OUTCOMES.get(service, ()):
            self.events_handled[outcome]
        for reason in names.REASONS.get(service, ()):
            self.dead_letters[reason]

        gauge(names.BUILD_INFO).labels(service, version(), platform.python_version()).set(1)
        ProcessCollector(registry=registry)

    def tool_label(self, tool: str) -> str:
        """Return the label of a tool: its name, or `other` beyond the limit, since MCP servers may rename tools."""
        if tool not in self._tools and len(self._tools) < MOST_TOOLS:
            self._tools.add(tool)
        return tool if tool in self._tools else "other"

    def show_owner(self, silent_seconds: Callable[[], float], lease_seconds: float) -> None:
        """Export the age of the last confirmed heartbeat, and whether the broker is connected."""
        self.heartbeat_age.set_function(silent_seconds)
        self.broker_connected.set_function(lambda: float(silent_seconds() < lease_seconds))

    def show_lead(self, partition: int, leader: Leading) -> None:
        """Export whether this process leads a partition."""
        self.lead[str(partition)].set_function(lambda: float(leader.leads))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, whose media type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)


def version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("weft")
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
